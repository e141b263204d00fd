// The floating-point mode that the kernels need: round to nearest even, subnormals kept, nothing trapped. The host may
// have set another one (MindSpore and many frameworks flush subnormals).
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace addlora::cpu {

#if defined(__x86_64__)
class DefaultFloatMode {
 public:
  DefaultFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultFloatMode() { _mm_setcsr(saved_); }
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
  unsigned saved_;
};
#elif defined(__aarch64__)
class DefaultFloatMode {
 public:
  DefaultFloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(std::uint64_t{0}));
  }
  ~DefaultFloatMode() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
  std::uint64_t saved_;
};
#endif

}  // namespace addlora::cpu
