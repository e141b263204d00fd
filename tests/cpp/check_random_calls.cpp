#include <cstdio>

#include "checks.hpp"
#include "random_calls.hpp"
#include "recipe.hpp"

std::string check_random_calls(long calls, std::uint64_t seed) {
  Counts counts;
  for (long i = 0; i < calls; ++i) {
    Choices choices(recipe::mix(seed) + static_cast<std::uint64_t>(i));
    const std::string failure = random_call(choices, counts);
    if (!failure.empty()) return "call " + std::to_string(i) + " of seed " + std::to_string(seed) + ": " + failure;
  }
  std::printf("  %ld computed, %ld refused, %ld of those for want of memory\n", counts.computed, counts.refused,
              counts.out_of_memory);
  if (calls >= 100 && (counts.computed < calls / 4 || counts.refused < calls / 10)) return "too few of one kind";
  return {};
}
