// What every facade needs: a facade is one source file whose exported functions are CANN's, and which goes into each
// of the shared libraries that have those functions.
#pragma once

#include "call.hpp"

#define EMU_API extern "C" __attribute__((visibility("default")))

namespace {
// Its address tells which shared library this copy of the facade was loaded from.
[[maybe_unused]] const char emu_library_anchor = 0;
}  // namespace
