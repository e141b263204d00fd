// The kernel set for AVX2, FMA and F16C: two registers hold the 16 lanes.
#include <cpuid.h>
#include <immintrin.h>

#include "kernel_set.hpp"

namespace addlora::cpu {
namespace {

constexpr const char* kName = "avx2";
constexpr int kTileRows = 2;
constexpr int kTileVectors = 2;
constexpr int kTileSums = 4;

struct V {
  __m256 low, high;
};

inline V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline V broadcast(float f) { return {_mm256_set1_ps(f), _mm256_set1_ps(f)}; }
inline V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)}; }
inline V mul(V a, V b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }

inline __m128i load_words(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline void store_words(void* p, __m128i v) { _mm_storeu_si128(static_cast<__m128i*>(p), v); }

inline __m256 load8(const float* p) { return _mm256_loadu_ps(p); }
inline __m256 load8(const Half* p) { return _mm256_cvtph_ps(load_words(p)); }
inline __m256 load8(const Bfloat* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_words(p)), 16));
}
template <class T>
inline V load(const T* p) {
  return {load8(p), load8(p + 8)};
}

inline __m128i to_half(__m256 v) { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
inline void store8(float* p, __m256 v) { _mm256_storeu_ps(p, v); }
inline void store8(Half* p, __m256 v) { store_words(p, to_half(v)); }
inline void store8(Bfloat* p, __m256 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i chosen = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(chosen, chosen), 0x88);
  store_words(p, _mm256_castsi256_si128(packed));
}
template <class T>
inline void store(T* p, V v) {
  store8(p, v.low);
  store8(p + 8, v.high);
}

inline V round_half(V v) { return {_mm256_cvtph_ps(to_half(v.low)), _mm256_cvtph_ps(to_half(v.high))}; }

inline float reduce(V v) {
  const __m256 eight = _mm256_add_ps(v.low, v.high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// to[j] = column j of 8 x 8 values.
template <class T>
inline void load_columns_8x8(const char* from, int64_t stride, __m256 (&to)[8]) {
  __m256 v[8];
  for (int i = 0; i < 8; ++i) to[i] = load8(reinterpret_cast<const T*>(from + i * stride));
  for (int i = 0; i < 8; i += 2) {
    v[i] = _mm256_unpacklo_ps(to[i], to[i + 1]);
    v[i + 1] = _mm256_unpackhi_ps(to[i], to[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    to[i] = _mm256_shuffle_ps(v[i], v[i + 2], 0x44);
    to[i + 1] = _mm256_shuffle_ps(v[i], v[i + 2], 0xee);
    to[i + 2] = _mm256_shuffle_ps(v[i + 1], v[i + 3], 0x44);
    to[i + 3] = _mm256_shuffle_ps(v[i + 1], v[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_permute2f128_ps(to[i], to[i + 4], 0x20);
    v[i + 4] = _mm256_permute2f128_ps(to[i], to[i + 4], 0x31);
  }
  for (int i = 0; i < 8; ++i) to[i] = v[i];
}

template <class T>
inline void load_columns(const T* from, int64_t stride, V* to) {
  const char* rows = reinterpret_cast<const char*>(from);
  for (int64_t j = 0; j < 16; j += 8) {
    __m256 v[8];
    load_columns_8x8<T>(rows + j * static_cast<int64_t>(sizeof(T)), stride, v);
    for (int64_t i = 0; i < 8; ++i) to[j + i].low = v[i];
    load_columns_8x8<T>(rows + 8 * stride + j * static_cast<int64_t>(sizeof(T)), stride, v);
    for (int64_t i = 0; i < 8; ++i) to[j + i].high = v[i];
  }
}

#include "kernel_body.inl"

bool supported() {
  // __builtin_cpu_supports does not know F16C in every compiler. It answers for the operating system too, so the
  // registers are usable where it says AVX2.
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
  return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

}  // namespace

const KernelSet kAvx2Kernels = {
    kName,     supported,    {shrink<Half>, shrink<Bfloat>, shrink<float>}, {expand<Half>, expand<Bfloat>, expand<float>},
    kTileSums, multiply_add, read};

}  // namespace addlora::cpu
