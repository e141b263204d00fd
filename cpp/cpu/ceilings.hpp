// What the machine can do at most, measured with the selected kernel set and the threads of a call: what the benchmark
// compares the kernels with.
#pragma once

#include <cstddef>

namespace addlora::cpu {

// Floating-point operations a second, two for each multiply-add, with nothing to wait for.
double measure_flops();

// Bytes a second from memory that somebody else filled.
double measure_read(const void* data, std::size_t bytes);

}  // namespace addlora::cpu
