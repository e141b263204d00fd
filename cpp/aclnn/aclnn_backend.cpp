#include "aclnn_backend.hpp"

#include <unistd.h>

#include <cstring>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "../rules.hpp"
#include "cann.hpp"
#include "device_tensor.hpp"
#include "handles.hpp"

namespace addlora {
namespace {

using aclnn::cann;
using aclnn::require;

// The operands on the device. The operator adds into y and never writes out, so y is passed as both.
struct Operands {
  const aclnn::Tensor *y, *x, *weight_b, *indices, *weight_a;
};

// CANN's first phase, and what it keeps for the second.
class PlannedCall {
 public:
  PlannedCall(const Problem& problem, const Operands& on_device) {
    aclnn::Executor* executor = nullptr;
    std::uint64_t size = 0;
    // y_slice_size is resolved: older CANN refuses -1.
    require(cann().call.aclnnAddLoraGetWorkspaceSize(on_device.y, on_device.x, on_device.weight_b, on_device.indices,
                                                     on_device.weight_a, problem.layer_idx, problem.scale,
                                                     problem.y_offset, problem.weight_b->shape[2], on_device.y, &size,
                                                     &executor),
            "aclnnAddLoraGetWorkspaceSize");
    executor_.reset(executor);
    workspace_bytes_ = static_cast<std::size_t>(size);
    // Always repeatable, and destroyed by us: what becomes of a single-use one whose second phase fails is not known.
    require(cann().call.aclSetAclOpExecutorRepeatable(executor), "aclSetAclOpExecutorRepeatable");
  }

  std::size_t workspace_bytes() const { return workspace_bytes_; }

  void launch(void* workspace, aclnn::Stream stream) const {
    require(cann().call.aclnnAddLora(workspace, workspace_bytes_, executor_.get(), stream), "aclnnAddLora");
  }

 private:
  std::size_t workspace_bytes_ = 0;
  aclnn::ExecutorHandle executor_;
};

aclnn::DeviceMemory workspace_for(const PlannedCall& call) {
  return call.workspace_bytes() > 0 ? aclnn::allocate(call.workspace_bytes()) : nullptr;
}

void synchronize(aclnn::Stream stream) {
  require(cann().call.aclrtSynchronizeStream(stream), "aclrtSynchronizeStream");
}

// The indices as the device gets them, in memory of our own: "no adapter" is always -1 there. W itself would do, but on
// an Ascend310P with 32 adapters it overruns an array of the operator.
class DeviceIndices {
 public:
  explicit DeviceIndices(const Problem& problem)
      : adapters_(problem.weight_b->shape[0]),
        values_(static_cast<std::size_t>(problem.indices->shape[0])),
        tensor_(values_view()) {}

  const aclnn::Tensor* handle() const { return tensor_.handle(); }

  void upload(const TensorView& on_host) {
    const char* from = on_host.bytes();
    for (std::int32_t& value : values_) {
      std::memcpy(&value, from, sizeof value);
      if (value >= adapters_) value = -1;
      from += on_host.strides[0];
    }
    tensor_.upload();
  }

  // A host view of the indices that lie on the device, for the check.
  TensorView read(const TensorView& on_device) {
    const std::size_t bytes = values_.size() * sizeof values_[0];
    require(cann().call.aclrtMemcpy(values_.data(), bytes, on_device.data, bytes, aclnn::kDeviceToHost), "aclrtMemcpy");
    return values_view();
  }

 private:
  TensorView values_view() {
    TensorView view;
    view.data = values_.data();
    view.dtype = DType::kInt32;
    view.ndim = 1;
    view.shape[0] = static_cast<std::int64_t>(values_.size());
    set_contiguous_strides(view);
    return view;
  }

  const std::int64_t adapters_;
  std::vector<std::int32_t> values_;
  aclnn::HostTensor tensor_;
};

// numpy arrays: copied to the device, and the result copied back.
class HostExecution final : public Execution {
 public:
  explicit HostExecution(const Problem& problem)
      : problem_(problem),
        y_(*problem.y),
        x_(*problem.x),
        weight_b_(*problem.weight_b),
        indices_(problem),
        weight_a_(problem.weight_a == nullptr ? nullptr : std::make_unique<aclnn::HostTensor>(*problem.weight_a)),
        call_(problem, {y_.handle(), x_.handle(), weight_b_.handle(), indices_.handle(),
                        weight_a_ == nullptr ? nullptr : weight_a_->handle()}),
        workspace_(workspace_for(call_)) {}
  ~HostExecution() override { aclnn::try_enter_device(); }

  std::size_t workspace_bytes() const override { return call_.workspace_bytes(); }
  bool uses_workspace() const override { return false; }
  void set_repeatable() override {}

  Status run(void*, void*) override {
    const std::lock_guard one_at_a_time(running_);
    aclnn::enter_device();
    for (aclnn::HostTensor* tensor : {&y_, &x_, &weight_b_, weight_a_.get()}) {
      if (tensor != nullptr) tensor->upload();
    }
    indices_.upload(*problem_.indices);
    const aclnn::StreamHandle stream = aclnn::make_stream();
    call_.launch(workspace_.get(), stream.get());
    synchronize(stream.get());
    y_.download(problem_.out->data);
    return {};
  }

 private:
  const Problem problem_;
  aclnn::HostTensor y_, x_, weight_b_;
  DeviceIndices indices_;
  std::unique_ptr<aclnn::HostTensor> weight_a_;
  PlannedCall call_;
  aclnn::DeviceMemory workspace_;
  std::mutex running_;  // the copies on the device serve one run
};

// Tensors that are on the device: nothing is copied but y, where out is not y itself, and the indices, to be checked.
class DeviceExecution final : public Execution {
 public:
  explicit DeviceExecution(const Problem& problem)
      : problem_(problem),
        handles_{aclnn::describe(*problem.out, problem.out->data),
                 aclnn::describe(*problem.x, problem.x->data),
                 aclnn::describe(*problem.weight_b, problem.weight_b->data),
                 problem.weight_a == nullptr ? nullptr : aclnn::describe(*problem.weight_a, problem.weight_a->data)},
        indices_(problem),
        call_(problem, {handles_[0].get(), handles_[1].get(), handles_[2].get(), indices_.handle(),
                        handles_[3].get()}) {}
  // The work may be under way yet, and reads the indices here.
  ~DeviceExecution() override {
    aclnn::try_enter_device();
    wait_for_last_run();
  }

  std::size_t workspace_bytes() const override { return call_.workspace_bytes(); }
  bool uses_workspace() const override { return true; }
  void set_repeatable() override {}

  // On a stream of the caller's the work is only begun; without one it is done when this returns.
  Status run(void* workspace, void* stream) override {
    const std::lock_guard one_at_a_time(running_);
    aclnn::enter_device();
    wait_for_last_run();  // perhaps on another stream
    aclnn::StreamHandle own;
    if (stream == nullptr) {
      own = aclnn::make_stream();
      stream = own.get();
    }
    if (Status status = guard_indices(stream); !status.ok()) return status;
    if (problem_.y->data != problem_.out->data) {
      const std::size_t bytes = aclnn::contiguous_bytes(*problem_.y);
      require(cann().call.aclrtMemcpyAsync(problem_.out->data, bytes, problem_.y->data, bytes, aclnn::kDeviceToDevice, stream),
              "aclrtMemcpyAsync");
    }
    call_.launch(workspace, stream);
    if (own != nullptr) {
      synchronize(stream);
      return {};
    }
    try {
      last_run_ = aclnn::record(stream);
    } catch (const aclnn::Error&) {
      cann().call.aclrtSynchronizeStream(stream);
      throw;
    }
    return {};
  }

 private:
  // By an event, not by the stream, which may be gone by then. A failure of the work is for the stream's owner to see.
  void wait_for_last_run() {
    // In a forked child nothing ends the work, which is the parent's.
    if (last_run_ != nullptr && getpid() == process_) cann().call.aclrtSynchronizeEvent(last_run_.get());
    last_run_ = nullptr;
  }

  // An index above W would make the device write outside its memory.
  Status guard_indices(aclnn::Stream stream) {
    synchronize(stream);  // what computes the indices may be under way
    const TensorView on_host = indices_.read(*problem_.indices);
    Problem problem = problem_;
    problem.indices = &on_host;
    Status status = check_indices(problem);
    if (status.ok()) indices_.upload(on_host);
    return status;
  }

  const Problem problem_;
  aclnn::TensorHandle handles_[4];  // y (in out's memory), x, weight_b, weight_a
  DeviceIndices indices_;
  PlannedCall call_;
  std::mutex running_;
  const pid_t process_ = getpid();
  aclnn::EventHandle last_run_;  // set while the work on a stream of the caller's may be under way
};

// An empty batch: nothing to do, and nothing to ask the device for.
class EmptyExecution final : public Execution {
 public:
  std::size_t workspace_bytes() const override { return 0; }
  bool uses_workspace() const override { return false; }
  void set_repeatable() override {}
  Status run(void*, void*) override { return {}; }
};

class AclnnBackend final : public Backend {
 public:
  const char* name() const override { return "aclnn"; }

  BackendInfo info() const override {
    const aclnn::Cann& found = cann();
    const std::string reason = aclnn::unavailable();
    const std::string detail = !found.found ? std::string()
                                            : "SoC " + found.soc + ", " + found.runtime_path + ", " +
                                                  found.nnopbase_path + ", " + found.operator_path;
    return {reason.empty(), reason, detail};
  }

  bool is_device() const override { return true; }
  bool supports(DType dtype) const override { return dtype == DType::kFloat16; }
  const char* supported_dtypes() const override { return "float16"; }

  std::unique_ptr<Execution> plan(const Problem& problem) const override {
    if (const std::string reason = aclnn::unavailable(); !reason.empty()) {
      throw std::invalid_argument("backend: \"aclnn\" is not available: " + reason);
    }
    if (problem.y->shape[0] == 0) return std::make_unique<EmptyExecution>();
    aclnn::enter_device();
    if (problem.y->on_device) return std::make_unique<DeviceExecution>(problem);
    return std::make_unique<HostExecution>(problem);
  }

  Status run(const Problem& problem) const override {
    const std::unique_ptr<Execution> execution = plan(problem);
    aclnn::DeviceMemory workspace;
    if (execution->uses_workspace() && execution->workspace_bytes() > 0) {
      workspace = aclnn::allocate(execution->workspace_bytes());
    }
    return execution->run(workspace.get(), nullptr);
  }
};

}  // namespace

const Backend& aclnn_backend() {
  static const AclnnBackend backend;
  return backend;
}

}  // namespace addlora
