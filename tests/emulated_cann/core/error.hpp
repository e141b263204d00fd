// How the core reports a failure: thrown as an Error, turned into a return code at the C boundary (call.hpp).
#pragma once

#include <string>

namespace emu {

struct Error {
  int code;
  std::string text;
};

// Codes that more than one file needs; the rest stand where they are used.
inline constexpr int kInvalidParameter = 100000;
inline constexpr int kUninitialised = 100001;
inline constexpr int kInitialisedTwice = 100002;
inline constexpr int kRuntimeParameter = 107000;
inline constexpr int kInvalidDevice = 107001;
inline constexpr int kNoContext = 107002;
inline constexpr int kOutOfDeviceMemory = 207001;
inline constexpr int kCoreException = 507015;
inline constexpr int kNullPointer = 161001;
inline constexpr int kBadParameter = 161002;
inline constexpr int kRuntimeError = 361001;
inline constexpr int kInner = 561000;
inline constexpr int kTiling = 561002;
inline constexpr int kKernelNotFound = 561003;
inline constexpr int kOppPathUnset = 561107;

}  // namespace emu
