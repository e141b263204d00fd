#include "random_calls.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "cpu/cpu_backend.hpp"
#include "cpu/thread_pool.hpp"

using addlora::DType;
using addlora::Problem;
using addlora::Status;
using addlora::TensorView;

namespace {

struct Call {
  Tensor y, x, weight_b, indices, weight_a, out;
  bool has_a = true;
  Problem problem;

  void connect() {
    problem.y = &y.view;
    problem.x = &x.view;
    problem.weight_b = &weight_b.view;
    problem.indices = &indices.view;
    problem.weight_a = has_a ? &weight_a.view : nullptr;
    problem.out = &out.view;
  }
};

std::int64_t size(Choices& choices) {
  constexpr std::int64_t kEdges[] = {1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 65};
  return kEdges[choices.below(std::size(kEdges))];
}

Call make_call(Choices& choices) {
  constexpr DType kFloats[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};
  const DType dtype = kFloats[choices.below(3)];
  // Most are small; some have several blocks, tiles or tasks.
  const bool large = choices.one_in(12);
  const std::int64_t b = choices.one_in(12) ? 0 : large ? choices.below(90) : choices.below(9) + 1;
  const std::int64_t h1 = large ? choices.below(1100) + 1 : size(choices);
  const std::int64_t h2 = large ? choices.below(600) + 1 : size(choices);
  const std::int64_t h3 = h2 + (choices.one_in(2) ? 0 : choices.below(20));
  const std::int64_t r = choices.one_in(8) ? choices.below(150) + 1 : size(choices);
  const std::int64_t w = choices.below(5) + 1;
  const std::int64_t l = choices.below(3) + 1;
  Call call;
  call.has_a = !choices.one_in(4);
  call.y = random_tensor(choices, dtype, {b, h3});
  call.x = random_tensor(choices, dtype, {b, call.has_a ? h1 : r});
  call.weight_b = random_tensor(choices, dtype, {w, l, h2, r});
  if (call.has_a) call.weight_a = random_tensor(choices, dtype, {w, l, r, h1});
  call.indices = random_tensor(choices, DType::kInt32, {b});
  for (std::int64_t row = 0; row < b; ++row) {
    std::int32_t index = static_cast<std::int32_t>(choices.below(w + 3)) - 2;
    if (choices.one_in(30)) index = std::numeric_limits<std::int32_t>::min();
    std::memcpy(call.indices.element(row), &index, sizeof index);
  }
  call.out = plain_tensor(dtype, {b, h3}, choices.one_in(3));
  call.problem.layer_idx = choices.below(l);
  call.problem.scale = std::ldexp(static_cast<double>(choices.below(64)) - 32, -4);
  call.problem.y_offset = choices.below(h3 - h2 + 1);
  call.problem.y_slice_size = choices.one_in(2) ? -1 : h2;
  call.problem.limits = choices.one_in(20) ? addlora::Limits::kNpu : addlora::Limits::kNone;
  if (dtype == DType::kFloat16 && choices.one_in(3)) call.problem.rounding = addlora::Rounding::kDevice;
  call.connect();
  return call;
}

std::int64_t odd_number(Choices& choices) {
  constexpr std::int64_t kNumbers[] = {0,
                                       1,
                                       3,
                                       -1,
                                       -2,
                                       1000,
                                       std::int64_t{1} << 31,
                                       std::int64_t{1} << 40,
                                       std::int64_t{1} << 62,
                                       std::numeric_limits<std::int64_t>::max(),
                                       std::numeric_limits<std::int64_t>::min()};
  return kNumbers[choices.below(std::size(kNumbers))];
}

// Puts one thing wrong, or odd. Views stay within their memory: a larger axis repeats one element.
void spoil(Choices& choices, Call& call) {
  Tensor* const tensors[] = {&call.y, &call.x, &call.weight_b, &call.indices, &call.weight_a, &call.out};
  const TensorView** const given[] = {&call.problem.y,       &call.problem.x,        &call.problem.weight_b,
                                      &call.problem.indices, &call.problem.weight_a, &call.problem.out};
  const auto which = static_cast<std::size_t>(choices.below(std::size(tensors)));
  TensorView& view = tensors[which]->view;
  for (const Tensor* tensor : tensors) {
    if (tensor->view.ndim > addlora::kMaxDims) return;  // it is wrong already, and not all of its axes are held
  }
  switch (choices.below(10)) {
    case 0: *given[which] = nullptr; break;
    case 1:
      if (choices.one_in(2)) {
        view.dtype = DType::kOther;
      } else if (view.dtype != DType::kOther) {  // another one of the same width
        view.dtype = addlora::dtype_bytes(view.dtype) == 4 ? DType::kInt32 : DType::kBFloat16;
      }
      break;
    case 2: {
      if (view.ndim == 0) break;
      const auto axis = choices.below(view.ndim);
      // Fewer elements, or one element repeated: without end where nothing is computed along the axis.
      const bool bank = which == 2 || which == 4;
      const bool cheap = bank ? axis != 2 || which == 2 : axis == 0;
      const std::int64_t count = choices.one_in(2) && cheap ? std::int64_t{1} << (32 + choices.below(30))
                                                            : choices.below(70);
      if (view.shape[axis] == 0) break;
      if (count > view.shape[axis]) view.strides[axis] = 0;
      view.shape[axis] = count;
      break;
    }
    case 3: {
      if (tensors[which]->empty()) break;  // without the axis of no elements it would have some
      const int before = view.ndim;
      view.ndim = static_cast<int>(choices.below(addlora::kMaxDims + 3));
      for (int i = before; i < view.ndim && i < addlora::kMaxDims; ++i) view.shape[i] = 1;
      break;
    }
    case 4: call.problem.layer_idx = odd_number(choices); break;
    case 5: call.problem.y_offset = odd_number(choices); break;
    case 6: call.problem.y_slice_size = odd_number(choices); break;
    case 7: {
      if (call.indices.count() == 0) break;
      const auto index = static_cast<std::int32_t>(odd_number(choices));
      std::memcpy(call.indices.element(choices.below(call.indices.count())), &index, sizeof index);
      break;
    }
    case 8: call.out.view.writable = false; break;
    default: {
      // out lies in the memory of an input.
      const TensorView& out = call.out.view;
      if (call.out.empty()) break;
      std::size_t extent = addlora::dtype_bytes(out.dtype);
      for (int i = 0; i < out.ndim; ++i) extent += static_cast<std::size_t>((out.shape[i] - 1) * out.strides[i]);
      if (tensors[which] != &call.out && tensors[which]->bytes >= extent) {
        call.out.view.data = tensors[which]->memory.get() + (tensors[which]->bytes - extent);
      }
    }
  }
}

bool is_nan(const char* element, DType dtype) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, element, addlora::dtype_bytes(dtype));
  if (dtype == DType::kFloat16) return (bits & 0x7fff) > 0x7c00;
  if (dtype == DType::kBFloat16) return (bits & 0x7fff) > 0x7f80;
  return (bits & 0x7fffffff) > 0x7f800000;
}

bool written(const Call& call, std::int64_t row, std::int64_t column) {
  std::int32_t index;
  std::memcpy(&index, call.indices.element(row), sizeof index);
  const auto& bank = call.weight_b.view.shape;
  return index >= 0 && index < bank[0] && column >= call.problem.y_offset &&
         column < call.problem.y_offset + bank[2];
}

// Kept elements are y's bit for bit; the others are those of the same call on plain copies with one thread. Of NaN that
// was computed the position counts.
std::string check_result(const Call& call) {
  Call plain;
  plain.y = plain_copy(call.y);
  plain.x = plain_copy(call.x);
  plain.weight_b = plain_copy(call.weight_b);
  plain.indices = plain_copy(call.indices);
  plain.has_a = call.has_a;
  if (call.has_a) plain.weight_a = plain_copy(call.weight_a);
  const std::int64_t b = call.y.view.shape[0];
  const std::int64_t h3 = call.y.view.shape[1];
  const DType dtype = call.y.view.dtype;
  plain.out = plain_tensor(dtype, {b, h3});
  plain.problem = call.problem;
  plain.connect();
  addlora::cpu::set_thread_count(1);
  const Status status = add_lora(plain.problem, addlora::cpu_backend());
  if (!status.ok()) return "the same call on plain copies was refused: " + status.message;
  const std::size_t item = addlora::dtype_bytes(dtype);
  for (std::int64_t row = 0; row < b; ++row) {
    for (std::int64_t column = 0; column < h3; ++column) {
      const std::int64_t i = row * h3 + column;
      const char* got = call.out.element(i);
      const bool computed = written(call, row, column);
      if (!computed && std::memcmp(got, call.y.element(i), item) != 0) return "a kept element is not y's";
      if (std::memcmp(got, plain.out.element(i), item) == 0) continue;
      if (!computed || !is_nan(got, dtype) || !is_nan(plain.out.element(i), dtype)) return "layouts changed a bit";
    }
  }
  return {};
}

std::vector<char> memory_of(const Tensor& tensor) {
  return {tensor.memory.get(), tensor.memory.get() + tensor.bytes};
}

// The elements, of a tensor that a rule could accept; memory between them does not count.
std::vector<char> elements_of(const Tensor& tensor) {
  const TensorView& view = tensor.view;
  if (view.data == nullptr || view.dtype == DType::kOther || view.ndim > addlora::kMaxDims) return {};
  double count = 1;
  for (int i = 0; i < view.ndim; ++i) count *= static_cast<double>(view.shape[i]);
  if (count > 1e6) return {};
  return memory_of(plain_copy(tensor));
}

}  // namespace

std::string random_call(Choices& choices, Counts& counts) {
  Call call = make_call(choices);
  const int spoiled = choices.one_in(2) ? static_cast<int>(choices.below(3)) + 1 : 0;
  for (int i = 0; i < spoiled; ++i) spoil(choices, call);
  addlora::cpu::set_thread_count(static_cast<int>(choices.below(16)) + 1);
  const Tensor* const tensors[] = {&call.y, &call.x, &call.weight_b, &call.indices, &call.weight_a, &call.out};
  // Where out lies in another tensor's memory, that memory may change, but none of its elements; y may be out itself.
  const bool apart = call.out.view.bytes() == call.out.memory.get() ||
                     call.out.view.bytes() == call.out.memory.get() + 1;
  const bool in_place = call.out.view.data == call.y.view.data;
  std::vector<std::vector<char>> before, elements;
  for (const Tensor* tensor : tensors) before.push_back(memory_of(*tensor));
  for (const Tensor* tensor : tensors) elements.push_back(apart ? std::vector<char>() : elements_of(*tensor));

  Status status;
  try {
    status = add_lora(call.problem, addlora::cpu_backend());
  } catch (const std::bad_alloc&) {
    ++counts.out_of_memory;
    status = {addlora::Code::kNull, "no memory"};
  }
  counts.computed += status.ok();
  counts.refused += !status.ok();
  if (!status.ok() && status.message.empty()) return "a refusal without a word";
  if (!status.ok() && spoiled == 0 && call.problem.limits == addlora::Limits::kNone) {
    return "a right call was refused: " + status.message;
  }
  for (std::size_t i = 0; i < std::size(tensors); ++i) {
    if (status.ok() && (tensors[i] == &call.out || (tensors[i] == &call.y && in_place))) continue;
    if (status.ok() && tensors[i] == &call.weight_a && call.problem.weight_a == nullptr) continue;  // no input
    if (status.ok() && !apart) {
      if (elements_of(*tensors[i]) != elements[i]) return "an input that out lies in was changed";
    } else if (memory_of(*tensors[i]) != before[i]) {
      return status.ok() ? "an input was changed" : "a refused call wrote: " + status.message;
    }
  }
  return status.ok() && spoiled == 0 ? check_result(call) : std::string();
}
