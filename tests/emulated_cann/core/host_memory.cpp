#include "host_memory.hpp"

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

#include "error.hpp"
#include "ledger.hpp"

namespace emu {
namespace {

struct HostMemory {
  std::mutex mutex;
  std::map<void *, std::unique_ptr<std::byte[]>> blocks;
};

HostMemory &host_memory() {
  static HostMemory &instance = *new HostMemory;
  return instance;
}

}  // namespace

void *allocate_host(size_t bytes) {
  if (bytes == 0) throw Error{kInvalidParameter, "aclrtMallocHost of 0 bytes"};
  auto block = std::make_unique<std::byte[]>(bytes);
  void *address = block.get();
  const std::lock_guard lock(host_memory().mutex);
  host_memory().blocks.emplace(address, std::move(block));
  ledger().live("host_memory", +1);
  return address;
}

void release_host(void *address) {
  const std::lock_guard lock(host_memory().mutex);
  if (host_memory().blocks.erase(address) == 0) {
    ledger().misuse("double_free", "aclrtFreeHost of what is no live host memory");
    throw Error{kRuntimeParameter, "not host memory from aclrtMallocHost"};
  }
  ledger().live("host_memory", -1);
}

void reset_host_memory() {
  const std::lock_guard lock(host_memory().mutex);
  host_memory().blocks.clear();
}

}  // namespace emu
