// The core without Python: the digests of fixed calls, gradients, random calls, many threads, and the functions that MindSpore
// calls. ADDLORA_ISA chooses the kernel set.
//
//     addlora_tests [random calls] [seed]
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "checks.hpp"
#include "cpu/kernel_sets.hpp"

int main(int argc, char** argv) {
  const long calls = argc > 1 ? std::atol(argv[1]) : 2000;
  const auto seed = static_cast<std::uint64_t>(argc > 2 ? std::atoll(argv[2]) : 1);
  const addlora::cpu::Selection& selection = addlora::cpu::selected_kernel_set();
  if (selection.set == nullptr) {
    std::printf("not run: %s\n", selection.error.c_str());
    return 77;  // ctest counts it as skipped
  }
  std::printf("kernel set %s\n", selection.set->name);
  int failures = 0;
  const auto report = [&failures](const char* name, const std::string& failure) {
    std::printf("%s: %s\n", name, failure.empty() ? "ok" : failure.c_str());
    failures += !failure.empty();
  };
  report("digests", check_digests());
  report("gradients", check_gradients());
  report("random calls", check_random_calls(calls, seed));
  report("threads", check_threads());
  report("MindSpore's functions", check_launch());
  return failures == 0 ? 0 : 1;
}
