#include "contexts.hpp"

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "error.hpp"
#include "handles.hpp"
#include "settings.hpp"

namespace emu {
namespace {

struct Context {
  int32_t device;
};

struct Device {
  int users = 0;
  void *default_context = nullptr;
};

struct Machine {
  std::mutex mutex;
  bool initialised = false;
  std::map<int32_t, Device> devices;
};

Machine &machine() {
  static Machine &instance = *new Machine;
  return instance;
}

Handles<Context> &contexts() {
  static Handles<Context> &instance = *new Handles<Context>("context", kNoContext);
  return instance;
}

// Handles are never given twice, so one left over from before a reset is simply not found.
thread_local void *current = nullptr;

void check_device(int32_t device) {
  if (device < 0 || device >= settings().device_count)
    throw Error{kInvalidDevice, "device " + std::to_string(device) + " does not exist"};
}

}  // namespace

void initialise() {
  auto &state = machine();
  const std::lock_guard lock(state.mutex);
  if (state.initialised) throw Error{kInitialisedTwice, "aclInit was called already in this process"};
  state.initialised = true;
}

void finalise() {
  auto &state = machine();
  const std::lock_guard lock(state.mutex);
  if (!state.initialised) throw Error{kUninitialised, "aclFinalize without aclInit"};
  state.initialised = false;
}

void require_initialised() {
  auto &state = machine();
  const std::lock_guard lock(state.mutex);
  if (!state.initialised) throw Error{kUninitialised, "aclInit was not called"};
}

// Works before aclInit: MindSpore sets its device first, and runs so on real CANN.
void set_device(int32_t device) {
  check_device(device);
  auto &state = machine();
  const std::lock_guard lock(state.mutex);
  Device &entry = state.devices[device];
  ++entry.users;
  if (!entry.default_context) entry.default_context = contexts().add(std::make_shared<Context>(Context{device}));
  current = entry.default_context;
}

void reset_device(int32_t device) {
  check_device(device);
  auto &state = machine();
  const std::lock_guard lock(state.mutex);
  Device &entry = state.devices[device];
  if (entry.users == 0) throw Error{kNoContext, "the device is not set"};
  if (--entry.users > 0) return;
  (void)contexts().remove(entry.default_context);
  entry.default_context = nullptr;
}

int32_t current_device() {
  const auto context = contexts().find(current);
  if (!context) throw Error{kNoContext, "this thread has no context: call aclrtSetDevice in it"};
  return context->device;
}

void *create_context(int32_t device) {
  check_device(device);
  current = contexts().add(std::make_shared<Context>(Context{device}));
  return current;
}

void destroy_context(void *handle) { (void)contexts().remove(handle); }

void set_current_context(void *handle) {
  (void)contexts().get(handle);
  current = handle;
}

void *current_context() {
  require_context();
  return current;
}

void require_context() { (void)current_device(); }

void require_runtime() {
  try {
    require_initialised();
    require_context();
  } catch (const Error &error) {
    throw Error{kRuntimeError, error.text};
  }
}

void reset_contexts() {
  auto &state = machine();
  const std::lock_guard lock(state.mutex);
  state.initialised = false;
  state.devices.clear();
  contexts().clear();
}

}  // namespace emu
