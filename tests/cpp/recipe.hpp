// Inputs made by integer operations alone, so that tests/recipe.py makes the same ones, and a digest of the result.
//
// tests/data/digests.json holds the cases and the digest of each; CMake turns it into digests.inc.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "add_lora.hpp"

namespace recipe {

// splitmix64: every bit of the result depends on every bit of x.
inline std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

enum Kind { kNormal, kSubnormal, kAnyBaseRows };
enum Tensor { kY, kX, kB, kIndices, kA };

struct Case {
  const char* dtype;
  const char* rounding;
  std::int64_t b, h1, h2, h3, r, w, l;  // h1 = 0: without weight_a
  std::int64_t layer_idx, y_offset, scale_quarters;
  std::uint64_t seed;
  int kind;
  const char* digest;
};

inline std::uint64_t random(const Case& c, Tensor tensor, std::uint64_t i) {
  return mix(mix(c.seed * 16 + static_cast<std::uint64_t>(tensor)) + i);
}

struct Format {
  int mantissa, exponent_bias, sign_bit;
};

inline Format format_of(addlora::DType dtype) {
  if (dtype == addlora::DType::kFloat16) return {10, 15, 15};
  if (dtype == addlora::DType::kBFloat16) return {7, 127, 15};
  return {23, 127, 31};
}

// A number of a dtype as bits: magnitudes within six powers of two, and a zero in 16.
inline std::uint32_t element(const Case& c, Tensor tensor, std::uint64_t i, Format f) {
  const std::uint64_t h = random(c, tensor, i);
  const bool weight = tensor == kA || tensor == kB;
  std::uint64_t exponent = static_cast<std::uint64_t>(f.exponent_bias) - (weight ? 8 : 4) + (h >> 40) % 6;
  std::uint64_t fraction = h & ((std::uint64_t{1} << f.mantissa) - 1);
  if (c.kind == kSubnormal && (tensor == kY || tensor == kB)) exponent = 0;
  if ((h >> 32) % 16 == 0) exponent = fraction = 0;
  return static_cast<std::uint32_t>(h >> 63 << f.sign_bit | exponent << f.mantissa | fraction);
}

// Mixed: -2 .. w.
inline std::int32_t index(const Case& c, std::uint64_t row) {
  return static_cast<std::int32_t>(random(c, kIndices, row) % static_cast<std::uint64_t>(c.w + 3)) - 2;
}

inline std::uint64_t digest(const void* bytes, std::size_t count, std::size_t item) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < count; ++i) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, static_cast<const char*>(bytes) + i * item, item);
    sum += mix(mix(i) + bits);
  }
  return sum;
}

}  // namespace recipe
