// Each returns what failed, or nothing.
#pragma once

#include <cstdint>
#include <string>

// Every case of tests/data/digests.json has its digest, with 1 and with several threads.
std::string check_digests();
// The gradients: the formula in float32, the same bits with several threads.
std::string check_gradients();
std::string check_random_calls(long calls, std::uint64_t seed);
// Callers at once, while others change the number of threads; the same bits for each.
std::string check_threads();
// The functions that MindSpore calls: what only they can see is refused before it is read.
std::string check_launch();
