#include "add_lora.hpp"

#include <algorithm>

#include "backend.hpp"
#include "rules.hpp"

namespace addlora {

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return "float16";
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat32: return "float32";
    case DType::kInt32: return "int32";
    case DType::kOther: break;
  }
  return "another dtype";
}

std::size_t dtype_bytes(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 ? 2 : 4;
}

bool TensorView::is_contiguous() const {
  for (int i = 0; i < ndim; ++i) {
    if (shape[i] == 0) return true;
  }
  auto expected = static_cast<std::int64_t>(dtype_bytes(dtype));
  for (int i = ndim - 1; i >= 0; --i) {
    if (shape[i] != 1 && strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

std::string TensorView::shape_text() const {
  std::string text = "[";
  for (int i = 0; i < std::min(ndim, kMaxDims); ++i) {
    if (i > 0) text += ", ";
    text += shape[i] == kUnknown ? "?" : std::to_string(shape[i]);
  }
  if (ndim > kMaxDims) text += ", ...";
  return text + "]";
}

void set_contiguous_strides(TensorView& view) {
  auto stride = static_cast<std::int64_t>(dtype_bytes(view.dtype));
  for (int i = view.ndim - 1; i >= 0; --i) {
    view.strides[i] = stride;
    stride *= view.shape[i];
  }
}

Status add_lora(const Problem& problem, const Backend& backend) {
  Status status = check(problem, backend);
  if (status.ok() && problem.y->shape[0] > 0) status = backend.run(problem);
  return status;
}

}  // namespace addlora
