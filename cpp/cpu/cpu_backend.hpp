// The CPU backend: plans a call, and runs its tasks on the pool with the selected kernel set.
#pragma once

#include "../backend.hpp"

namespace addlora {

const Backend& cpu_backend();

// The kernel set that ran in this thread's last call, by its own report; null before any.
const char* last_kernel_set();

}  // namespace addlora
