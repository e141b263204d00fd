#include "single_operator.hpp"

#include <algorithm>
#include <cmath>

#include "loops.hpp"
#include "pick.hpp"
#include "reduce.hpp"

namespace emu {
namespace {

std::vector<int64_t> integers_in(const Tensor &tensor) {
  std::vector<int64_t> values;
  for_each_element<1>(tensor.dims, {&tensor}, [&](const std::array<std::byte *, 1> &at) {
    values.push_back(load_integer(at[0], tensor.dtype));
  });
  return values;
}

void fill_with(const Tensor &tensor, double value) {
  for_each_element<1>(tensor.dims, {&tensor},
                      [&](const std::array<std::byte *, 1> &at) { store_real(at[0], tensor.dtype, value); });
}

void copy_first_input(const SingleOperatorCall &call) { copy_tensor(call.outputs[0], call.inputs[0]); }

// The second input goes into the first, which the output stands for.
void assign(const SingleOperatorCall &call) {
  copy_tensor(call.inputs[0], call.inputs[1]);
  if (call.outputs[0].data != call.inputs[0].data) copy_tensor(call.outputs[0], call.inputs[1]);
}

void bias_add(const SingleOperatorCall &call) {
  const Tensor &out = call.outputs[0];
  for_each_element<3>(out.dims, {&out, &call.inputs[0], &call.inputs[1]}, [&](const std::array<std::byte *, 3> &at) {
    const double sum = load_real(at[1], call.inputs[0].dtype) + load_real(at[2], call.inputs[1].dtype);
    store_real(at[0], out.dtype, sum);
  });
}

void fill_shape(const SingleOperatorCall &call) {
  const Tensor &value = call.inputs[1];
  const Tensor &out = call.outputs[0];
  Tensor scalar = value;
  scalar.dims.clear();
  scalar.strides.clear();
  copy_tensor(out, scalar);
}

void slice_by_size(const SingleOperatorCall &call) {
  Tensor part = call.inputs[0];
  const auto begin = integers_in(call.inputs[1]);
  for (size_t axis = 0; axis < begin.size(); ++axis)
    part = slice(part, axis, begin[axis], call.outputs[0].dims[axis]);
  copy_tensor(call.outputs[0], part);
}

// The view that begin, end and strides select, with the masks of the operator's definition.
Tensor strided_part(const Tensor &whole, const std::vector<Tensor> &inputs, size_t first, const Attributes &attributes) {
  const auto begins = integers_in(inputs[first]);
  const auto ends = integers_in(inputs[first + 1]);
  const auto steps = integers_in(inputs[first + 2]);
  const auto bit = [&](const char *mask, size_t i) { return (attributes.integer(mask, 0) >> i & 1) != 0; };
  Tensor part = whole;
  part.dims.clear();
  part.strides.clear();
  size_t axis = 0;
  for (size_t i = 0; i < begins.size(); ++i) {
    if (bit("ellipsis_mask", i)) {
      size_t named = 0;
      for (size_t j = i + 1; j < begins.size(); ++j) named += bit("new_axis_mask", j) ? 0 : 1;
      for (; axis + named < whole.dims.size(); ++axis) {
        part.dims.push_back(whole.dims[axis]);
        part.strides.push_back(whole.strides[axis]);
      }
      continue;
    }
    if (bit("new_axis_mask", i)) {
      part.dims.push_back(1);
      part.strides.push_back(0);
      continue;
    }
    const int64_t size = whole.dims[axis];
    const int64_t step = steps[i];
    const int64_t lowest = step > 0 ? 0 : -1;
    const int64_t highest = step > 0 ? size : size - 1;
    const auto place = [&](int64_t value) { return std::clamp(value < 0 ? value + size : value, lowest, highest); };
    if (bit("shrink_axis_mask", i)) {
      part.offset += (begins[i] < 0 ? begins[i] + size : begins[i]) * whole.strides[axis];
      ++axis;
      continue;
    }
    const int64_t from = bit("begin_mask", i) ? (step > 0 ? lowest : highest) : place(begins[i]);
    const int64_t to = bit("end_mask", i) ? (step > 0 ? highest : lowest) : place(ends[i]);
    const int64_t count = step > 0 ? (to - from + step - 1) / step : (from - to - step - 1) / -step;
    part.offset += from * whole.strides[axis];
    part.dims.push_back(std::max<int64_t>(count, 0));
    part.strides.push_back(whole.strides[axis] * step);
    ++axis;
  }
  for (; axis < whole.dims.size(); ++axis) {
    part.dims.push_back(whole.dims[axis]);
    part.strides.push_back(whole.strides[axis]);
  }
  return part;
}

void strided_slice(const SingleOperatorCall &call) {
  copy_tensor(call.outputs[0], strided_part(call.inputs[0], call.inputs, 1, call.attributes));
}

// inputs: the whole's shape, begin, end, strides, the part's gradient.
void strided_slice_gradient(const SingleOperatorCall &call) {
  fill_with(call.outputs[0], 0);
  copy_tensor(strided_part(call.outputs[0], call.inputs, 1, call.attributes), call.inputs[4]);
}

// inputs: the variable, begin, end, strides, the value.
void strided_slice_assign(const SingleOperatorCall &call) {
  if (call.outputs[0].data != call.inputs[0].data) copy_tensor(call.outputs[0], call.inputs[0]);
  for (const Tensor &target : {call.inputs[0], call.outputs[0]})
    copy_tensor(strided_part(target, call.inputs, 1, call.attributes), call.inputs[4]);
}

void split_evenly(const SingleOperatorCall &call) {
  // The axis comes as an input or as an attribute.
  const bool by_input = call.inputs.size() > 1;
  const Tensor &whole = call.inputs[by_input ? 1 : 0];
  const int64_t given = by_input ? integers_in(call.inputs[0])[0] : call.attributes.integer("split_dim", 0);
  const size_t axis = axis_of(whole, given);
  int64_t begin = 0;
  for (const Tensor &part : call.outputs) {
    copy_tensor(part, slice(whole, axis, begin, part.dims[axis]));
    begin += part.dims[axis];
  }
}

void pack(const SingleOperatorCall &call) {
  const Tensor &out = call.outputs[0];
  const size_t axis = axis_of(out, call.attributes.integer("axis", 0));
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    Tensor place = slice(out, axis, static_cast<int64_t>(i), 1);
    place.dims.erase(place.dims.begin() + static_cast<std::ptrdiff_t>(axis));
    place.strides.erase(place.strides.begin() + static_cast<std::ptrdiff_t>(axis));
    copy_tensor(place, call.inputs[i]);
  }
}

void unpack(const SingleOperatorCall &call) {
  const Tensor &whole = call.inputs[0];
  const size_t axis = axis_of(whole, call.attributes.integer("axis", 0));
  for (size_t i = 0; i < call.outputs.size(); ++i) {
    Tensor part = slice(whole, axis, static_cast<int64_t>(i), 1);
    part.dims.erase(part.dims.begin() + static_cast<std::ptrdiff_t>(axis));
    part.strides.erase(part.strides.begin() + static_cast<std::ptrdiff_t>(axis));
    copy_tensor(call.outputs[i], part);
  }
}

void add_all(const SingleOperatorCall &call) {
  const Tensor &out = call.outputs[0];
  copy_tensor(out, call.inputs[0]);
  for (size_t i = 1; i < call.inputs.size(); ++i) {
    const Tensor &input = call.inputs[i];
    for_each_element<2>(out.dims, {&out, &input}, [&](const std::array<std::byte *, 2> &at) {
      store_real(at[0], out.dtype, load_real(at[0], out.dtype) + load_real(at[1], input.dtype));
    });
  }
}

// Inputs: x, paddings (before and after for each axis, first axis first), the value.
void pad(const SingleOperatorCall &call) {
  const Tensor &out = call.outputs[0];
  const auto pads = integers_in(call.inputs[1]);
  if (call.inputs.size() > 2) {
    fill_shape({{call.inputs[1], call.inputs[2]}, {out}, {}});
  } else {
    fill_with(out, 0);
  }
  Tensor inner = out;
  for (size_t axis = 0; axis < out.dims.size(); ++axis)
    inner = slice(inner, axis, pads[axis * 2], call.inputs[0].dims[axis]);
  copy_tensor(inner, call.inputs[0]);
}

// Inputs: x, indices, and the axis, or none of it for the first.
void gather(const SingleOperatorCall &call) {
  const int64_t axis = call.inputs.size() > 2 ? integers_in(call.inputs[2])[0] : 0;
  pick_rows(call.outputs[0], call.inputs[0], axis_of(call.inputs[0], axis), call.inputs[1]);
}

SingleOperator reduction(Reduction how) {
  return [how](const SingleOperatorCall &call) {
    reduce(call.outputs[0], call.inputs[0], integers_in(call.inputs[1]), how);
  };
}

void range(const SingleOperatorCall &call) {
  const auto number = [&](size_t i) { return load_real(call.inputs[i].begin(), call.inputs[i].dtype); };
  double value = number(0);
  const Tensor &out = call.outputs[0];
  for_each_element<1>(out.dims, {&out}, [&](const std::array<std::byte *, 1> &at) {
    store_real(at[0], out.dtype, value);
    value += number(2);
  });
}

// Inputs: x, gamma, beta; outputs: y, mean, variance. Normalised from begin_norm_axis on.
void layer_norm(const SingleOperatorCall &call) {
  const Tensor &x = call.inputs[0];
  const size_t begin = axis_of(x, call.attributes.integer("begin_norm_axis", -1));
  int64_t rows = 1;
  for (size_t axis = 0; axis < begin; ++axis) rows *= x.dims[axis];
  const int64_t length = rows > 0 ? x.elements() / rows : 0;
  const auto epsilon = call.attributes.reals.find("epsilon");
  const double small = epsilon == call.attributes.reals.end() ? 1e-7 : epsilon->second;
  const auto at = [](const Tensor &tensor, int64_t i) {
    return tensor.begin() + i * static_cast<int64_t>(tensor.element_bytes());
  };
  const auto number = [&](const Tensor &tensor, int64_t i) { return load_real(at(tensor, i), tensor.dtype); };
  const auto put = [&](size_t output, int64_t i, double value) {
    if (output < call.outputs.size()) store_real(at(call.outputs[output], i), call.outputs[output].dtype, value);
  };
  for (int64_t row = 0; row < rows; ++row) {
    double mean = 0;
    double variance = 0;
    for (int64_t i = 0; i < length; ++i) mean += number(x, row * length + i) / static_cast<double>(length);
    for (int64_t i = 0; i < length; ++i) {
      const double distance = number(x, row * length + i) - mean;
      variance += distance * distance / static_cast<double>(length);
    }
    for (int64_t i = 0; i < length; ++i) {
      const double normal = (number(x, row * length + i) - mean) / std::sqrt(variance + small);
      put(0, row * length + i, normal * number(call.inputs[1], i) + number(call.inputs[2], i));
    }
    put(1, row, mean);
    put(2, row, variance);
  }
}

const std::map<std::string, SingleOperator> &table() {
  static const auto &operators = *new std::map<std::string, SingleOperator>{
      {"AddN", add_all},
      {"Assign", assign},
      {"BiasAdd", bias_add},
      {"Cast", copy_first_input},
      {"Fill", fill_shape},
      {"GatherV2", gather},
      {"Identity", copy_first_input},
      {"LayerNorm", layer_norm},
      {"OnesLike", [](const SingleOperatorCall &call) { fill_with(call.outputs[0], 1); }},
      {"Pack", pack},
      {"PadV3", pad},
      {"Range", range},
      {"ReduceMean", reduction(Reduction::kMean)},
      {"ReduceSum", reduction(Reduction::kSum)},
      {"Slice", slice_by_size},
      {"Split", split_evenly},
      {"SplitD", split_evenly},
      {"StridedSlice", strided_slice},
      {"StridedSliceAssign", strided_slice_assign},
      {"StridedSliceGrad", strided_slice_gradient},
      {"TensorMove", copy_first_input},
      {"Unpack", unpack},
      {"ZerosLike", [](const SingleOperatorCall &call) { fill_with(call.outputs[0], 0); }},
  };
  return operators;
}

}  // namespace

bool has_single_operator(const std::string &type) { return table().count(type) > 0; }

const SingleOperator &single_operator(const std::string &type) {
  const auto found = table().find(type);
  if (found == table().end()) throw Error{kKernelNotFound, "the operator " + type + " is not emulated"};
  return found->second;
}

}  // namespace emu
