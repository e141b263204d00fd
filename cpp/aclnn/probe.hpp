// The operator as CANN has it, without our guards: what the self test asks of a device.
#pragma once

#include <cstdint>

#include "../add_lora.hpp"

namespace addlora::aclnn {

struct Answer {
  int first_phase = 0;   // the code of aclnnAddLoraGetWorkspaceSize
  int second_phase = 0;  // the code of aclnnAddLora, or of the synchronisation after it
  std::uint64_t workspace_bytes = 0;
};

// Passes y and out as two tensors and y_slice_size as it is; afterwards y and out hold what the device left in them.
// The problem has been checked, but for y_slice_size: nothing here may make the device write outside its memory.
Answer probe(const Problem& problem);

}  // namespace addlora::aclnn
