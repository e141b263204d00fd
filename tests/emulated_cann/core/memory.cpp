#include "memory.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "error.hpp"
#include "ledger.hpp"
#include "settings.hpp"

namespace emu {
namespace {

constexpr size_t kAlignment = 512;
constexpr size_t kGuardBytes = 4096;
constexpr size_t kFreedBytesKept = size_t{256} << 20;
constexpr size_t kSpoiledBytes = 64;
constexpr auto kGuardByte = std::byte{0xa5};

// NaN as float16, bfloat16 and float32 alike, and far above any adapter index as int32.
constexpr uint16_t kFreshPoison = 0x7ffe;
constexpr uint16_t kFreedPoison = 0x7fff;

size_t rounded_up(size_t bytes, size_t step) { return (bytes + step - 1) / step * step; }

void fill(std::byte *begin, size_t bytes, uint16_t pattern) {
  const size_t whole = bytes / sizeof pattern;
  for (size_t i = 0; i < whole; ++i) std::memcpy(begin + i * sizeof pattern, &pattern, sizeof pattern);
  if (bytes % sizeof pattern) begin[bytes - 1] = static_cast<std::byte>(pattern);
}

bool is_filled(const std::byte *begin, size_t bytes, uint16_t pattern) {
  for (size_t i = 0; i + sizeof pattern <= bytes; i += sizeof pattern)
    if (std::memcmp(begin + i, &pattern, sizeof pattern) != 0) return false;
  return true;
}

bool all_guard(const std::byte *begin) {
  return std::all_of(begin, begin + kGuardBytes, [](std::byte value) { return value == kGuardByte; });
}

uintptr_t number(const void *address) { return reinterpret_cast<uintptr_t>(address); }

}  // namespace

void DeviceMemory::FreeStorage::operator()(std::byte *storage) const { std::free(storage); }

void *DeviceMemory::allocate(size_t bytes) {
  if (bytes == 0) throw Error{kInvalidParameter, "aclrtMalloc of 0 bytes"};
  const std::lock_guard lock(mutex_);
  if (live_bytes_ + bytes > settings().device_memory || live_bytes_ + bytes < bytes)
    throw Error{kOutOfDeviceMemory, "out of device memory: " + std::to_string(bytes) + " bytes asked for"};
  const size_t whole = rounded_up(bytes + 2 * kGuardBytes, kAlignment);
  auto *storage = static_cast<std::byte *>(std::aligned_alloc(kAlignment, whole));
  if (!storage) throw Error{kOutOfDeviceMemory, "the host gave no memory to stand for the device's"};
  Block block{std::unique_ptr<std::byte, FreeStorage>(storage), storage + kGuardBytes, bytes, false, false};
  std::memset(storage, std::to_integer<int>(kGuardByte), kGuardBytes);
  std::memset(block.end(), std::to_integer<int>(kGuardByte), kGuardBytes);
  fill(block.begin, bytes, kFreshPoison);
  void *address = block.begin;
  blocks_.insert_or_assign(number(address), std::move(block));
  live_bytes_ += bytes;
  ledger().live("device_memory", +1);
  return address;
}

void DeviceMemory::release(void *address) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(number(address));
  if (found == blocks_.end() || !found->second.storage || found->second.freed) {
    const bool twice = found != blocks_.end() && found->second.freed;
    ledger().misuse(twice ? "double_free" : "not_device_memory", "aclrtFree of what is no live device memory");
    throw Error{kRuntimeParameter, twice ? "device memory freed twice" : "not the address of device memory"};
  }
  Block &block = found->second;
  check_guards(&block);
  block.freed = true;
  fill(block.begin, block.bytes, kFreedPoison);
  live_bytes_ -= block.bytes;
  ledger().live("device_memory", -1);
  freed_.push_back(found->first);
  freed_bytes_ += block.bytes;
  while (freed_bytes_ > kFreedBytesKept && freed_.size() > 1) drop_oldest_freed();
}

void DeviceMemory::adopt(void *address, size_t bytes, const char *kind) {
  const std::lock_guard lock(mutex_);
  blocks_.insert_or_assign(number(address), Block{nullptr, static_cast<std::byte *>(address), bytes, false, false});
  ledger().live(kind, +1);
}

void DeviceMemory::forget(void *address, const char *kind) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(number(address));
  if (found == blocks_.end() || found->second.storage) {
    ledger().misuse("double_free", std::string("giving back ") + kind + " that is not live");
    throw Error{kRuntimeParameter, "not memory of that kind"};
  }
  blocks_.erase(found);
  ledger().live(kind, -1);
}

const DeviceMemory::Block *DeviceMemory::find(const void *address) const {
  auto after = blocks_.upper_bound(number(address));
  if (after == blocks_.begin()) return nullptr;
  const Block &block = std::prev(after)->second;
  return number(address) < number(block.end()) ? &block : nullptr;
}

DeviceMemory::Place DeviceMemory::place_of(const void *address) const {
  const std::lock_guard lock(mutex_);
  const Block *block = find(address);
  if (!block) return Place::kElsewhere;
  return block->freed ? Place::kFreed : Place::kLive;
}

void DeviceMemory::check_access(const void *address, size_t bytes, const std::string &what) const {
  if (bytes == 0) return;
  const std::lock_guard lock(mutex_);
  const Block *block = find(address);
  if (!block) {
    ledger().misuse("not_device_memory", what + " is not in device memory");
    throw Error{kCoreException, "AI core exception: " + what + " is not in device memory"};
  }
  if (block->freed) ledger().misuse("use_after_free", what + " is in device memory that was freed");
  if (bytes > static_cast<size_t>(number(block->end()) - number(address))) {
    ledger().misuse("out_of_bounds", what + " reaches beyond its device memory");
    throw Error{kCoreException, "AI core exception: " + what + " reaches beyond its device memory"};
  }
}

size_t DeviceMemory::writable_bytes(const void *address) const {
  const std::lock_guard lock(mutex_);
  auto after = blocks_.upper_bound(number(address));
  if (after == blocks_.begin()) return 0;
  const Block &block = std::prev(after)->second;
  const uintptr_t limit = number(block.end()) + (block.storage ? kGuardBytes : 0);
  return number(address) < limit ? limit - number(address) : 0;
}

void DeviceMemory::spoil_around(const void *victim) {
  const std::lock_guard lock(mutex_);
  const Block *own = find(victim);
  for (auto &entry : blocks_) {
    Block &block = entry.second;
    if (block.freed) continue;
    if (&block != own) {
      fill(block.begin, std::min(block.bytes, kSpoiledBytes), 0xffff);
    } else if (block.storage) {
      fill(block.end(), kSpoiledBytes, 0xffff);
    }
  }
}

size_t DeviceMemory::live_bytes() const {
  const std::lock_guard lock(mutex_);
  return live_bytes_;
}

long DeviceMemory::guard_violations() {
  const std::lock_guard lock(mutex_);
  for (auto &entry : blocks_) check_guards(&entry.second);
  return guard_violations_;
}

void DeviceMemory::reset() {
  const std::lock_guard lock(mutex_);
  blocks_.clear();
  freed_.clear();
  freed_bytes_ = live_bytes_ = 0;
  guard_violations_ = 0;
}

void DeviceMemory::check_guards(Block *block) {
  if (!block->storage || block->guard_counted) return;
  if (all_guard(block->begin - kGuardBytes) && all_guard(block->end())) return;
  block->guard_counted = true;
  ++guard_violations_;
}

void DeviceMemory::drop_oldest_freed() {
  const auto oldest = blocks_.find(freed_.front());
  freed_.pop_front();
  freed_bytes_ -= oldest->second.bytes;
  if (!is_filled(oldest->second.begin, oldest->second.bytes, kFreedPoison))
    ledger().misuse("write_after_free", "device memory was written after it was freed");
  blocks_.erase(oldest);
}

DeviceMemory &memory() {
  static DeviceMemory &instance = *new DeviceMemory;
  return instance;
}

}  // namespace emu
