// The two-phase interface: a plan made by the first phase, run by the second.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "aclnn/acl_meta.h"
#include "tensors.hpp"

namespace emu {

struct Operand {
  const void *handle;              // null for an optional tensor that is not there
  std::shared_ptr<Tensor> tensor;  // its address may be replaced by aclSetTensorAddr
};

struct Workspace {
  std::byte *data;
  uint64_t bytes;
};

struct Plan {
  std::string function;  // whose second phase may run it
  std::vector<Operand> operands;
  // Where a list of tensors is one argument: for each argument, its first operand. Empty: one operand each.
  std::vector<size_t> first_operand;
  uint64_t workspace_bytes = 0;
  bool contiguous_only = false;  // 561000 from the second phase for a strided operand
  // The work on the device; the operands are copies that carry the addresses of the launch.
  std::function<void(const std::vector<Tensor> &, Workspace)> kernel;
};

// The operand for a handle given by a caller; a null handle gives an absent one.
Operand operand(const aclTensor *handle);

void new_executor(Plan plan, uint64_t *workspace_bytes, aclOpExecutor **executor);
void set_repeatable(aclOpExecutor *executor);
// `relative` counts within the argument `index` where that is a list.
void set_tensor_address(aclOpExecutor *executor, size_t index, size_t relative, void *address);
void destroy_executor(aclOpExecutor *executor);

// The second phase. An absent operand reaches the kernel as a Tensor without dtype.
void run_executor(const std::string &function, void *workspace, uint64_t workspace_bytes, aclOpExecutor *executor,
                  aclrtStream stream);

void reset_executors();

}  // namespace emu
