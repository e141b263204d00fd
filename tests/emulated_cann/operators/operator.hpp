// What the small operators share: a plan without workspace, and the second phase, which is the same for all.
#pragma once

#include <functional>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "aclnn/acl_meta.h"
#include "executors.hpp"
#include "export.hpp"
#include "handles.hpp"
#include "loops.hpp"
#include "tensors.hpp"

namespace emu {

using Kernel = std::function<void(const std::vector<Tensor> &)>;

// The results of a first phase.
struct Results {
  uint64_t *workspace_bytes;
  aclOpExecutor **executor;
};

inline void plan_small(const std::string &function, std::initializer_list<const aclTensor *> operands, Results results,
                       Kernel kernel) {
  Plan plan;
  plan.function = function;
  for (const aclTensor *each : operands) plan.operands.push_back(operand(each));
  plan.kernel = [kernel = std::move(kernel)](const std::vector<Tensor> &tensors, Workspace) { kernel(tensors); };
  new_executor(std::move(plan), results.workspace_bytes, results.executor);
}

// A list of tensors and then one more.
inline void plan_list(const std::string &function, const aclTensorList *list, const aclTensor *last, Results results,
                      Kernel kernel) {
  Plan plan;
  plan.function = function;
  const auto handles = tensor_lists().get(list)->handles;
  for (const void *each : handles) plan.operands.push_back(operand(static_cast<const aclTensor *>(each)));
  plan.operands.push_back(operand(last));
  plan.first_operand = {0, handles.size()};
  plan.kernel = [kernel = std::move(kernel)](const std::vector<Tensor> &tensors, Workspace) { kernel(tensors); };
  new_executor(std::move(plan), results.workspace_bytes, results.executor);
}

inline Scalar scalar_of(const aclScalar *handle) { return *scalars().get(handle); }
inline std::vector<int64_t> values_of(const aclIntArray *handle) { return int_arrays().get(handle)->values; }

}  // namespace emu

// EMU_OPERATOR(aclnnName, (kernel planning statement), parameters...): both phases. The statement uses `results`.
#define EMU_OPERATOR(name, statement, ...)                                                                        \
  EMU_API aclnnStatus name##GetWorkspaceSize(__VA_ARGS__, uint64_t *workspace_bytes, aclOpExecutor **executor) { \
    return EMU_CALL.run([&] {                                                                                     \
      const std::string function = #name;                                                                         \
      const emu::Results results{workspace_bytes, executor};                                                      \
      statement;                                                                                                  \
    });                                                                                                           \
  }                                                                                                               \
  EMU_API aclnnStatus name(void *workspace, uint64_t bytes, aclOpExecutor *executor, aclrtStream stream) {        \
    return EMU_CALL.run([&] { emu::run_executor(#name, workspace, bytes, executor, stream); });                   \
  }
