#include "call.hpp"

#include <dlfcn.h>

namespace emu {
namespace {

thread_local std::string recent_error;
thread_local std::string taken_error;

}  // namespace

std::string library_of(const void *anchor) {
  Dl_info info{};
  return dladdr(anchor, &info) != 0 && info.dli_fname ? info.dli_fname : "";
}

void set_recent_error(const Error &error) {
  // A failure on demand without text is how a test gets a CANN that does not explain itself.
  recent_error = error.text.empty() ? "" : "E" + std::to_string(error.code) + ": " + error.text;
}

const char *take_recent_error() {
  if (recent_error.empty()) return nullptr;
  taken_error.swap(recent_error);
  recent_error.clear();
  return taken_error.c_str();
}

}  // namespace emu
