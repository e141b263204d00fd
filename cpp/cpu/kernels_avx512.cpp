// The kernel set for AVX-512 (F, BW, DQ, VL): one register holds the 16 lanes.
#include <immintrin.h>

#include "kernel_set.hpp"

namespace addlora::cpu {
namespace {

constexpr const char* kName = "avx512";
constexpr int kTileRows = 6;
constexpr int kTileVectors = 4;
constexpr int kTileSums = 24;

using V = __m512;

inline V zero() { return _mm512_setzero_ps(); }
inline V broadcast(float f) { return _mm512_set1_ps(f); }
inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }

inline V load(const float* p) { return _mm512_loadu_ps(p); }
inline V load(const Half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline V load(const Bfloat* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

inline void store(float* p, V v) { _mm512_storeu_ps(p, v); }
inline __m256i to_half(V v) { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
inline void store(Half* p, V v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_half(v)); }
inline void store(Bfloat* p, V v) {
  // Not vcvtneps2bf16, which flushes subnormals.
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const __m512i chosen = _mm512_mask_blend_epi32(nan, rounded, quiet);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(chosen, 16)));
}

inline V round_half(V v) { return _mm512_cvtph_ps(to_half(v)); }

inline float reduce(V v) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// Four pieces of 16 bytes, `step` bytes apart. They go where they belong as they are loaded, which costs no shuffle.
inline __m512i load_pieces(const char* p, int64_t step) {
  const auto piece = [&](int64_t i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i * step)); };
  __m512i v = _mm512_castsi128_si512(piece(0));
  v = _mm512_mask_broadcast_i32x4(v, 0x00f0, piece(1));
  v = _mm512_mask_broadcast_i32x4(v, 0x0f00, piece(2));
  return _mm512_mask_broadcast_i32x4(v, 0xf000, piece(3));
}

// In each 128-bit lane: 4 x 4 words of 32 bits, transposed.
inline void transpose_words(__m512i (&v)[4]) {
  const __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
  const __m512i c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
  v[0] = _mm512_unpacklo_epi64(a, c);
  v[1] = _mm512_unpackhi_epi64(a, c);
  v[2] = _mm512_unpacklo_epi64(b, d);
  v[3] = _mm512_unpackhi_epi64(b, d);
}

inline void load_columns(const float* from, int64_t stride, V* to) {
  const char* rows = reinterpret_cast<const char*>(from);
  for (int j = 0; j < 4; ++j) {
    __m512i v[4];
    for (int i = 0; i < 4; ++i) v[i] = load_pieces(rows + i * stride + 16 * j, 4 * stride);
    transpose_words(v);
    for (int i = 0; i < 4; ++i) to[4 * j + i] = _mm512_castsi512_ps(v[i]);
  }
}
// A word is two neighbours.
inline void load_columns(const Bfloat* from, int64_t stride, V* to) {
  const char* rows = reinterpret_cast<const char*>(from);
  for (int j = 0; j < 2; ++j) {
    __m512i v[4];
    for (int i = 0; i < 4; ++i) v[i] = load_pieces(rows + i * stride + 16 * j, 4 * stride);
    transpose_words(v);
    for (int i = 0; i < 4; ++i) {
      to[8 * j + 2 * i] = _mm512_castsi512_ps(_mm512_slli_epi32(v[i], 16));
      to[8 * j + 2 * i + 1] =
          _mm512_castsi512_ps(_mm512_and_si512(v[i], _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
    }
  }
}
inline void load_columns(const Half* from, int64_t stride, V* to) {
  // Lanes: rows 0-7 and 8-15 of columns 0-7, then of columns 8-15.
  const char* rows = reinterpret_cast<const char*>(from);
  __m512i v[8], w[8];
  for (int i = 0; i < 8; ++i) {
    const auto piece = [&](int64_t row, int64_t byte) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + row * stride + byte));
    };
    v[i] = _mm512_castsi128_si512(piece(i, 0));
    v[i] = _mm512_mask_broadcast_i32x4(v[i], 0x00f0, piece(i + 8, 0));
    v[i] = _mm512_mask_broadcast_i32x4(v[i], 0x0f00, piece(i, 16));
    v[i] = _mm512_mask_broadcast_i32x4(v[i], 0xf000, piece(i + 8, 16));
  }
  for (int i = 0; i < 4; ++i) {
    w[i] = _mm512_unpacklo_epi16(v[2 * i], v[2 * i + 1]);
    w[i + 4] = _mm512_unpackhi_epi16(v[2 * i], v[2 * i + 1]);
  }
  for (int half = 0; half < 2; ++half) {
    __m512i(&quad)[4] = reinterpret_cast<__m512i(&)[4]>(w[4 * half]);
    transpose_words(quad);
    for (int i = 0; i < 4; ++i) {
      to[4 * half + i] = _mm512_cvtph_ps(_mm512_castsi512_si256(quad[i]));
      to[4 * half + i + 8] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(quad[i], 1));
    }
  }
}

#include "kernel_body.inl"

bool supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
}

}  // namespace

const KernelSet kAvx512Kernels = {
    kName,     supported,    {shrink<Half>, shrink<Bfloat>, shrink<float>}, {expand<Half>, expand<Bfloat>, expand<float>},
    kTileSums, multiply_add, read};

}  // namespace addlora::cpu
