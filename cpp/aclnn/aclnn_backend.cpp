#include "aclnn_backend.hpp"

#include <cstring>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "cann.hpp"
#include "handles.hpp"

namespace addlora {
namespace {

using aclnn::cann;
using aclnn::require;

std::string unavailable() {
  const aclnn::Cann& found = cann();
  if (!found.found) return found.missing;
  if (!found.soc.empty() && !aclnn::supports_soc(found.soc)) {
    return "the operator has no kernels for this SoC, " + found.soc +
           " (it has for Ascend910B, Atlas A2, and Ascend310P)";
  }
  return {};
}

// Once per process, and the device for each thread. Others in the process, MindSpore for one, may have been first.
void enter_device() {
  static std::once_flag once;
  std::call_once(once, [] {
    const int code = cann().call.aclInit(nullptr);
    if (code != aclnn::kAlreadyInitialised) require(code, "aclInit");
    require(cann().call.aclnnInit(nullptr), "aclnnInit");
  });
  thread_local bool entered = false;
  if (entered) return;
  require(cann().call.aclrtSetDevice(0), "aclrtSetDevice");
  entered = true;
}

std::size_t element_count(const TensorView& view) {
  std::size_t count = 1;
  for (int i = 0; i < view.ndim; ++i) count *= static_cast<std::size_t>(view.shape[i]);
  return count;
}

// The elements of a view, one after the other.
void gather(const TensorView& view, int axis, const char* from, char*& to) {
  const std::size_t item = dtype_bytes(view.dtype);
  for (std::int64_t i = 0; i < view.shape[axis]; ++i, from += view.strides[axis]) {
    if (axis + 1 < view.ndim) {
      gather(view, axis + 1, from, to);
    } else {
      std::memcpy(to, from, item);
      to += item;
    }
  }
}

// A host tensor's place on the device, contiguous there whatever it is on the host.
class DeviceTensor {
 public:
  explicit DeviceTensor(const TensorView& host)
      : host_(host), bytes_(element_count(host) * dtype_bytes(host.dtype)), memory_(aclnn::allocate(bytes_)) {
    TensorView contiguous = host;
    set_contiguous_strides(contiguous);
    std::int64_t strides[kMaxDims];
    for (int i = 0; i < host.ndim; ++i) {
      strides[i] = contiguous.strides[i] / static_cast<std::int64_t>(dtype_bytes(host.dtype));
    }
    const auto dims = static_cast<std::uint64_t>(host.ndim);
    handle_.reset(cann().call.aclCreateTensor(
        host.shape, dims, host.dtype == DType::kInt32 ? aclnn::kAclInt32 : aclnn::kAclFloat16, strides, 0,
        aclnn::kFormatNd, host.shape, dims, memory_.get()));
    if (handle_ == nullptr) throw aclnn::Error(0, "aclCreateTensor returned no tensor");
  }

  const aclnn::Tensor* handle() const { return handle_.get(); }

  void upload() {
    const void* from = host_.data;
    std::vector<char> staging;
    if (!host_.is_contiguous()) {
      staging.resize(bytes_);
      char* to = staging.data();
      gather(host_, 0, host_.bytes(), to);
      from = staging.data();
    }
    require(cann().call.aclrtMemcpy(memory_.get(), bytes_, from, bytes_, aclnn::kHostToDevice), "aclrtMemcpy");
  }

  void download(void* to) const {
    require(cann().call.aclrtMemcpy(to, bytes_, memory_.get(), bytes_, aclnn::kDeviceToHost), "aclrtMemcpy");
  }

 private:
  const TensorView host_;
  std::size_t bytes_;
  aclnn::DeviceMemory memory_;
  aclnn::TensorHandle handle_;
};

// The operator adds into y and never writes out, so the device's copy of y is passed as both and read back.
class AclnnExecution final : public Execution {
 public:
  explicit AclnnExecution(const Problem& problem) : out_(*problem.out) {
    const auto place = [](const TensorView* view) {
      return view == nullptr ? nullptr : std::make_unique<DeviceTensor>(*view);
    };
    y_ = place(problem.y);
    x_ = place(problem.x);
    weight_b_ = place(problem.weight_b);
    indices_ = place(problem.indices);
    weight_a_ = place(problem.weight_a);
    // y_slice_size is resolved: older CANN refuses -1.
    aclnn::Executor* executor = nullptr;
    std::uint64_t size = 0;
    require(cann().call.aclnnAddLoraGetWorkspaceSize(
                y_->handle(), x_->handle(), weight_b_->handle(), indices_->handle(),
                weight_a_ == nullptr ? nullptr : weight_a_->handle(), problem.layer_idx, problem.scale,
                problem.y_offset, problem.weight_b->shape[2], y_->handle(), &size, &executor),
            "aclnnAddLoraGetWorkspaceSize");
    executor_.reset(executor);
    workspace_bytes_ = static_cast<std::size_t>(size);
    // Always repeatable, and destroyed by us: what becomes of a single-use one whose second phase fails is not known.
    require(cann().call.aclSetAclOpExecutorRepeatable(executor), "aclSetAclOpExecutorRepeatable");
    if (workspace_bytes_ > 0) workspace_ = aclnn::allocate(workspace_bytes_);
  }

  std::size_t workspace_bytes() const override { return workspace_bytes_; }
  bool uses_workspace() const override { return false; }
  void set_repeatable() override {}

  void run(void*, void*) override {
    enter_device();
    for (DeviceTensor* tensor : {y_.get(), x_.get(), weight_b_.get(), indices_.get(), weight_a_.get()}) {
      if (tensor != nullptr) tensor->upload();
    }
    const aclnn::StreamHandle stream = aclnn::make_stream();
    require(cann().call.aclnnAddLora(workspace_.get(), workspace_bytes_, executor_.get(), stream.get()),
            "aclnnAddLora");
    require(cann().call.aclrtSynchronizeStream(stream.get()), "aclrtSynchronizeStream");
    y_->download(out_.data);
  }

 private:
  const TensorView out_;
  std::unique_ptr<DeviceTensor> y_, x_, weight_b_, indices_, weight_a_;
  aclnn::DeviceMemory workspace_;
  std::size_t workspace_bytes_ = 0;
  aclnn::ExecutorHandle executor_;
};

// An empty batch: nothing to do, and nothing to ask the device for.
class EmptyExecution final : public Execution {
 public:
  std::size_t workspace_bytes() const override { return 0; }
  bool uses_workspace() const override { return false; }
  void set_repeatable() override {}
  void run(void*, void*) override {}
};

class AclnnBackend final : public Backend {
 public:
  const char* name() const override { return "aclnn"; }

  BackendInfo info() const override {
    const aclnn::Cann& found = cann();
    const std::string reason = unavailable();
    const std::string detail = !found.found ? std::string()
                                            : "SoC " + found.soc + ", " + found.runtime_path + ", " +
                                                  found.nnopbase_path + ", " + found.operator_path;
    return {reason.empty(), reason, detail};
  }

  bool is_device() const override { return true; }
  bool supports(DType dtype) const override { return dtype == DType::kFloat16; }
  const char* supported_dtypes() const override { return "float16"; }

  std::unique_ptr<Execution> plan(const Problem& problem) const override {
    if (const std::string reason = unavailable(); !reason.empty()) {
      throw std::invalid_argument("backend: \"aclnn\" is not available: " + reason);
    }
    if (problem.y->shape[0] == 0) return std::make_unique<EmptyExecution>();
    enter_device();
    return std::make_unique<AclnnExecution>(problem);
  }

  void run(const Problem& problem) const override { plan(problem)->run(nullptr, nullptr); }
};

}  // namespace

const Backend& aclnn_backend() {
  static const AclnnBackend backend;
  return backend;
}

}  // namespace addlora
