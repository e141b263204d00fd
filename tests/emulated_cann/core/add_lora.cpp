#include "add_lora.hpp"

#include <cstdlib>

#include "contexts.hpp"
#include "error.hpp"
#include "settings.hpp"

namespace emu {
namespace {

void require_not_null(const void *pointer, const char *name) {
  if (!pointer) throw Error{kNullPointer, std::string("aclnnAddLora: ") + name + " is null"};
}

void require_kernel() {
  const Settings machine = settings();
  if (machine.require_opp_path && !std::getenv("ASCEND_OPP_PATH"))
    throw Error{kOppPathUnset, "ASCEND_OPP_PATH is not set"};
  if (!machine.has_add_lora()) throw Error{kKernelNotFound, "aclnnAddLora has no kernel for " + machine.soc};
}

}  // namespace

uint64_t add_lora_workspace_bytes(int64_t batch, int64_t h1, int64_t h2, int64_t rank) {
  const int64_t rounded = (batch + 15) / 16 * 16;
  return static_cast<uint64_t>(16777216 + batch * h1 * 2 + rounded * rank * 2 + rounded * h2 * 2 + rounded * 12 +
                               1048576);
}

void add_lora_first_phase(const AddLoraArguments &arguments, uint64_t *workspace_bytes, aclOpExecutor **executor) {
  require_runtime();
  require_not_null(arguments.y, "y");
  require_not_null(arguments.x, "x");
  require_not_null(arguments.weight_b, "weightB");
  require_not_null(arguments.indices, "indices");
  require_not_null(arguments.out, "out");
  require_not_null(executor, "executor");
  require_not_null(workspace_bytes, "workspaceSize");

  Plan plan;
  plan.function = "aclnnAddLora";
  plan.contiguous_only = true;
  plan.operands = {operand(arguments.y),       operand(arguments.x),        operand(arguments.weight_b),
                   operand(arguments.indices), operand(arguments.weight_a), operand(arguments.out)};
  const auto tensor = [&plan](AddLoraOperand which) { return plan.operands[which].tensor.get(); };
  const Tensor &y = *tensor(kY);
  const Tensor &x = *tensor(kX);
  const Tensor &b = *tensor(kWeightB);
  check_add_lora_types(y, x, b, *tensor(kIndices), *tensor(kOut));
  if (y.rank() > 0 && y.dims[0] == 0) {
    plan.kernel = [](const std::vector<Tensor> &, Workspace) {};
    new_executor(std::move(plan), workspace_bytes, executor);
    return;
  }
  check_add_lora_shapes(y, x, b, *tensor(kIndices), tensor(kWeightA), arguments);
  require_kernel();

  plan.workspace_bytes = add_lora_workspace_bytes(y.dims[0], x.dims[1], b.dims[2], b.dims[3]);
  // ySliceSize is not passed on: the kernel does not look at it.
  plan.kernel = [scalars = AddLoraScalars{arguments.layer, arguments.scale, arguments.y_offset}](
                    const std::vector<Tensor> &operands, Workspace workspace) {
    add_lora_kernel(operands, scalars, workspace);
  };
  new_executor(std::move(plan), workspace_bytes, executor);
}

}  // namespace emu
