// Operators that pick rows by index, and reductions.
#include <algorithm>
#include <cmath>
#include <limits>

#include "operator.hpp"
#include "pick.hpp"
#include "reduce.hpp"

namespace {

using emu::Tensor;

void softmax(const Tensor &out, const Tensor &self, int64_t axis_given) {
  const size_t axis = emu::axis_of(self, axis_given);
  std::vector<int64_t> outer = self.dims;
  outer[axis] = 1;
  Tensor in_row = self;
  Tensor out_row = out;
  in_row.dims[axis] = out_row.dims[axis] = 1;
  const auto in_step = self.strides[axis] * static_cast<int64_t>(self.element_bytes());
  const auto out_step = out.strides[axis] * static_cast<int64_t>(out.element_bytes());
  emu::for_each_element<2>(outer, {&in_row, &out_row}, [&](const std::array<std::byte *, 2> &at) {
    double highest = -std::numeric_limits<double>::infinity();
    double sum = 0;
    for (int64_t i = 0; i < self.dims[axis]; ++i)
      highest = std::max(highest, emu::load_real(at[0] + i * in_step, self.dtype));
    for (int64_t i = 0; i < self.dims[axis]; ++i)
      sum += std::exp(emu::load_real(at[0] + i * in_step, self.dtype) - highest);
    for (int64_t i = 0; i < self.dims[axis]; ++i) {
      const double value = emu::load_real(at[0] + i * in_step, self.dtype);
      emu::store_real(at[1] + i * out_step, out.dtype, std::exp(value - highest) / sum);
    }
  });
}

}  // namespace

EMU_OPERATOR(aclnnIndexSelect,
             emu::plan_small(function, {self, index, out}, results,
                             [axis](const std::vector<Tensor> &t) { emu::pick_rows(t[2], t[0], emu::axis_of(t[0], axis), t[1]); }),
             const aclTensor *self, int64_t axis, const aclTensor *index, const aclTensor *out)

EMU_OPERATOR(aclnnEmbedding,
             emu::plan_small(function, {weight, index, out}, results,
                             [](const std::vector<Tensor> &t) { emu::pick_rows(t[2], t[0], 0, t[1]); }),
             const aclTensor *weight, const aclTensor *index, const aclTensor *out)

EMU_OPERATOR(aclnnReduceSum,
             emu::plan_small(function, {self, out}, results,
                             [a = emu::values_of(axes)](const std::vector<Tensor> &t) {
                               emu::reduce(t[1], t[0], a, emu::Reduction::kSum);
                             }),
             const aclTensor *self, const aclIntArray *axes, bool, aclDataType, const aclTensor *out)

EMU_OPERATOR(aclnnMean,
             emu::plan_small(function, {self, out}, results,
                             [a = emu::values_of(axes)](const std::vector<Tensor> &t) {
                               emu::reduce(t[1], t[0], a, emu::Reduction::kMean);
                             }),
             const aclTensor *self, const aclIntArray *axes, bool, aclDataType, const aclTensor *out)

EMU_OPERATOR(aclnnMax,
             emu::plan_small(function, {self, out}, results,
                             [](const std::vector<Tensor> &t) { emu::reduce(t[1], t[0], {}, emu::Reduction::kMax); }),
             const aclTensor *self, const aclTensor *out)

EMU_OPERATOR(aclnnSoftmax,
             emu::plan_small(function, {self, out}, results,
                             [axis](const std::vector<Tensor> &t) { softmax(t[1], t[0], axis); }),
             const aclTensor *self, int64_t axis, const aclTensor *out)

namespace {

// Only the simplest form of indexing by tensors: one of them, for the first axis.
const aclTensor *only_index(const aclTensorList *list) {
  const auto handles = emu::tensor_lists().get(list)->handles;
  if (handles.size() != 1) throw emu::Error{emu::kKernelNotFound, "aclnnIndex by several tensors is not emulated"};
  return static_cast<const aclTensor *>(handles[0]);
}

}  // namespace

EMU_OPERATOR(aclnnIndex,
             emu::plan_small(function, {self, only_index(index), out}, results,
                             [](const std::vector<Tensor> &t) { emu::pick_rows(t[2], t[0], 0, t[1]); }),
             const aclTensor *self, const aclTensorList *index, const aclTensor *out)

namespace {

void add_rows(const Tensor &out, const Tensor &self, size_t axis, const Tensor &index, const Tensor &source,
              double alpha) {
  if (out.data != self.data) emu::copy_tensor(out, self);
  const auto rows = emu::indices_of(index, out.dims[axis]);
  for (size_t i = 0; i < rows.size(); ++i) {
    const Tensor target = emu::slice(out, axis, rows[i], 1);
    const Tensor part = emu::slice(source, axis, static_cast<int64_t>(i), 1);
    emu::for_each_element<2>(target.dims, {&target, &part}, [&](const std::array<std::byte *, 2> &at) {
      const double sum = emu::load_real(at[0], target.dtype) + alpha * emu::load_real(at[1], part.dtype);
      emu::store_real(at[0], target.dtype, sum);
    });
  }
}

}  // namespace

EMU_OPERATOR(aclnnIndexAdd,
             emu::plan_small(function, {self, index, source, out}, results,
                             [axis, s = emu::scalar_of(alpha)](const std::vector<Tensor> &t) {
                               add_rows(t[3], t[0], emu::axis_of(t[0], axis), t[1], t[2], s.real);
                             }),
             const aclTensor *self, int64_t axis, const aclTensor *index, const aclTensor *source,
             const aclScalar *alpha, const aclTensor *out)
