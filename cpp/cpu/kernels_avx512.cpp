// The kernel set for AVX-512 (F, BW, DQ, VL): one register holds the 16 lanes.
#include <immintrin.h>

#include "kernel_set.hpp"

namespace addlora::cpu {
namespace {

constexpr const char* kName = "avx512";
constexpr int64_t kTileRows = 6;
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

template <class T>
inline void transpose_block(const T* from, int64_t from_stride, float* to, int64_t to_stride) {
  const char* rows = reinterpret_cast<const char*>(from);
  V v[16], w[16];
  for (int i = 0; i < 16; ++i) v[i] = load(reinterpret_cast<const T*>(rows + i * from_stride));
  for (int i = 0; i < 16; i += 2) {
    w[i] = _mm512_unpacklo_ps(v[i], v[i + 1]);
    w[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      const __m512d low = _mm512_castps_pd(w[i + j]);
      const __m512d high = _mm512_castps_pd(w[i + j + 2]);
      v[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      v[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  }
  // v[4i + j] holds, in 128-bit lane q, column 4q + j of rows 4i .. 4i+3.
  for (int j = 0; j < 4; ++j) {
    const V ab_low = _mm512_shuffle_f32x4(v[j], v[4 + j], 0x88);
    const V ab_high = _mm512_shuffle_f32x4(v[j], v[4 + j], 0xdd);
    const V cd_low = _mm512_shuffle_f32x4(v[8 + j], v[12 + j], 0x88);
    const V cd_high = _mm512_shuffle_f32x4(v[8 + j], v[12 + j], 0xdd);
    store(to + j * to_stride, _mm512_shuffle_f32x4(ab_low, cd_low, 0x88));
    store(to + (4 + j) * to_stride, _mm512_shuffle_f32x4(ab_high, cd_high, 0x88));
    store(to + (8 + j) * to_stride, _mm512_shuffle_f32x4(ab_low, cd_low, 0xdd));
    store(to + (12 + j) * to_stride, _mm512_shuffle_f32x4(ab_high, cd_high, 0xdd));
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
