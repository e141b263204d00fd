// One call of the C++ entry with random views, right or wrong, and what must hold of it.
#pragma once

#include <string>

#include "views.hpp"

// What the calls came to.
struct Counts {
  long computed = 0;
  long refused = 0;
  long out_of_memory = 0;
};

// Returns what did not hold, or nothing.
std::string random_call(Choices& choices, Counts& counts);
