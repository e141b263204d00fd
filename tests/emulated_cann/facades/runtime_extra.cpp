// The rest of the runtime that MindSpore's Ascend backend uses and aclnnAddLora does not: address ranges into which
// device memory is mapped, and CANN's version.
#include <sys/mman.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "acl/acl_rt.h"
#include "error.hpp"
#include "export.hpp"
#include "handles.hpp"
#include "memory.hpp"
#include "settings.hpp"
#include "tensors.hpp"

namespace {

struct Reservations {
  std::mutex mutex;
  std::map<void *, size_t> bytes;
};

Reservations &reservations() {
  static Reservations &instance = *new Reservations;
  return instance;
}

struct PhysicalMemory {};

emu::Handles<PhysicalMemory> &physical_memory() {
  static auto &instance = *new emu::Handles<PhysicalMemory>("physical_memory", emu::kRuntimeParameter);
  return instance;
}

// The layout that CANN's aclCANNPackageVersion has.
struct PackageVersion {
  char version[128];
  char parts[4][64];
  char reserved[128];
};

void put_text(char *place, size_t bytes, const std::string &text) {
  std::strncpy(place, text.c_str(), bytes - 1);
  place[bytes - 1] = 0;
}

}  // namespace

// A range is usable as a whole from the start: nothing is backed by memory until it is touched.
EMU_API aclError aclrtReserveMemAddress(void **address, size_t bytes, size_t, void *, uint64_t) {
  return EMU_CALL.run([&] {
    void *range = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) throw emu::Error{emu::kOutOfDeviceMemory, "no address range of that size"};
    {
      const std::lock_guard lock(reservations().mutex);
      reservations().bytes[range] = bytes;
    }
    emu::memory().adopt(range, bytes, "address_range");
    *address = range;
  });
}

EMU_API aclError aclrtReleaseMemAddress(void *address) {
  return EMU_CALL.run_release([&] {
    emu::memory().forget(address, "address_range");
    const std::lock_guard lock(reservations().mutex);
    munmap(address, reservations().bytes[address]);
    reservations().bytes.erase(address);
  });
}

EMU_API aclError aclrtMallocPhysical(void **handle, size_t, const void *, uint64_t) {
  return EMU_CALL.run([&] { *handle = physical_memory().add(std::make_shared<PhysicalMemory>()); });
}
EMU_API aclError aclrtFreePhysical(void *handle) {
  return EMU_CALL.run_release([&] { (void)physical_memory().remove(handle); });
}
EMU_API aclError aclrtMapMem(void *, size_t, size_t, void *, uint64_t) {
  return EMU_CALL.run([] {});
}
EMU_API aclError aclrtUnmapMem(void *) {
  return EMU_CALL.run_release([] {});
}

EMU_API aclError aclsysGetCANNVersion(int, PackageVersion *version) {
  return EMU_CALL.run([&] {
    const emu::Settings machine = emu::settings();
    *version = PackageVersion{};
    put_text(version->version, sizeof version->version, machine.version_text);
    put_text(version->parts[0], sizeof version->parts[0], std::to_string(machine.version_major));
    put_text(version->parts[1], sizeof version->parts[1], std::to_string(machine.version_minor));
    put_text(version->parts[2], sizeof version->parts[2], "0");
  });
}

// MindSpore polls this in a thread; one that returned at once would keep a core busy.
EMU_API aclError aclrtProcessReport(int32_t timeout_ms) {
  constexpr int32_t kLongest = 100;
  const int32_t wait = timeout_ms < 0 || timeout_ms > kLongest ? kLongest : timeout_ms;
  std::this_thread::sleep_for(std::chrono::milliseconds(wait));
  return ACL_SUCCESS;
}

EMU_API size_t aclDataTypeSize(aclDataType type) { return emu::bytes_of(type); }
