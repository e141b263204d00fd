// The kernel set for any 64-bit Arm CPU (Armv8.0): four registers hold the 16 lanes.
#include <arm_neon.h>

#include "kernel_set.hpp"

namespace addlora::cpu {
namespace {

constexpr const char* kName = "neon";
constexpr int kTileRows = 2;
constexpr int kTileVectors = 2;
constexpr int kTileSums = 4;  // 16 of the 32 registers

struct V {
  float32x4_t part[4];
};

inline V broadcast(float f) {
  const float32x4_t v = vdupq_n_f32(f);
  return {{v, v, v, v}};
}
inline V zero() { return broadcast(0.0f); }
inline V fma(V a, V b, V c) {
  for (int i = 0; i < 4; ++i) c.part[i] = vfmaq_f32(c.part[i], a.part[i], b.part[i]);
  return c;
}
inline V mul(V a, V b) {
  for (int i = 0; i < 4; ++i) a.part[i] = vmulq_f32(a.part[i], b.part[i]);
  return a;
}

// Elements need not be aligned to more than a byte: loads and stores of bytes, which the CPU does as fast.
inline uint16x4_t load_words(const void* p) { return vreinterpret_u16_u8(vld1_u8(static_cast<const uint8_t*>(p))); }
inline void store_words(void* p, uint16x4_t v) { vst1_u8(static_cast<uint8_t*>(p), vreinterpret_u8_u16(v)); }

inline float32x4_t load4(const float* p) {
  return vreinterpretq_f32_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(p)));
}
inline float32x4_t load4(const Half* p) { return vcvt_f32_f16(vreinterpret_f16_u16(load_words(p))); }
inline float32x4_t load4(const Bfloat* p) { return vreinterpretq_f32_u32(vshll_n_u16(load_words(p), 16)); }
template <class T>
inline V load(const T* p) {
  return {{load4(p), load4(p + 4), load4(p + 8), load4(p + 12)}};
}

inline void store4(float* p, float32x4_t v) { vst1q_u8(reinterpret_cast<uint8_t*>(p), vreinterpretq_u8_f32(v)); }
inline void store4(Half* p, float32x4_t v) { store_words(p, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
inline void store4(Bfloat* p, float32x4_t v) {
  const uint32x4_t bits = vreinterpretq_u32_f32(v);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
  store_words(p, vshrn_n_u32(vbslq_u32(vceqq_f32(v, v), rounded, quiet), 16));
}
template <class T>
inline void store(T* p, V v) {
  for (int i = 0; i < 4; ++i) store4(p + 4 * i, v.part[i]);
}

inline V round_half(V v) {
  for (float32x4_t& part : v.part) part = vcvt_f32_f16(vcvt_f16_f32(part));
  return v;
}

inline float reduce(V v) {
  const float32x4_t four = vaddq_f32(vaddq_f32(v.part[0], v.part[2]), vaddq_f32(v.part[1], v.part[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

// to[j] = column j of 4 x 4 values.
template <class T>
inline void load_columns_4x4(const char* from, int64_t stride, float32x4_t (&to)[4]) {
  float32x4_t v[4];
  for (int i = 0; i < 4; ++i) v[i] = load4(reinterpret_cast<const T*>(from + i * stride));
  const float32x4x2_t low = vtrnq_f32(v[0], v[1]);
  const float32x4x2_t high = vtrnq_f32(v[2], v[3]);
  for (int i = 0; i < 2; ++i) {
    to[i] = vcombine_f32(vget_low_f32(low.val[i]), vget_low_f32(high.val[i]));
    to[i + 2] = vcombine_f32(vget_high_f32(low.val[i]), vget_high_f32(high.val[i]));
  }
}

template <class T>
inline void load_columns(const T* from, int64_t stride, V* to) {
  const char* rows = reinterpret_cast<const char*>(from);
  for (int64_t j = 0; j < 16; j += 4) {
    for (int part = 0; part < 4; ++part) {
      float32x4_t v[4];
      load_columns_4x4<T>(rows + 4 * part * stride + j * static_cast<int64_t>(sizeof(T)), stride, v);
      for (int64_t i = 0; i < 4; ++i) to[j + i].part[part] = v[i];
    }
  }
}

#include "kernel_body.inl"

bool supported() { return true; }

}  // namespace

const KernelSet kNeonKernels = {
    kName, supported, {shrink<Half>, shrink<Bfloat>, shrink<float>}, {expand<Half>, expand<Bfloat>, expand<float>},
    kTileSums, multiply_add, read};

}  // namespace addlora::cpu
