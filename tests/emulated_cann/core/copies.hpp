// Copies and fills between host and device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "acl/acl_rt.h"

namespace emu {

void copy_now(void *dst, size_t dst_max, const void *src, size_t count, aclrtMemcpyKind kind);
void copy_on_stream(void *dst, size_t dst_max, const void *src, size_t count, aclrtMemcpyKind kind,
                    aclrtStream stream);
void fill_now(void *address, size_t max_bytes, int32_t value, size_t count);
void fill_on_stream(void *address, size_t max_bytes, int32_t value, size_t count, aclrtStream stream);

}  // namespace emu
