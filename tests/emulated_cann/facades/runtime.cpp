// libascendcl.so (or, on newer CANN, libacl_rt.so): initialisation, devices, streams, events, memory.
#include <set>
#include <string>

#include "acl/acl.h"
#include "contexts.hpp"
#include "copies.hpp"
#include "error.hpp"
#include "export.hpp"
#include "host_memory.hpp"
#include "memory.hpp"
#include "settings.hpp"
#include "streams.hpp"

namespace {

template <class T>
void require_place(T *place) {
  if (!place) throw emu::Error{emu::kInvalidParameter, "the place for the result is null"};
}

void throw_if_failed(const std::optional<emu::Error> &failure) {
  if (failure) throw *failure;
}

void make_stream(aclrtStream *stream) {
  require_place(stream);
  emu::require_context();
  *stream = emu::streams().add(emu::new_stream());
}

void drop_stream(aclrtStream handle) {
  const auto stream = emu::streams().remove(handle);
  if (stream->idle()) return;
  emu::ledger().misuse("stream_destroyed_with_work", "a stream was destroyed before its work had run");
  stream->wait();
}

void synchronise(aclrtStream handle) {
  emu::require_context();
  const auto stream = emu::stream_of(handle);
  stream->wait();
  throw_if_failed(stream->take_failure());
}

void synchronise_device() {
  emu::require_context();
  emu::wait_for_all_streams();
  throw_if_failed(emu::take_failure_of_any_stream());
}

void make_event(aclrtEvent *event) {
  require_place(event);
  emu::require_context();
  *event = emu::events().add(std::make_shared<emu::Event>());
}

// The caller keeps the pointer, whatever is set later.
const char *kept_name(const std::string &name) {
  static std::mutex &mutex = *new std::mutex;
  static auto &names = *new std::set<std::string>;
  const std::lock_guard lock(mutex);
  return names.insert(name).first->c_str();
}

}  // namespace

EMU_API aclError aclInit(const char *) { return EMU_CALL.run(emu::initialise); }
EMU_API aclError aclFinalize() { return EMU_CALL.run_release(emu::finalise); }
EMU_API const char *aclGetRecentErrMsg() { return emu::take_recent_error(); }
EMU_API const char *aclrtGetSocName() {
  return EMU_CALL.run_pointer<const char *>([] { return kept_name(emu::settings().soc); });
}

EMU_API aclError aclrtGetDeviceCount(uint32_t *count) {
  return EMU_CALL.run([&] {
    require_place(count);
    *count = static_cast<uint32_t>(emu::settings().device_count);
  });
}
EMU_API aclError aclrtSetDevice(int32_t device) {
  return EMU_CALL.run([&] { emu::set_device(device); });
}
EMU_API aclError aclrtResetDevice(int32_t device) {
  return EMU_CALL.run_release([&] { emu::reset_device(device); });
}
EMU_API aclError aclrtGetDevice(int32_t *device) {
  return EMU_CALL.run([&] {
    require_place(device);
    *device = emu::current_device();
  });
}
EMU_API aclError aclrtCreateContext(aclrtContext *context, int32_t device) {
  return EMU_CALL.run([&] {
    require_place(context);
    *context = emu::create_context(device);
  });
}
EMU_API aclError aclrtDestroyContext(aclrtContext context) {
  return EMU_CALL.run_release([&] { emu::destroy_context(context); });
}
EMU_API aclError aclrtSetCurrentContext(aclrtContext context) {
  return EMU_CALL.run([&] { emu::set_current_context(context); });
}
EMU_API aclError aclrtGetCurrentContext(aclrtContext *context) {
  return EMU_CALL.run([&] {
    require_place(context);
    *context = emu::current_context();
  });
}
EMU_API aclError aclrtGetRunMode(aclrtRunMode *mode) {
  return EMU_CALL.run([&] {
    require_place(mode);
    *mode = ACL_HOST;
  });
}
EMU_API aclError aclrtSynchronizeDevice() { return EMU_CALL.run(synchronise_device); }
EMU_API aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return EMU_CALL.run(synchronise_device); }

EMU_API aclError aclrtCreateStream(aclrtStream *stream) {
  return EMU_CALL.run([&] { make_stream(stream); });
}
EMU_API aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t, uint32_t) {
  return EMU_CALL.run([&] { make_stream(stream); });
}
EMU_API aclError aclrtDestroyStream(aclrtStream stream) {
  return EMU_CALL.run_release([&] { drop_stream(stream); });
}
EMU_API aclError aclrtDestroyStreamForce(aclrtStream stream) {
  return EMU_CALL.run_release([&] { drop_stream(stream); });
}
EMU_API aclError aclrtSynchronizeStream(aclrtStream stream) {
  return EMU_CALL.run([&] { synchronise(stream); });
}
EMU_API aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) {
  return EMU_CALL.run([&] { synchronise(stream); });
}
EMU_API aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status) {
  return EMU_CALL.run([&] {
    require_place(status);
    *status = emu::stream_of(stream)->idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  });
}
EMU_API aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
  return EMU_CALL.run([&] {
    const auto mark = emu::events().get(event)->last();
    if (mark) emu::stream_of(stream)->enqueue([mark] { mark->wait(); });
  });
}
EMU_API aclError aclrtLaunchCallback(aclrtCallback function, void *user_data, aclrtCallbackBlockType,
                                     aclrtStream stream) {
  return EMU_CALL.run([&] { emu::stream_of(stream)->enqueue([=] { function(user_data); }); });
}

EMU_API aclError aclrtCreateEvent(aclrtEvent *event) {
  return EMU_CALL.run([&] { make_event(event); });
}
EMU_API aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t) {
  return EMU_CALL.run([&] { make_event(event); });
}
EMU_API aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t) {
  return EMU_CALL.run([&] { make_event(event); });
}
EMU_API aclError aclrtDestroyEvent(aclrtEvent event) {
  return EMU_CALL.run_release([&] { (void)emu::events().remove(event); });
}
EMU_API aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
  return EMU_CALL.run([&] { emu::events().get(event)->record(emu::stream_of(stream)); });
}
EMU_API aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream) {
  return EMU_CALL.run([&] {
    // In stream order, as on the device.
    emu::stream_of(stream)->enqueue([object = emu::events().get(event)] { object->forget(); });
  });
}
EMU_API aclError aclrtSynchronizeEvent(aclrtEvent event) {
  return EMU_CALL.run([&] {
    if (const auto mark = emu::events().get(event)->last()) mark->wait();
  });
}
EMU_API aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status) {
  return EMU_CALL.run([&] {
    require_place(status);
    const auto mark = emu::events().get(event)->last();
    const bool complete = !mark || mark->reached();
    *status = complete ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  });
}
EMU_API aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent start, aclrtEvent end) {
  return EMU_CALL.run([&] {
    require_place(milliseconds);
    const auto first = emu::events().get(start)->last();
    const auto last = emu::events().get(end)->last();
    if (!first || !last || !first->reached() || !last->reached())
      throw emu::Error{emu::kRuntimeParameter, "an event that has not happened has no time"};
    *milliseconds = std::chrono::duration<float, std::milli>(last->time() - first->time()).count();
  });
}
EMU_API aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t *microseconds) {
  return EMU_CALL.run([&] {
    require_place(microseconds);
    const auto mark = emu::events().get(event)->last();
    if (!mark) throw emu::Error{emu::kRuntimeParameter, "an event that has not happened has no time"};
    const auto since = mark->time().time_since_epoch();
    *microseconds = static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(since).count());
  });
}

EMU_API aclError aclrtMalloc(void **address, size_t bytes, aclrtMemMallocPolicy) {
  return EMU_CALL.run([&] {
    require_place(address);
    emu::require_context();
    *address = emu::memory().allocate(bytes);
  });
}
EMU_API aclError aclrtFree(void *address) {
  return EMU_CALL.run_release([&] { emu::memory().release(address); });
}
EMU_API aclError aclrtMallocHost(void **address, size_t bytes) {
  return EMU_CALL.run([&] {
    require_place(address);
    emu::require_context();
    *address = emu::allocate_host(bytes);
  });
}
EMU_API aclError aclrtFreeHost(void *address) {
  return EMU_CALL.run_release([&] { emu::release_host(address); });
}
EMU_API aclError aclrtGetMemInfo(aclrtMemAttr, size_t *free_bytes, size_t *total_bytes) {
  return EMU_CALL.run([&] {
    require_place(free_bytes);
    require_place(total_bytes);
    emu::require_context();
    *total_bytes = emu::settings().device_memory;
    *free_bytes = *total_bytes - emu::memory().live_bytes();
  });
}
EMU_API aclError aclrtMemcpy(void *dst, size_t dst_max, const void *src, size_t count, aclrtMemcpyKind kind) {
  return EMU_CALL.run([&] { emu::copy_now(dst, dst_max, src, count, kind); });
}
EMU_API aclError aclrtMemcpyAsync(void *dst, size_t dst_max, const void *src, size_t count, aclrtMemcpyKind kind,
                                  aclrtStream stream) {
  return EMU_CALL.run([&] { emu::copy_on_stream(dst, dst_max, src, count, kind, stream); });
}
EMU_API aclError aclrtMemset(void *address, size_t max_bytes, int32_t value, size_t count) {
  return EMU_CALL.run([&] { emu::fill_now(address, max_bytes, value, count); });
}
EMU_API aclError aclrtMemsetAsync(void *address, size_t max_bytes, int32_t value, size_t count, aclrtStream stream) {
  return EMU_CALL.run([&] { emu::fill_on_stream(address, max_bytes, value, count, stream); });
}
