#include "probe.hpp"

#include "device_tensor.hpp"

namespace addlora::aclnn {

Answer probe(const Problem& problem) {
  enter_device();
  HostTensor y(*problem.y), x(*problem.x), weight_b(*problem.weight_b), indices(*problem.indices), out(*problem.out);
  std::unique_ptr<HostTensor> weight_a;
  if (problem.weight_a != nullptr) weight_a = std::make_unique<HostTensor>(*problem.weight_a);
  for (HostTensor* tensor : {&y, &x, &weight_b, &indices, weight_a.get(), &out}) {
    if (tensor != nullptr) tensor->upload();
  }
  Answer answer;
  Executor* planned = nullptr;
  answer.first_phase = cann().call.aclnnAddLoraGetWorkspaceSize(
      y.handle(), x.handle(), weight_b.handle(), indices.handle(), weight_a == nullptr ? nullptr : weight_a->handle(),
      problem.layer_idx, problem.scale, problem.y_offset, problem.y_slice_size, out.handle(), &answer.workspace_bytes,
      &planned);
  if (answer.first_phase != 0) return answer;
  const ExecutorHandle executor(planned);
  require(cann().call.aclSetAclOpExecutorRepeatable(planned), "aclSetAclOpExecutorRepeatable");
  DeviceMemory workspace;
  if (answer.workspace_bytes > 0) workspace = allocate(answer.workspace_bytes);
  const StreamHandle stream = make_stream();
  answer.second_phase = cann().call.aclnnAddLora(workspace.get(), answer.workspace_bytes, planned, stream.get());
  if (answer.second_phase == 0) answer.second_phase = cann().call.aclrtSynchronizeStream(stream.get());
  y.download(problem.y->data);
  out.download(problem.out->data);
  return answer;
}

}  // namespace addlora::aclnn
