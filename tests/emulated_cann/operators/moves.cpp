// Operators that move, convert, join or fill.
#include <algorithm>

#include "operator.hpp"

namespace {

using emu::Tensor;

void fill(const Tensor &self, const emu::Scalar &value) {
  emu::for_each_element<1>(self.dims, {&self}, [&](const std::array<std::byte *, 1> &at) {
    if (emu::is_real(self.dtype)) {
      emu::store_real(at[0], self.dtype, value.real);
    } else {
      emu::store_integer(at[0], self.dtype, value.integer);
    }
  });
}

void fill(const Tensor &self, int64_t value) { fill(self, emu::Scalar{ACL_INT64, static_cast<double>(value), value}); }

// All tensors but the last are the parts of the last.
void concatenate(const std::vector<Tensor> &tensors, int64_t axis_given) {
  const Tensor &out = tensors.back();
  const size_t axis = emu::axis_of(out, axis_given);
  int64_t begin = 0;
  for (size_t i = 0; i + 1 < tensors.size(); ++i) {
    // An empty 1-D tensor may stand among others of any rank.
    if (tensors[i].elements() == 0) continue;
    const int64_t count = tensors[i].dims[axis];
    emu::copy_tensor(emu::slice(out, axis, begin, count), tensors[i]);
    begin += count;
  }
}

void stack(const std::vector<Tensor> &tensors, int64_t axis_given) {
  const Tensor &out = tensors.back();
  const size_t axis = emu::axis_of(out, axis_given);
  for (size_t i = 0; i + 1 < tensors.size(); ++i) {
    Tensor place = emu::slice(out, axis, static_cast<int64_t>(i), 1);
    place.dims.erase(place.dims.begin() + static_cast<std::ptrdiff_t>(axis));
    place.strides.erase(place.strides.begin() + static_cast<std::ptrdiff_t>(axis));
    emu::copy_tensor(place, tensors[i]);
  }
}

// `pads` holds, from the last axis backwards, how much is added before and after; a negative number cuts off.
void pad(const Tensor &out, Tensor self, const std::vector<int64_t> &pads, const emu::Scalar &value) {
  fill(out, value);
  Tensor inner = out;
  for (size_t i = 0; i * 2 + 1 < pads.size(); ++i) {
    const size_t axis = self.dims.size() - 1 - i;
    const int64_t before = pads[i * 2];
    const int64_t after = pads[i * 2 + 1];
    const int64_t cut_before = std::max<int64_t>(-before, 0);
    const int64_t kept = self.dims[axis] - cut_before - std::max<int64_t>(-after, 0);
    self = emu::slice(self, axis, cut_before, kept);
    inner = emu::slice(inner, axis, std::max<int64_t>(before, 0), kept);
  }
  emu::copy_tensor(inner, self);
}

void arange(const Tensor &out, const emu::Scalar &start, const emu::Scalar &step) {
  int64_t i = 0;
  emu::for_each_element<1>(out.dims, {&out}, [&](const std::array<std::byte *, 1> &at) {
    emu::store_real(at[0], out.dtype, start.real + static_cast<double>(i++) * step.real);
  });
}

void tile(const Tensor &out, const Tensor &self, const std::vector<int64_t> &repeats) {
  // Each axis of out is read as [repeats, size], with nothing to advance along the first.
  Tensor wide_out = out;
  Tensor wide_self = self;
  wide_out.dims.clear();
  wide_out.strides.clear();
  wide_self.dims.clear();
  wide_self.strides.clear();
  const size_t shift = repeats.size() - self.dims.size();
  for (size_t axis = 0; axis < repeats.size(); ++axis) {
    const int64_t size = axis < shift ? 1 : self.dims[axis - shift];
    const int64_t stride = axis < shift ? 0 : self.strides[axis - shift];
    wide_out.dims.insert(wide_out.dims.end(), {repeats[axis], size});
    wide_out.strides.insert(wide_out.strides.end(), {out.strides[axis] * size, out.strides[axis]});
    wide_self.dims.insert(wide_self.dims.end(), {1, size});
    wide_self.strides.insert(wide_self.strides.end(), {0, stride});
  }
  emu::copy_tensor(wide_out, wide_self);
}

void repeat_each(const Tensor &out, const Tensor &self, int64_t repeats, int64_t axis_given) {
  const size_t axis = emu::axis_of(self, axis_given);
  for (int64_t i = 0; i < self.dims[axis]; ++i)
    emu::copy_tensor(emu::slice(out, axis, i * repeats, repeats), emu::slice(self, axis, i, 1));
}

}  // namespace

EMU_OPERATOR(aclnnInplaceCopy,
             emu::plan_small(function, {self, source}, results,
                             [](const std::vector<Tensor> &t) { emu::copy_tensor(t[0], t[1]); }),
             const aclTensor *self, const aclTensor *source)

// out carries the dtype.
EMU_OPERATOR(aclnnCast,
             emu::plan_small(function, {self, out}, results,
                             [](const std::vector<Tensor> &t) { emu::copy_tensor(t[1], t[0]); }),
             const aclTensor *self, const aclDataType, const aclTensor *out)

EMU_OPERATOR(aclnnInplaceZero,
             emu::plan_small(function, {self}, results, [](const std::vector<Tensor> &t) { fill(t[0], 0); }),
             const aclTensor *self)

EMU_OPERATOR(aclnnInplaceOne,
             emu::plan_small(function, {self}, results, [](const std::vector<Tensor> &t) { fill(t[0], 1); }),
             const aclTensor *self)

EMU_OPERATOR(aclnnInplaceFillScalar,
             emu::plan_small(function, {self}, results,
                             [v = emu::scalar_of(value)](const std::vector<Tensor> &t) { fill(t[0], v); }),
             const aclTensor *self, const aclScalar *value)

EMU_OPERATOR(aclnnInplaceFillTensor,
             emu::plan_small(function, {self, value}, results,
                             [](const std::vector<Tensor> &t) { emu::copy_tensor(t[0], t[1]); }),
             const aclTensor *self, const aclTensor *value)

EMU_OPERATOR(aclnnCat,
             emu::plan_list(function, list, out, results,
                            [axis](const std::vector<Tensor> &t) { concatenate(t, axis); }),
             const aclTensorList *list, int64_t axis, const aclTensor *out)

EMU_OPERATOR(aclnnStack,
             emu::plan_list(function, list, out, results, [axis](const std::vector<Tensor> &t) { stack(t, axis); }),
             const aclTensorList *list, int64_t axis, const aclTensor *out)

EMU_OPERATOR(aclnnConstantPadNd,
             emu::plan_small(function, {self, out}, results,
                             [p = emu::values_of(pads), v = emu::scalar_of(value)](const std::vector<Tensor> &t) {
                               pad(t[1], t[0], p, v);
                             }),
             const aclTensor *self, const aclIntArray *pads, const aclScalar *value, const aclTensor *out)

EMU_OPERATOR(aclnnArange,
             emu::plan_small(function, {out}, results,
                             [first = emu::scalar_of(start), by = emu::scalar_of(step)](
                                 const std::vector<Tensor> &t) { arange(t[0], first, by); }),
             const aclScalar *start, const aclScalar *, const aclScalar *step, const aclTensor *out)

EMU_OPERATOR(aclnnRepeat,
             emu::plan_small(function, {self, out}, results,
                             [r = emu::values_of(repeats)](const std::vector<Tensor> &t) { tile(t[1], t[0], r); }),
             const aclTensor *self, const aclIntArray *repeats, const aclTensor *out)

EMU_OPERATOR(aclnnRepeatInterleaveIntWithDim,
             emu::plan_small(function, {self, out}, results,
                             [=](const std::vector<Tensor> &t) { repeat_each(t[1], t[0], repeats, axis); }),
             const aclTensor *self, int64_t repeats, int64_t axis, int64_t, const aclTensor *out)

namespace {

Tensor permuted(const Tensor &tensor, const std::vector<int64_t> &order) {
  Tensor result = tensor;
  for (size_t i = 0; i < order.size(); ++i) {
    const size_t axis = emu::axis_of(tensor, order[i]);
    result.dims[i] = tensor.dims[axis];
    result.strides[i] = tensor.strides[axis];
  }
  return result;
}

}  // namespace

EMU_OPERATOR(aclnnPermute,
             emu::plan_small(function, {self, out}, results,
                             [o = emu::values_of(order)](const std::vector<Tensor> &t) {
                               emu::copy_tensor(t[1], permuted(t[0], o));
                             }),
             const aclTensor *self, const aclIntArray *order, const aclTensor *out)

EMU_OPERATOR(aclnnExpand,
             emu::plan_small(function, {self, out}, results,
                             [](const std::vector<Tensor> &t) { emu::copy_tensor(t[1], t[0]); }),
             const aclTensor *self, const aclIntArray *, const aclTensor *out)
