// aclnnAddLora for MindSpore's PyNative mode on Ascend, built by ms.ops.CustomOpBuilder.
//
// The operator adds into its first tensor and never writes its last, so both are the same tensor here.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ms_extension/all.h"

namespace {

using ms::Tensor;
using ms::pynative::AclnnOpRunner;
using ms::pynative::PyboostRunner;

// A std::string: given a literal, Call would take it for the function.
const std::string kName = "AddLora";

struct Scalars {
  int64_t layer_idx;
  double scale;  // CANN takes a double; a float would be read as garbage
  int64_t y_offset;
  int64_t y_slice_size;
};

// The device refuses strided tensors in its second phase, and MindSpore does not make them contiguous here.
std::optional<Tensor> contiguous(const std::optional<Tensor> &tensor) {
  if (!tensor.has_value() || !tensor->is_defined()) return std::nullopt;
  return tensor->contiguous();
}

// target += scale * (x A^T) B^T, in place. Without weight_a, x goes straight to the second product.
void launch_add_lora(const Tensor &target, const Tensor &x, const Tensor &weight_b, const Tensor &indices,
                     const std::optional<Tensor> &weight_a, const Scalars &scalars) {
  std::vector<Tensor> inputs = {target, x, weight_b, indices};
  if (weight_a.has_value()) inputs.push_back(weight_a.value());
  auto runner = std::make_shared<AclnnOpRunner>(kName);
  runner->SetLaunchFunc(LAUNCH_ACLNN_FUNC(aclnnAddLora, target, x, weight_b, indices, weight_a, scalars.layer_idx,
                                          scalars.scale, scalars.y_offset, scalars.y_slice_size, target));
  runner->Run(inputs, {target});
}

Tensor copy_of(const Tensor &tensor) {
  Tensor copy(tensor.data_type(), tensor.shape());
  auto runner = std::make_shared<AclnnOpRunner>("InplaceCopy");
  runner->SetLaunchFunc(LAUNCH_ACLNN_FUNC(aclnnInplaceCopy, copy, tensor));
  runner->Run({tensor}, {copy});
  return copy;
}

Tensor add_lora(const Tensor &y, const Tensor &x, const Tensor &weight_b, const Tensor &indices, int64_t layer_idx,
                double scale, int64_t y_offset, int64_t y_slice_size, const std::optional<Tensor> &weight_a) {
  const Tensor accumulated = copy_of(y);
  launch_add_lora(accumulated, x.contiguous(), weight_b.contiguous(), indices.contiguous(), contiguous(weight_a),
                  {layer_idx, scale, y_offset, y_slice_size});
  return accumulated;
}

// For callers that own y and add several adapters' parts into it one after another.
void add_lora_in_place(const Tensor &y, const Tensor &x, const Tensor &weight_b, const Tensor &indices,
                       int64_t layer_idx, double scale, int64_t y_offset, int64_t y_slice_size,
                       const std::optional<Tensor> &weight_a) {
  launch_add_lora(y, x.contiguous(), weight_b.contiguous(), indices.contiguous(), contiguous(weight_a),
                  {layer_idx, scale, y_offset, y_slice_size});
}

}  // namespace

extern const char *(*addlora_refusal)(const int *ndims, const int64_t *const *shapes, int64_t layer_idx,
                                      int64_t y_offset, int64_t y_slice_size);

// The order of arguments is graph_definition.cpp's: one name serves both modes.
PYBIND11_MODULE(MS_EXTENSION_NAME, module) {
  namespace py = pybind11;
  module.def(
      "use_rules",
      [](std::uintptr_t function) { addlora_refusal = reinterpret_cast<decltype(addlora_refusal)>(function); },
      "The address of AddLoraRefusal, which the operator in graphs asks.", py::arg("function"));
  module.def(
      "add_lora",
      [](const Tensor &y, const Tensor &x, const Tensor &weight_b, const Tensor &indices, int64_t layer_idx,
         double scale, int64_t y_offset, int64_t y_slice_size, const std::optional<Tensor> &weight_a) {
        return PyboostRunner::Call<1>(kName, add_lora, y, x, weight_b, indices, layer_idx, scale, y_offset,
                                      y_slice_size, weight_a);
      },
      "A new tensor: y plus the delta.", py::arg("y"), py::arg("x"), py::arg("weight_b"), py::arg("indices"),
      py::arg("layer_idx"), py::arg("scale"), py::arg("y_offset"), py::arg("y_slice_size"),
      py::arg("weight_a") = std::nullopt);
  module.def(
      "add_lora_",
      [](const Tensor &y, const Tensor &x, const Tensor &weight_b, const Tensor &indices, int64_t layer_idx,
         double scale, int64_t y_offset, int64_t y_slice_size, const std::optional<Tensor> &weight_a) {
        return PyboostRunner::Call<0>(kName, add_lora_in_place, y, x, weight_b, indices, layer_idx, scale, y_offset,
                                      y_slice_size, weight_a);
      },
      "Adds the delta into y, which must be contiguous.", py::arg("y"), py::arg("x"), py::arg("weight_b"),
      py::arg("indices"), py::arg("layer_idx"), py::arg("scale"), py::arg("y_offset"), py::arg("y_slice_size"),
      py::arg("weight_a") = std::nullopt);
}
