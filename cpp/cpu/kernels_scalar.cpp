// The kernel set for any CPU: the 16 lanes are an array. Fused multiply-add is the C library's where the CPU's is
// not in the base instruction set, slow but exact, so the bits are those of the other sets.
#include "kernel_set.hpp"

namespace addlora::cpu {
namespace {

constexpr const char* kName = "scalar";
constexpr int kTileRows = 1;
constexpr int kTileVectors = 4;
constexpr int kTileSums = 4;

struct V {
  float lane[16];
};

inline uint32_t bits_of(float f) {
  uint32_t bits;
  __builtin_memcpy(&bits, &f, sizeof bits);
  return bits;
}
inline float float_of(uint32_t bits) {
  float f;
  __builtin_memcpy(&f, &bits, sizeof f);
  return f;
}

inline float to_float(float f) { return f; }
inline float to_float(Bfloat b) { return float_of(static_cast<uint32_t>(b.bits) << 16); }
inline float to_float(Half h) {
  const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000) << 16;
  const uint32_t exponent = (h.bits >> 10) & 0x1f;
  const uint32_t fraction = h.bits & 0x3ff;
  if (exponent == 0x1f) return float_of(sign | 0x7f800000 | fraction << 13);
  if (exponent == 0) {
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return float_of(sign | bits_of(magnitude));
  }
  return float_of(sign | (exponent + 112) << 23 | fraction << 13);
}

inline void from_float(float f, float* to) { *to = f; }
inline void from_float(float f, Bfloat* to) {
  const uint32_t bits = bits_of(f);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  to->bits = static_cast<uint16_t>((nan ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void from_float(float f, Half* to) {
  const uint32_t bits = bits_of(f);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00 | (magnitude >> 13 & 0x3ff);
  } else if (magnitude >= 0x477ff000) {  // 65520, half way past the largest
    half = 0x7c00;
  } else if (magnitude < 0x38800000) {  // 2^-14: the sum rounds to a multiple of 2^-24, the subnormals' spacing
    half = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  } else {
    half = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  }
  to->bits = static_cast<uint16_t>(sign | half);
}

inline V broadcast(float f) {
  V v;
  for (float& lane : v.lane) lane = f;
  return v;
}
inline V zero() { return broadcast(0.0f); }
inline V fma(V a, V b, V c) {
  for (int i = 0; i < 16; ++i) c.lane[i] = __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]);
  return c;
}
inline V mul(V a, V b) {
  for (int i = 0; i < 16; ++i) a.lane[i] *= b.lane[i];
  return a;
}
template <class T>
inline V load(const T* p) {
  V v;
  for (int i = 0; i < 16; ++i) {
    T element;  // p need not be aligned
    __builtin_memcpy(&element, reinterpret_cast<const char*>(p) + i * sizeof(T), sizeof(T));
    v.lane[i] = to_float(element);
  }
  return v;
}
template <class T>
inline void store(T* p, V v) {
  for (int i = 0; i < 16; ++i) {
    T element;
    from_float(v.lane[i], &element);
    __builtin_memcpy(reinterpret_cast<char*>(p) + i * sizeof(T), &element, sizeof(T));
  }
}
inline V round_half(V v) {
  for (float& lane : v.lane) {
    Half half;
    from_float(lane, &half);
    lane = to_float(half);
  }
  return v;
}
inline float reduce(V v) {
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) v.lane[i] += v.lane[i + width];
  }
  return v.lane[0];
}
template <class T>
inline void load_columns(const T* from, int64_t stride, V* to) {
  for (int64_t i = 0; i < 16; ++i) {
    const V row = load(reinterpret_cast<const T*>(reinterpret_cast<const char*>(from) + i * stride));
    for (int64_t j = 0; j < 16; ++j) to[j].lane[i] = row.lane[j];
  }
}

#include "kernel_body.inl"

bool supported() { return true; }

}  // namespace

const KernelSet kScalarKernels = {
    kName,     supported,    {shrink<Half>, shrink<Bfloat>, shrink<float>}, {expand<Half>, expand<Bfloat>, expand<float>},
    kTileSums, multiply_add, read};

}  // namespace addlora::cpu
