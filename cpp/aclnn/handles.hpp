// What CANN hands out, given back on every path.
#pragma once

#include <memory>

#include "cann.hpp"

namespace addlora::aclnn {

struct DestroyTensor {
  void operator()(Tensor* tensor) const { cann().call.aclDestroyTensor(tensor); }
};
using TensorHandle = std::unique_ptr<Tensor, DestroyTensor>;

struct DestroyExecutor {
  void operator()(Executor* executor) const { cann().call.aclDestroyAclOpExecutor(executor); }
};
using ExecutorHandle = std::unique_ptr<Executor, DestroyExecutor>;

struct FreeDevice {
  void operator()(void* memory) const { cann().call.aclrtFree(memory); }
};
using DeviceMemory = std::unique_ptr<void, FreeDevice>;

struct DestroyStream {
  void operator()(void* stream) const {
    // After a failure its work may still be under way, in memory that is given back next. Free where it is idle.
    cann().call.aclrtSynchronizeStream(stream);
    cann().call.aclrtDestroyStream(stream);
  }
};
using StreamHandle = std::unique_ptr<void, DestroyStream>;

struct DestroyEvent {
  void operator()(void* event) const { cann().call.aclrtDestroyEvent(event); }
};
using EventHandle = std::unique_ptr<void, DestroyEvent>;

inline DeviceMemory allocate(std::size_t bytes) {
  void* memory = nullptr;
  require(cann().call.aclrtMalloc(&memory, bytes, kHugeFirst), "aclrtMalloc");
  return DeviceMemory(memory);
}

// The end of what the stream has been given so far.
inline EventHandle record(Stream stream) {
  Event event = nullptr;
  require(cann().call.aclrtCreateEvent(&event), "aclrtCreateEvent");
  EventHandle handle(event);
  require(cann().call.aclrtRecordEvent(event, stream), "aclrtRecordEvent");
  return handle;
}

inline StreamHandle make_stream() {
  Stream stream = nullptr;
  require(cann().call.aclrtCreateStream(&stream), "aclrtCreateStream");
  return StreamHandle(stream);
}

}  // namespace addlora::aclnn
