// The custom operators' C functions, called by MindSpore on the CPU: the launch and the shape inference.
//
// MindSpore hands over pointers, shapes and dtype names; nothing of its C++ is needed here. A launch that throws makes
// MindSpore refuse every later step of the compiled model, so whatever can be known before is checked before (by the
// Python of ops.py and by the shape inference), and an index outside the bank means "no adapter" here.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "add_lora.hpp"
#include "cpu/cpu_backend.hpp"
#include "gradients.hpp"
#include "leading_dims.hpp"
#include "rules.hpp"

namespace {

using namespace addlora;

// Tensors come first, then the scalars, then the result.
enum Input { kY, kX, kWeightB, kIndices, kWeightA };
enum Scalar { kLayerIdx, kScale, kYOffset, kDeviceRounding, kScalars };

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

void raise_if_refused(const Status& status) {
  if (!status.ok()) fail("AddLoraError " + std::to_string(static_cast<int>(status.code)) + ": " + status.message);
}

DType dtype_of(const char* name) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kInt32}) {
    if (std::strcmp(name, dtype_name(dtype)) == 0) return dtype;
  }
  return DType::kOther;
}

TensorView view_of(void* data, int ndim, const std::int64_t* shape, const char* dtype) {
  TensorView view;
  view.data = data;
  view.dtype = dtype_of(dtype);
  view.other_dtype = dtype;
  view.ndim = ndim;
  for (int i = 0; i < ndim && i < kMaxDims; ++i) view.shape[i] = shape[i];
  if (ndim <= kMaxDims) set_contiguous_strides(view);
  return view;
}

// A scalar of a call arrives as a tensor of one element.
template <class T>
T scalar(const char* name, const void* data, int ndim, const std::int64_t* shape, const char* dtype) {
  for (int i = 0; i < ndim; ++i) {
    if (shape[i] != 1) fail(std::string(name) + ": expected one number, got a tensor of more or fewer");
  }
  const auto as = [data](auto value) {
    std::memcpy(&value, data, sizeof value);
    return static_cast<T>(value);
  };
  if (std::strcmp(dtype, "int64") == 0) return as(std::int64_t{});
  if (std::strcmp(dtype, "int32") == 0) return as(std::int32_t{});
  if (std::strcmp(dtype, "float32") == 0) return as(float{});
  if (std::strcmp(dtype, "float64") == 0) return as(double{});
  if (std::strcmp(dtype, "bool") == 0) return as(bool{});
  fail(std::string(name) + ": expected int32, int64, float32 or float64, got " + dtype);
}

bool checks_indices() {
  static const bool checks = [] {
    const char* value = std::getenv("ADDLORA_CHECK_INDICES");
    return value != nullptr && std::strcmp(value, "") != 0 && std::strcmp(value, "0") != 0;
  }();
  return checks;
}

// The indices as the core takes them: 32-bit, one for each row, and none above W. Decided at full width: a 64-bit value
// must not become an adapter by narrowing.
template <class T>
void narrow(const void* from, std::int64_t rows_per_index, std::int64_t w, std::vector<std::int32_t>& to) {
  const char* bytes = static_cast<const char*>(from);
  for (std::size_t row = 0; row < to.size(); ++row) {
    T index;
    std::memcpy(&index, bytes + row / static_cast<std::size_t>(rows_per_index) * sizeof index, sizeof index);
    if (index > w && checks_indices()) {
      raise_if_refused(refuse("index", "indices", "each at most W = " + std::to_string(w) + " (negative or W: no adapter)",
                              std::to_string(index) + " in row " + std::to_string(row)));
    }
    to[row] = index >= 0 && index < w ? static_cast<std::int32_t>(index) : -1;
  }
}

// The operator, or one of its gradients: there y is the gradient of the result.
void launch(bool has_a, std::optional<Gradient> gradient, int nparam, void** params, const int* ndims,
            std::int64_t** shapes, const char** dtypes) {
  const int tensors = has_a ? 5 : 4;
  if (nparam != tensors + kScalars + 1) fail("AddLora: called with " + std::to_string(nparam) + " parameters");
  TensorView views[5];
  for (int i = 0; i < tensors; ++i) views[i] = view_of(params[i], ndims[i], shapes[i], dtypes[i]);
  const auto scalar_at = [&](const char* name, Scalar which, auto type) {
    const int i = tensors + which;
    return scalar<decltype(type)>(name, params[i], ndims[i], shapes[i], dtypes[i]);
  };

  Rows rows;
  raise_if_refused(collapse_leading_dims(views[kY], views[kX], views[kIndices], rows));
  if (rows.y.shape[0] == 0 && !gradient) return;
  TensorView out = rows.y;
  if (gradient) {
    out = *gradient == Gradient::kX ? rows.x : views[*gradient == Gradient::kWeightA ? kWeightA : kWeightB];
    set_contiguous_strides(out);
  }
  out.data = params[nparam - 1];

  // Kept between calls, so that a step allocates nothing.
  thread_local std::vector<std::int32_t> indices;
  indices.resize(static_cast<std::size_t>(rows.y.shape[0]));
  const std::int64_t w = views[kWeightB].shape[0];
  if (std::strcmp(dtypes[kIndices], "int64") == 0) {
    narrow<std::int64_t>(params[kIndices], rows.rows_per_index, w, indices);
  } else if (rows.indices.dtype == DType::kInt32) {
    narrow<std::int32_t>(params[kIndices], rows.rows_per_index, w, indices);
  } else {
    // Shapes of unknown rank are not checked before: reading on would read past the end of narrower elements.
    raise_if_refused(refuse("indices_dtype", "indices", "int32 or int64", dtypes[kIndices]));
  }
  rows.indices.data = indices.data();

  Problem problem;
  problem.y = &rows.y;
  problem.x = &rows.x;
  problem.weight_b = &views[kWeightB];
  problem.indices = &rows.indices;
  problem.weight_a = has_a ? &views[kWeightA] : nullptr;
  problem.out = &out;
  problem.layer_idx = scalar_at("layer_idx", kLayerIdx, std::int64_t{});
  problem.scale = scalar_at("scale", kScale, double{});
  problem.y_offset = scalar_at("y_offset", kYOffset, std::int64_t{});
  problem.rounding = scalar_at("rounding", kDeviceRounding, std::int64_t{}) != 0 ? Rounding::kDevice : Rounding::kFloat32;
  problem.limits = Limits::kNone;
  if (!gradient) {
    raise_if_refused(add_lora(problem, cpu_backend()));
    return;
  }
  problem.rounding = Rounding::kFloat32;
  raise_if_refused(check_description(problem, cpu_backend()));
  compute_gradient(problem, *gradient);
}

// The rules for shapes and scalars alone. MindSpore passes no dtypes where this is asked, so all count as float32.
Status check_shapes_and_scalars(bool has_a, const int* ndims, const std::int64_t* const* shapes, const Problem& scalars) {
  const auto view = [&](int i, const char* dtype) { return view_of(nullptr, ndims[i], shapes[i], dtype); };
  const TensorView y = view(kY, "float32");
  const TensorView x = view(kX, "float32");
  const TensorView weight_b = view(kWeightB, "float32");
  const TensorView indices = view(kIndices, "int32");
  const TensorView weight_a = has_a ? view(kWeightA, "float32") : TensorView{};
  Rows rows;
  if (Status status = collapse_leading_dims(y, x, indices, rows); !status.ok()) return status;
  Problem problem = scalars;
  problem.y = &rows.y;
  problem.x = &rows.x;
  problem.weight_b = &weight_b;
  problem.indices = &rows.indices;
  problem.weight_a = has_a ? &weight_a : nullptr;
  problem.limits = Limits::kNone;
  return check_description(problem, cpu_backend());
}

// The shape of the result, and a refusal of shapes that do not agree before anything runs.
std::vector<std::int64_t> infer(bool has_a, Input like, const int* ndims, std::int64_t** shapes) {
  for (int i = 0; i < (has_a ? 5 : 4); ++i) {
    // A dimension of -2 means that not even the rank is known.
    for (int d = 0; d < ndims[i]; ++d) {
      if (shapes[i][d] < kUnknown) return {shapes[like], shapes[like] + ndims[like]};
    }
  }
  raise_if_refused(check_shapes_and_scalars(has_a, ndims, shapes, Problem{}));
  return {shapes[like], shapes[like] + ndims[like]};
}

}  // namespace

#define ADDLORA_EXPORT __attribute__((visibility("default")))

extern "C" {

// One operator: its launch and its shape, which is that of an input.
#define ADDLORA_OPERATOR(NAME, HAS_A, GRADIENT, LIKE)                                                                 \
  ADDLORA_EXPORT int NAME(int nparam, void** params, int* ndims, std::int64_t** shapes, const char** dtypes,          \
                          void* /*stream*/, void* /*extra*/) {                                                        \
    launch(HAS_A, GRADIENT, nparam, params, ndims, shapes, dtypes);                                                   \
    return 0;                                                                                                         \
  }                                                                                                                   \
  ADDLORA_EXPORT std::vector<std::int64_t> NAME##InferShape(int* ndims, std::int64_t** shapes, void* /*extra*/) {     \
    return infer(HAS_A, LIKE, ndims, shapes);                                                                         \
  }

ADDLORA_OPERATOR(AddLora, true, std::nullopt, kY)
ADDLORA_OPERATOR(AddLoraGradX, true, Gradient::kX, kX)
ADDLORA_OPERATOR(AddLoraGradWeightA, true, Gradient::kWeightA, kWeightA)
ADDLORA_OPERATOR(AddLoraGradWeightB, true, Gradient::kWeightB, kWeightB)
// For the operator on Ascend, which MindSpore's compiler builds apart from this library: why these shapes (y, x, weight_b,
// indices and, unless it is null, weight_a) and scalars are refused, or null. The text is the thread's until the next call.
ADDLORA_EXPORT const char* AddLoraRefusal(const int* ndims, const std::int64_t* const* shapes, std::int64_t layer_idx,
                                          std::int64_t y_offset, std::int64_t y_slice_size) {
  Problem scalars;
  scalars.layer_idx = layer_idx;
  scalars.y_offset = y_offset;
  scalars.y_slice_size = y_slice_size;
  const Status status = check_shapes_and_scalars(shapes[kWeightA] != nullptr, ndims, shapes, scalars);
  if (status.ok()) return nullptr;
  thread_local std::string text;
  text = "AddLoraError " + std::to_string(static_cast<int>(status.code)) + ": " + status.message;
  return text.c_str();
}

// Without weight_a.
ADDLORA_OPERATOR(AddLoraExpand, false, std::nullopt, kY)
ADDLORA_OPERATOR(AddLoraExpandGradX, false, Gradient::kX, kX)
ADDLORA_OPERATOR(AddLoraExpandGradWeightB, false, Gradient::kWeightB, kWeightB)
}
