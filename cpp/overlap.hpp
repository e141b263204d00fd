// Whether a strided tensor has an element inside a range of memory: exact, not by bounds, so that interleaved views
// of one array are told apart.
#pragma once

#include <cstddef>

#include "add_lora.hpp"

namespace addlora {

bool touches(const TensorView& view, const void* range, std::size_t bytes);

}  // namespace addlora
