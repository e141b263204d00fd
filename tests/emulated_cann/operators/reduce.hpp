// Sums, means and maxima along axes.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "loops.hpp"

namespace emu {

enum class Reduction { kSum, kMean, kMax };

inline void reduce(const Tensor &out, const Tensor &self, const std::vector<int64_t> &axes, Reduction how) {
  std::vector<bool> reduced(self.dims.size(), axes.empty());
  for (const int64_t axis : axes) reduced[axis_of(self, axis)] = true;
  // out seen with self's rank, and standing still along the reduced axes.
  Tensor sums;
  sums.dtype = ACL_DOUBLE;
  sums.dims = self.dims;
  sums.strides.assign(self.dims.size(), 0);
  int64_t cells = 1;
  for (size_t axis = self.dims.size(); axis-- > 0;) {
    if (reduced[axis]) {
      sums.dims[axis] = 1;
    } else {
      sums.strides[axis] = cells;
      cells *= self.dims[axis];
    }
  }
  const double start = how == Reduction::kMax ? -std::numeric_limits<double>::infinity() : 0.0;
  std::vector<double> values(static_cast<size_t>(cells), start);
  sums.data = values.data();
  for_each_element<2>(self.dims, {&self, &sums}, [&](const std::array<std::byte *, 2> &at) {
    const double value = load_real(at[0], self.dtype);
    const double sum = load_real(at[1], ACL_DOUBLE);
    store_real(at[1], ACL_DOUBLE, how == Reduction::kMax ? std::max(sum, value) : sum + value);
  });
  const double divisor = how == Reduction::kMean ? static_cast<double>(self.elements()) / static_cast<double>(cells) : 1;
  size_t next = 0;
  for_each_element<1>(out.dims, {&out}, [&](const std::array<std::byte *, 1> &at) {
    store_real(at[0], out.dtype, values[next++] / divisor);
  });
}

}  // namespace emu
