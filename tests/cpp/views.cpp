#include "views.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "recipe.hpp"

using addlora::DType;
using addlora::TensorView;

namespace {

TensorView described(DType dtype, const std::vector<std::int64_t>& shape) {
  TensorView view;
  view.dtype = dtype;
  view.ndim = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), view.shape);
  return view;
}

void fill(Choices& choices, Tensor& tensor) {
  const recipe::Format format = recipe::format_of(tensor.view.dtype);
  const std::uint64_t seed = choices.word();
  const bool any_bits = choices.one_in(8);
  const recipe::Case c{"", "", 1, 1, 1, 1, 1, 1, 1, 0, 0, 4, seed, recipe::kNormal, ""};
  const std::size_t item = addlora::dtype_bytes(tensor.view.dtype);
  for (std::int64_t i = 0; i < tensor.count(); ++i) {
    const auto at = static_cast<std::uint64_t>(i);
    const auto bits = any_bits ? static_cast<std::uint32_t>(recipe::random(c, recipe::kY, at))
                               : recipe::element(c, recipe::kB, at, format);
    std::memcpy(tensor.element(i), &bits, item);
  }
}

}  // namespace

std::uint64_t Choices::word() {
  if (data_ == nullptr) return state_ = recipe::mix(state_);
  // Two bytes a choice keep a fuzzer's input short.
  std::uint64_t value = 0;
  for (int i = 0; i < 2 && at_ < size_; ++i) value = value << 8 | data_[at_++];
  return value;
}

std::int64_t Tensor::count() const {
  return std::accumulate(view.shape, view.shape + view.ndim, std::int64_t{1}, std::multiplies<>());
}

bool Tensor::empty() const {
  const int held = std::min(view.ndim, addlora::kMaxDims);
  return std::any_of(view.shape, view.shape + held, [](std::int64_t n) { return n == 0; });
}

char* Tensor::element(std::int64_t i) const {
  std::int64_t offset = 0;
  for (int d = view.ndim - 1; d >= 0; --d) {
    offset += i % view.shape[d] * view.strides[d];
    i /= view.shape[d];
  }
  return view.bytes() + offset;
}

Tensor random_tensor(Choices& choices, DType dtype, const std::vector<std::int64_t>& shape) {
  Tensor tensor;
  tensor.view = described(dtype, shape);
  TensorView& view = tensor.view;
  std::vector<int> axes(shape.size());
  std::iota(axes.begin(), axes.end(), 0);
  if (choices.one_in(3)) {
    for (std::size_t i = axes.size(); i > 1; --i) {
      std::swap(axes[i - 1], axes[static_cast<std::size_t>(choices.below(static_cast<std::int64_t>(i)))]);
    }
  }
  const auto item = static_cast<std::int64_t>(addlora::dtype_bytes(dtype));
  const bool plain = choices.one_in(3);
  std::int64_t stride = item;
  std::int64_t extent = item;
  std::int64_t first = 0;
  for (auto axis = axes.rbegin(); axis != axes.rend(); ++axis) {
    const std::int64_t count = view.shape[*axis];
    if (count == 0) {
      tensor.memory.reset(new char[1]);  // no element of it may be touched
      view.data = tensor.memory.get() + 1;
      return tensor;
    }
    std::int64_t& chosen = view.strides[*axis];
    if (!plain && choices.one_in(8)) {
      chosen = 0;
      continue;
    }
    if (!plain) stride += choices.one_in(2) ? 0 : choices.below(3) * (choices.one_in(3) ? 1 : item);
    chosen = !plain && choices.one_in(4) ? -stride : stride;
    if (chosen < 0) first += (count - 1) * stride;
    extent += (count - 1) * stride;
    stride *= count;
  }
  const std::int64_t odd = choices.one_in(3) ? choices.below(4) : 0;
  tensor.bytes = static_cast<std::size_t>(odd + extent);
  tensor.memory.reset(new char[tensor.bytes]);
  std::memset(tensor.memory.get(), 0xff, tensor.bytes);  // NaN between the elements
  view.data = tensor.memory.get() + odd + first;
  fill(choices, tensor);
  return tensor;
}

Tensor plain_tensor(DType dtype, const std::vector<std::int64_t>& shape, bool at_odd_byte) {
  Tensor tensor;
  tensor.view = described(dtype, shape);
  addlora::set_contiguous_strides(tensor.view);
  tensor.bytes = static_cast<std::size_t>(tensor.count()) * addlora::dtype_bytes(dtype) + (at_odd_byte ? 1 : 0);
  tensor.memory.reset(new char[std::max<std::size_t>(tensor.bytes, 1)]);
  std::memset(tensor.memory.get(), 0xee, std::max<std::size_t>(tensor.bytes, 1));
  tensor.view.data = tensor.memory.get() + (at_odd_byte ? 1 : 0);
  return tensor;
}

Tensor plain_copy(const Tensor& tensor) {
  const TensorView& view = tensor.view;
  Tensor copy = plain_tensor(view.dtype, {view.shape, view.shape + view.ndim});
  const std::size_t item = addlora::dtype_bytes(view.dtype);
  for (std::int64_t i = 0; i < tensor.count(); ++i) std::memcpy(copy.element(i), tensor.element(i), item);
  return copy;
}
