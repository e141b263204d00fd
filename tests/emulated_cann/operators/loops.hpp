// Loops over strided tensors.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "elements.hpp"
#include "error.hpp"
#include "tensors.hpp"

namespace emu {

// Strides in bytes with which `tensor` is read as if it had the shape `dims`.
inline std::vector<int64_t> broadcast_strides(const Tensor &tensor, const std::vector<int64_t> &dims) {
  std::vector<int64_t> strides(dims.size(), 0);
  if (tensor.dims.size() > dims.size()) throw Error{kBadParameter, tensor.describe() + " has too many dimensions"};
  const size_t shift = dims.size() - tensor.dims.size();
  for (size_t i = 0; i < tensor.dims.size(); ++i) {
    if (tensor.dims[i] == 1) continue;
    if (tensor.dims[i] != dims[i + shift]) throw Error{kBadParameter, tensor.describe() + " does not broadcast"};
    strides[i + shift] = tensor.strides[i] * static_cast<int64_t>(tensor.element_bytes());
  }
  return strides;
}

// Calls body(places) for each element of the shape `dims`, with the place in each tensor.
template <size_t N, class Body>
void for_each_element(const std::vector<int64_t> &dims, const std::array<const Tensor *, N> &tensors, Body body) {
  std::array<std::vector<int64_t>, N> strides;
  std::array<std::byte *, N> places;
  int64_t count = 1;
  for (const int64_t dim : dims) count *= dim;
  if (count == 0) return;
  for (size_t n = 0; n < N; ++n) {
    strides[n] = broadcast_strides(*tensors[n], dims);
    places[n] = tensors[n]->begin();
  }
  std::vector<int64_t> index(dims.size(), 0);
  while (true) {
    body(places);
    size_t axis = dims.size();
    while (axis > 0) {
      --axis;
      if (++index[axis] < dims[axis]) {
        for (size_t n = 0; n < N; ++n) places[n] += strides[n][axis];
        break;
      }
      for (size_t n = 0; n < N; ++n) places[n] -= strides[n][axis] * (dims[axis] - 1);
      index[axis] = 0;
      if (axis == 0) return;
    }
    if (dims.empty()) return;
  }
}

inline void copy_tensor(const Tensor &to, const Tensor &from) {
  for_each_element<2>(to.dims, {&to, &from}, [&](const std::array<std::byte *, 2> &at) {
    copy_element(at[0], to.dtype, at[1], from.dtype);
  });
}

// The part of `tensor` along `axis` from `begin` on, `count` long.
inline Tensor slice(Tensor tensor, size_t axis, int64_t begin, int64_t count) {
  tensor.offset += begin * tensor.strides[axis];
  tensor.dims[axis] = count;
  return tensor;
}

inline size_t axis_of(const Tensor &tensor, int64_t axis) {
  const int64_t rank = tensor.rank();
  if (axis < -rank || axis >= rank) throw Error{kBadParameter, "there is no axis " + std::to_string(axis)};
  return static_cast<size_t>(axis < 0 ? axis + rank : axis);
}

}  // namespace emu
