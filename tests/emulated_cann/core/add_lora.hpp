// aclnnAddLora: the checks of the first phase and the work of the second.
#pragma once

#include <cstdint>
#include <vector>

#include "aclnn/acl_meta.h"
#include "executors.hpp"
#include "tensors.hpp"

namespace emu {

struct AddLoraArguments {
  const aclTensor *y;
  const aclTensor *x;
  const aclTensor *weight_b;
  const aclTensor *indices;
  const aclTensor *weight_a;  // may be null
  int64_t layer;
  double scale;
  int64_t y_offset;
  int64_t y_slice_size;
  const aclTensor *out;
};

// Positions in Plan::operands, which are also the indices that aclSetTensorAddr takes.
enum AddLoraOperand { kY, kX, kWeightB, kIndices, kWeightA, kOut };

void add_lora_first_phase(const AddLoraArguments &arguments, uint64_t *workspace_bytes, aclOpExecutor **executor);

// The checks, in the device library's order. `a` is null where weight_a is.
void check_add_lora_types(const Tensor &y, const Tensor &x, const Tensor &b, const Tensor &indices, const Tensor &out);
void check_add_lora_shapes(const Tensor &y, const Tensor &x, const Tensor &b, const Tensor &indices, const Tensor *a,
                           const AddLoraArguments &arguments);
uint64_t add_lora_workspace_bytes(int64_t batch, int64_t h1, int64_t h2, int64_t rank);

struct AddLoraScalars {
  int64_t layer;
  double scale;
  int64_t y_offset;
};
void add_lora_kernel(const std::vector<Tensor> &operands, const AddLoraScalars &scalars, Workspace workspace);

}  // namespace emu
