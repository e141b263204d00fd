// aclnnAddLora as one operator of MindSpore's graphs on Ascend. ms.ops.CustomOpBuilder builds it together with
// eager_extension.cpp, with the definition in graph_definition.cpp. Unlike ops.Custom it can do without weight_a, copies y
// by itself, and returns the result as its own output, so that nothing has to be made to depend on anything.
#include <vector>

#include "kernel/ascend/aclnn/kernel_mod_impl/aclnn_kernel_mod.h"
#include "ms_extension/all.h"

namespace mindspore::ops {

class AddLoraFuncImpl : public OpFuncImpl {
 public:
  ShapeArray InferShape(const PrimitivePtr &, const InferInfoPtrList &inputs) const override {
    return {inputs[0]->GetShape()};
  }
  std::vector<TypeId> InferType(const PrimitivePtr &, const InferInfoPtrList &inputs) const override {
    return {inputs[0]->GetType()};
  }
  bool GeneralInferRegistered() const override { return true; }
};

}  // namespace mindspore::ops

// AddLoraRefusal of the package's own library, where the rules are; set when the extension is loaded.
const char *(*addlora_refusal)(const int *ndims, const int64_t *const *shapes, int64_t layer_idx, int64_t y_offset,
                               int64_t y_slice_size) = nullptr;

namespace mindspore::kernel {

// The positions of graph_definition.cpp.
enum AddLoraInput { kY, kX, kWeightB, kIndices, kLayerIdx, kScale, kYOffset, kYSliceSize, kWeightA };

// A static graph plans while an input is still described as the strided view that it is in the graph, then hands the
// launch a contiguous copy of it, and the planned call with its strides is used again: wrong results, or 561000. While
// this object lives the inputs say that they are contiguous, as they will be.
class AsLaunched {
 public:
  explicit AsLaunched(const std::vector<KernelTensor *> &inputs) : inputs_(inputs) {
    for (KernelTensor *input : inputs_) {
      views_.push_back(input == nullptr ? nullptr : input->tensor_storage_info());
      if (input != nullptr) input->set_tensor_storage_info(nullptr);
    }
  }
  ~AsLaunched() {
    for (size_t i = 0; i < inputs_.size(); ++i)
      if (inputs_[i] != nullptr) inputs_[i]->set_tensor_storage_info(views_[i]);
  }
  AsLaunched(const AsLaunched &) = delete;
  AsLaunched &operator=(const AsLaunched &) = delete;

 private:
  const std::vector<KernelTensor *> &inputs_;
  std::vector<TensorStorageInfoPtr> views_;
};

class AddLoraKernel : public AclnnKernelMod {
 public:
  AddLoraKernel() : AclnnKernelMod("aclnnAddLora") {}

  void GetWorkSpaceInfo(const std::vector<KernelTensor *> &inputs, const std::vector<KernelTensor *> &outputs) override {
    layer_idx_ = inputs[kLayerIdx]->GetValueWithCheck<int64_t>();
    // MindSpore's float; CANN's argument is a double.
    scale_ = static_cast<double>(inputs[kScale]->GetValueWithCheck<pyfloat>());
    y_offset_ = inputs[kYOffset]->GetValueWithCheck<int64_t>();
    y_slice_size_ = inputs[kYSliceSize]->GetValueWithCheck<int64_t>();
    Check(inputs);
    const AsLaunched as_launched(inputs);
    ClearOpsWorkSpaceList();
    GetWorkspaceForResizeCopy(outputs[0], inputs[kY]);
    GetWorkspaceForResizeDelta(outputs[0], inputs[kX], inputs[kWeightB], inputs[kIndices], inputs[kWeightA], layer_idx_,
                               scale_, y_offset_, y_slice_size_, outputs[0]);
  }

  bool Launch(const std::vector<KernelTensor *> &inputs, const std::vector<KernelTensor *> &workspace,
              const std::vector<KernelTensor *> &outputs, void *stream) override {
    RunOpCopy(stream, workspace, outputs[0], inputs[kY]);
    RunOpDelta(stream, workspace, outputs[0], inputs[kX], inputs[kWeightB], inputs[kIndices], inputs[kWeightA],
               layer_idx_, scale_, y_offset_, y_slice_size_, outputs[0]);
    return true;
  }

 private:
  // With dynamic shapes only now do all sizes show. CANN would refuse most without a reason, and not see that x has other
  // columns than R where weight_a is None.
  void Check(const std::vector<KernelTensor *> &inputs) const {
    constexpr int kTensors[] = {kY, kX, kWeightB, kIndices, kWeightA};
    std::vector<ShapeVector> held;
    int ndims[5] = {};
    const int64_t *shapes[5] = {};
    held.reserve(5);
    for (int i = 0; i < 5; ++i) {
      const KernelTensor *tensor = inputs[kTensors[i]];
      if (tensor == nullptr || tensor->type_id() == kMetaTypeNone) continue;
      held.push_back(tensor->GetShapeVector());
      ndims[i] = static_cast<int>(held.back().size());
      shapes[i] = held.back().data();
    }
    const char *refusal = addlora_refusal(ndims, shapes, layer_idx_, y_offset_, y_slice_size_);
    if (refusal != nullptr) MS_LOG(EXCEPTION) << refusal;
  }

  DEFINE_GET_WORKSPACE_FOR_OPS(aclnnInplaceCopy, Copy)
  DEFINE_GET_WORKSPACE_FOR_OPS(aclnnAddLora, Delta)

  int64_t layer_idx_ = 0;
  double scale_ = 1;
  int64_t y_offset_ = 0;
  int64_t y_slice_size_ = 0;
};

}  // namespace mindspore::kernel

MS_CUSTOM_OPS_REGISTER(add_lora, AddLoraFuncImpl, AddLoraKernel);
