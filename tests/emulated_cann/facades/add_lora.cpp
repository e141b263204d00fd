// libopapi_math.so, libopapi.so on older CANN, or a custom package's libcust_opapi.so: the operator.
#include "add_lora.hpp"

#include "aclnnop/aclnn_add_lora.h"
#include "executors.hpp"
#include "export.hpp"

EMU_API aclnnStatus aclnnAddLoraGetWorkspaceSize(const aclTensor *y, const aclTensor *x, const aclTensor *weightB,
                                                 const aclTensor *indices, const aclTensor *weightAOptional,
                                                 int64_t layerIdx, double scale, int64_t yOffset, int64_t ySliceSize,
                                                 const aclTensor *out, uint64_t *workspaceSize,
                                                 aclOpExecutor **executor) {
  return EMU_CALL.run([&] {
    emu::add_lora_first_phase(
        {y, x, weightB, indices, weightAOptional, layerIdx, scale, yOffset, ySliceSize, out}, workspaceSize, executor);
  });
}

EMU_API aclnnStatus aclnnAddLora(void *workspace, uint64_t workspaceSize, aclOpExecutor *executor,
                                 aclrtStream stream) {
  return EMU_CALL.run([&] { emu::run_executor("aclnnAddLora", workspace, workspaceSize, executor, stream); });
}
