// Single elements of any dtype, read and written as the widest number of their kind.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "acl/acl_base.h"
#include "half.hpp"
#include "tensors.hpp"

namespace emu {

inline bool is_real(aclDataType dtype) {
  return dtype == ACL_FLOAT || dtype == ACL_FLOAT16 || dtype == ACL_BF16 || dtype == ACL_DOUBLE;
}

namespace detail {

template <class T>
T read(const std::byte *place) {
  T value;
  std::memcpy(&value, place, sizeof value);
  return value;
}

template <class T>
void write(std::byte *place, T value) {
  std::memcpy(place, &value, sizeof value);
}

}  // namespace detail

inline int64_t load_integer(const std::byte *place, aclDataType dtype) {
  switch (dtype) {
    case ACL_BOOL:
    case ACL_UINT8:
      return detail::read<uint8_t>(place);
    case ACL_INT8:
      return detail::read<int8_t>(place);
    case ACL_INT16:
      return detail::read<int16_t>(place);
    case ACL_INT32:
      return detail::read<int32_t>(place);
    default:
      return detail::read<int64_t>(place);
  }
}

inline double load_real(const std::byte *place, aclDataType dtype) {
  switch (dtype) {
    case ACL_FLOAT16:
      return static_cast<double>(half_to_float(detail::read<uint16_t>(place)));
    case ACL_BF16:
      return static_cast<double>(bfloat_to_float(detail::read<uint16_t>(place)));
    case ACL_FLOAT:
      return static_cast<double>(detail::read<float>(place));
    case ACL_DOUBLE:
      return detail::read<double>(place);
    default:
      return static_cast<double>(load_integer(place, dtype));
  }
}

inline void store_integer(std::byte *place, aclDataType dtype, int64_t value) {
  switch (dtype) {
    case ACL_BOOL:
      return detail::write<uint8_t>(place, value != 0);
    case ACL_UINT8:
    case ACL_INT8:
      return detail::write(place, static_cast<int8_t>(value));
    case ACL_INT16:
      return detail::write(place, static_cast<int16_t>(value));
    case ACL_INT32:
      return detail::write(place, static_cast<int32_t>(value));
    default:
      return detail::write(place, value);
  }
}

inline void store_real(std::byte *place, aclDataType dtype, double value) {
  switch (dtype) {
    case ACL_FLOAT16:
      return detail::write(place, float_to_half(static_cast<float>(value)));
    case ACL_BF16:
      return detail::write(place, float_to_bfloat(static_cast<float>(value)));
    case ACL_FLOAT:
      return detail::write(place, static_cast<float>(value));
    case ACL_DOUBLE:
      return detail::write(place, value);
    case ACL_BOOL:
      return detail::write<uint8_t>(place, value != 0);
    default:
      // What an int64 cannot hold is undefined to convert.
      return store_integer(place, dtype, value > -0x1p63 && value < 0x1p63 ? static_cast<int64_t>(value) : 0);
  }
}

// From one place to another, between any dtypes. Of one dtype the bits are moved, a signalling NaN's too.
inline void copy_element(std::byte *to, aclDataType to_type, const std::byte *from, aclDataType from_type) {
  if (to_type == from_type) {
    std::memcpy(to, from, bytes_of(to_type));
  } else if (is_real(from_type) || is_real(to_type)) {
    store_real(to, to_type, load_real(from, from_type));
  } else {
    store_integer(to, to_type, load_integer(from, from_type));
  }
}

}  // namespace emu
