// Picking slices of a tensor by the indices in another.
#pragma once

#include <string>
#include <vector>

#include "loops.hpp"

namespace emu {

inline int64_t checked_index(const std::byte *place, aclDataType dtype, int64_t size) {
  const int64_t index = load_integer(place, dtype);
  if (index < -size || index >= size)
    throw Error{kCoreException, "AI core exception: index " + std::to_string(index) + " is out of range"};
  return index < 0 ? index + size : index;
}

inline std::vector<int64_t> indices_of(const Tensor &index, int64_t size) {
  std::vector<int64_t> values;
  for_each_element<1>(index.dims, {&index}, [&](const std::array<std::byte *, 1> &at) {
    values.push_back(checked_index(at[0], index.dtype, size));
  });
  return values;
}

// out along `axis` is self at the indices, whatever shape these have; out's axes there are merged into one.
inline void pick_rows(Tensor out, const Tensor &self, size_t axis, const Tensor &index) {
  const auto values = indices_of(index, self.dims[axis]);
  const auto begin = static_cast<std::ptrdiff_t>(axis);
  const auto count = static_cast<std::ptrdiff_t>(index.dims.size());
  const int64_t step = count > 0 ? out.strides[axis + index.dims.size() - 1] : 0;
  out.dims.erase(out.dims.begin() + begin, out.dims.begin() + begin + count);
  out.strides.erase(out.strides.begin() + begin, out.strides.begin() + begin + count);
  out.dims.insert(out.dims.begin() + begin, static_cast<int64_t>(values.size()));
  out.strides.insert(out.strides.begin() + begin, step);
  for (size_t i = 0; i < values.size(); ++i)
    copy_tensor(slice(out, axis, static_cast<int64_t>(i), 1), slice(self, axis, values[i], 1));
}

}  // namespace emu
