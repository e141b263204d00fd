// Page-locked host memory: counted, and otherwise like any other.
#pragma once

#include <cstddef>

namespace emu {

void *allocate_host(size_t bytes);
void release_host(void *address);
void reset_host_memory();

}  // namespace emu
