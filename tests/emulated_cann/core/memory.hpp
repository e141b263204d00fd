// Device memory, played by host memory: guard zones around each block, poison in fresh and in freed ones, and freed
// blocks kept for a while, so that a use after the free gives garbage that shows, and is counted, and does not crash.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace emu {

class DeviceMemory {
 public:
  enum class Place { kLive, kFreed, kElsewhere };

  void *allocate(size_t bytes);
  void release(void *address);

  // Memory that something else owns and the device may use: mapped ranges.
  void adopt(void *address, size_t bytes, const char *kind);
  void forget(void *address, const char *kind);

  Place place_of(const void *address) const;
  // True if any byte of a live or freed block of ours lies there.
  bool holds(const void *address) const { return place_of(address) != Place::kElsewhere; }

  // For work on the device: throws the exception an AI core would raise where [address, address + bytes) is no device
  // memory; counts a use after free and lets it happen.
  void check_access(const void *address, size_t bytes, const std::string &what) const;

  // How many bytes from `address` on may be written without leaving the block, its guard zone included.
  size_t writable_bytes(const void *address) const;

  // What an index beyond the table does: writes into every other live block, and into the guard zone after `victim`.
  void spoil_around(const void *victim);

  size_t live_bytes() const;
  long guard_violations();
  void reset();

 private:
  struct FreeStorage {
    void operator()(std::byte *storage) const;
  };
  struct Block {
    std::unique_ptr<std::byte, FreeStorage> storage;  // null for adopted memory
    std::byte *begin;
    size_t bytes;
    bool freed;
    bool guard_counted;

    std::byte *end() const { return begin + bytes; }
  };
  using Blocks = std::map<uintptr_t, Block>;

  const Block *find(const void *address) const;
  void check_guards(Block *block);
  void drop_oldest_freed();

  mutable std::mutex mutex_;
  Blocks blocks_;
  std::deque<uintptr_t> freed_;
  size_t freed_bytes_ = 0;
  size_t live_bytes_ = 0;
  long guard_violations_ = 0;
};

DeviceMemory &memory();

}  // namespace emu
