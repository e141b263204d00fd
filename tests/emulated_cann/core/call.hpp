// The C boundary: every exported function runs its body through one of these, which counts the call, applies a failure
// that a test asked for, and turns a thrown Error into a return code with the text kept for aclGetRecentErrMsg.
#pragma once

#include <exception>
#include <optional>
#include <string>

#include "error.hpp"
#include "ledger.hpp"

namespace emu {

// Path of the shared library that `anchor`, any object of its own, was loaded from.
std::string library_of(const void *anchor);

// Kept per thread, as CANN does.
void set_recent_error(const Error &error);
// Reading it clears it; nullptr if there is none.
const char *take_recent_error();

class Call {
 public:
  Call(const char *function, const void *anchor) : function_(function) {
    ledger().call(function_, library_of(anchor));
    failure_ = ledger().due_failure(function_);
  }

  // Does its work, or fails as asked and does nothing.
  template <class Body>
  int run(Body body) const {
    if (failure_) return refuse(*failure_);
    return guarded(body);
  }

  // For functions that give something back: a failure on demand is only reported, the thing is given back all the same,
  // since a caller that is told "not released" can do nothing about it and must not be charged with a leak.
  template <class Body>
  int run_release(Body body) const {
    const int code = guarded(body);
    return failure_ ? refuse(*failure_) : code;
  }

  template <class Pointer, class Body>
  Pointer run_pointer(Body body) const {
    Pointer result = nullptr;
    (void)run([&] { result = static_cast<Pointer>(body()); });
    return result;
  }

 private:
  static int refuse(const Error &error) {
    set_recent_error(error);
    return error.code;
  }

  template <class Body>
  static int guarded(Body body) {
    try {
      body();
      return 0;
    } catch (const Error &error) {
      return refuse(error);
    } catch (const std::exception &error) {
      return refuse({500000, error.what()});
    }
  }

  const char *function_;
  std::optional<Error> failure_;
};

}  // namespace emu

// For the facades: `emu_library_anchor` is a static object of each facade file.
#define EMU_CALL ::emu::Call(__func__, &emu_library_anchor)
