// Which kernel sets there are, and which one runs.
#pragma once

#include <string>
#include <vector>

#include "kernel_set.hpp"

namespace addlora::cpu {

// The sets that this CPU can run, best first. Never empty.
const std::vector<const KernelSet*>& available_kernel_sets();

struct Selection {
  const KernelSet* set = nullptr;  // null where ADDLORA_ISA names one that is not available
  std::string error;
};

// ADDLORA_ISA, read once, or the best set.
const Selection& selected_kernel_set();

}  // namespace addlora::cpu
