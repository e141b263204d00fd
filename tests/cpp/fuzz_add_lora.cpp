// For libFuzzer (clang): its bytes are the choices of random_calls.cpp.
#include <cstdio>
#include <cstdlib>

#include "random_calls.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Choices choices(data, size);
  Counts counts;
  const std::string failure = random_call(choices, counts);
  if (failure.empty()) return 0;
  std::fprintf(stderr, "%s\n", failure.c_str());
  std::abort();
}
