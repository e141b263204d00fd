#include "copies.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <vector>

#include "contexts.hpp"
#include "error.hpp"
#include "ledger.hpp"
#include "memory.hpp"
#include "streams.hpp"

namespace emu {
namespace {

// Newer CANN infers the direction for this kind.
constexpr int kInferDirection = 4;

bool device_is_target(aclrtMemcpyKind kind) {
  return kind == ACL_MEMCPY_HOST_TO_DEVICE || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
}

bool device_is_source(aclrtMemcpyKind kind) {
  return kind == ACL_MEMCPY_DEVICE_TO_HOST || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
}

// A caller that frees its array before the stream has run would crash the process here; it is reported instead.
void check_host(const void *address, size_t count, const char *what) {
  if (count == 0) return;
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = reinterpret_cast<uintptr_t>(address) / page * page;
  const uintptr_t end = reinterpret_cast<uintptr_t>(address) + count;
  std::vector<unsigned char> resident((end - begin + page - 1) / page);
  if (mincore(reinterpret_cast<void *>(begin), end - begin, resident.data()) == 0) return;
  ledger().misuse("host_memory_gone", std::string("the ") + what + " of a copy is no memory of this process");
  throw Error{kRuntimeParameter, std::string("the ") + what + " of a copy is not accessible"};
}

void check_side(const void *address, size_t count, bool on_device, const char *what) {
  if (on_device) {
    memory().check_access(address, count, std::string("the ") + what + " of a copy");
  } else {
    check_host(address, count, what);
  }
}

void require_side(const void *address, bool on_device, const char *what) {
  const bool found = memory().holds(address);
  if (on_device && !found) {
    ledger().misuse("not_device_memory", std::string("the ") + what + " of a copy");
    throw Error{kRuntimeParameter, std::string("the ") + what + " of the copy is not device memory"};
  }
  if (!on_device && found) {
    ledger().misuse("device_memory_as_host", std::string("the ") + what + " of a copy");
    throw Error{kRuntimeParameter, std::string("the ") + what + " of the copy is device memory, not the host's"};
  }
}

void check_arguments(const void *dst, size_t dst_max, const void *src, size_t count, aclrtMemcpyKind kind) {
  require_context();
  if (!dst || !src) throw Error{kInvalidParameter, "a copy with a null address"};
  if (count > dst_max) throw Error{kRuntimeParameter, "a copy of more bytes than the destination has"};
  if (static_cast<int>(kind) == kInferDirection) return;
  if (static_cast<int>(kind) < 0 || static_cast<int>(kind) > ACL_MEMCPY_DEVICE_TO_DEVICE)
    throw Error{kRuntimeParameter, "an unknown kind of copy"};
  require_side(dst, device_is_target(kind), "destination");
  require_side(src, device_is_source(kind), "source");
}

void copy(void *dst, const void *src, size_t count, aclrtMemcpyKind kind) {
  const bool infer = static_cast<int>(kind) == kInferDirection;
  check_side(dst, count, infer ? memory().holds(dst) : device_is_target(kind), "destination");
  check_side(src, count, infer ? memory().holds(src) : device_is_source(kind), "source");
  std::memmove(dst, src, count);
}

void check_fill(const void *address, size_t max_bytes, size_t count) {
  require_context();
  if (!address) throw Error{kInvalidParameter, "a fill of a null address"};
  if (count > max_bytes) throw Error{kRuntimeParameter, "a fill of more bytes than there are"};
  require_side(address, true, "destination");
}

}  // namespace

void copy_now(void *dst, size_t dst_max, const void *src, size_t count, aclrtMemcpyKind kind) {
  check_arguments(dst, dst_max, src, count, kind);
  copy(dst, src, count, kind);
}

void copy_on_stream(void *dst, size_t dst_max, const void *src, size_t count, aclrtMemcpyKind kind,
                    aclrtStream stream) {
  check_arguments(dst, dst_max, src, count, kind);
  stream_of(stream)->enqueue([=] { copy(dst, src, count, kind); });
}

void fill_now(void *address, size_t max_bytes, int32_t value, size_t count) {
  check_fill(address, max_bytes, count);
  memory().check_access(address, count, "the destination of a fill");
  std::memset(address, value, count);
}

void fill_on_stream(void *address, size_t max_bytes, int32_t value, size_t count, aclrtStream stream) {
  check_fill(address, max_bytes, count);
  stream_of(stream)->enqueue([=] {
    memory().check_access(address, count, "the destination of a fill");
    std::memset(address, value, count);
  });
}

}  // namespace emu
