// Opaque handles. A handle is an address that nothing lives at and that is never given twice, so that a stale one is
// always recognised, and one that is dereferenced faults at once.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "error.hpp"
#include "ledger.hpp"

namespace emu {

inline void *next_handle() {
  // Above user space on x86-64 and aarch64: no allocation can ever have these addresses.
  static std::atomic<uintptr_t> next{uintptr_t{0x7e} << 56};
  return reinterpret_cast<void *>(next.fetch_add(64));
}

template <class T>
class Handles {
 public:
  // `unknown_code` is what a stale or foreign handle answers.
  Handles(std::string kind, int unknown_code) : kind_(std::move(kind)), unknown_code_(unknown_code) {}

  void *add(std::shared_ptr<T> object) {
    void *handle = next_handle();
    const std::lock_guard lock(mutex_);
    objects_.emplace(handle, std::move(object));
    ledger().live(kind_, +1);
    return handle;
  }

  std::shared_ptr<T> find(const void *handle) const {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(handle);
    return found == objects_.end() ? nullptr : found->second;
  }

  std::shared_ptr<T> get(const void *handle) const {
    auto object = find(handle);
    if (!object) unknown();
    return object;
  }

  std::shared_ptr<T> remove(const void *handle) {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(handle);
    if (found == objects_.end()) unknown();
    auto object = found->second;
    objects_.erase(found);
    ledger().live(kind_, -1);
    return object;
  }

  void clear() {
    std::map<const void *, std::shared_ptr<T>> dropped;
    const std::lock_guard lock(mutex_);
    dropped.swap(objects_);
  }

 private:
  [[noreturn]] void unknown() const {
    ledger().misuse("handle_unknown", "a " + kind_ + " that was never made, or is already destroyed");
    throw Error{unknown_code_, "the " + kind_ + " is not a live one"};
  }

  std::string kind_;
  int unknown_code_;
  mutable std::mutex mutex_;
  std::map<const void *, std::shared_ptr<T>> objects_;
};

}  // namespace emu
