#include "kernel_sets.hpp"

#include <cstdlib>

namespace addlora::cpu {
namespace {

// Ordered from the best to the one that always runs.
const KernelSet* const kAll[] = {
#if defined(__x86_64__)
    &kAvx512Kernels,
    &kAvx2Kernels,
#elif defined(__aarch64__)
    &kNeonKernels,
#endif
    &kScalarKernels,
};

Selection select() {
  const char* forced = std::getenv("ADDLORA_ISA");
  const auto& available = available_kernel_sets();
  if (forced == nullptr || *forced == '\0') return {available.front(), {}};
  std::string names;
  for (const KernelSet* set : available) {
    if (std::string(forced) == set->name) return {set, {}};
    names += (names.empty() ? "" : ", ") + std::string(set->name);
  }
  return {nullptr, "ADDLORA_ISA: expected one of the kernel sets that this CPU runs (" + names + "), got " + forced};
}

}  // namespace

const std::vector<const KernelSet*>& available_kernel_sets() {
  static const std::vector<const KernelSet*> available = [] {
    std::vector<const KernelSet*> sets;
    for (const KernelSet* set : kAll) {
      if (set->supported()) sets.push_back(set);
    }
    return sets;
  }();
  return available;
}

const Selection& selected_kernel_set() {
  static const Selection selection = select();
  return selection;
}

}  // namespace addlora::cpu
