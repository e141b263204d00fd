// float16 and bfloat16 as bits, converted with rounding to nearest, ties to even.
#pragma once

#include <cstdint>
#include <cstring>

namespace emu {

inline uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu;
  const uint32_t mantissa = half & 0x3ffu;
  if (exponent == 0x1f) return float_from_bits(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return float_from_bits(sign | ((exponent + 112) << 23) | (mantissa << 13));
  // Subnormals are multiples of 2^-24, which a float holds exactly.
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}

inline uint16_t float_to_half(float value) {
  const uint32_t bits = float_bits(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  // 65520 is halfway between the largest half and what would follow it.
  if (magnitude >= float_bits(65520.0f)) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < float_bits(0x1p-14f)) {
    // Adding 0.5 leaves a float whose last bit is worth 2^-24, so the addition itself rounds to a subnormal half.
    const float rounded = float_from_bits(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (float_bits(rounded) - float_bits(0.5f)));
  }
  const uint32_t odd = (magnitude >> 13) & 1u;
  const uint32_t rounded = magnitude - (112u << 23) + 0xfffu + odd;
  return static_cast<uint16_t>(sign | (rounded >> 13));
}

inline float bfloat_to_float(uint16_t bfloat) { return float_from_bits(static_cast<uint32_t>(bfloat) << 16); }

inline uint16_t float_to_bfloat(float value) {
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace emu
