// The control interface of the emulated CANN: plain C, so that Python reaches it through ctypes.
// Load libemu_core.so, the one library that holds the state; every emulated library links to it.
#ifndef EMULATED_CANN_EMU_CONTROL_H_
#define EMULATED_CANN_EMU_CONTROL_H_

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

// Forgets everything: handles, memory, counts, failures to come; settings go back to the environment's.
void emu_reset(void);

// --- settings (the environment variable that presets each one stands beside it) ---
void emu_set_soc(const char *name);                // EMU_SOC, default Ascend910B2
int emu_set_version(const char *version);          // EMU_CANN_VERSION, default 9.1.0; -1 if it cannot be read
int emu_set_stream_mode(const char *mode);         // EMU_STREAM_MODE: sync (default), thread or now; -1 if unknown
void emu_set_stream_delay_us(int microseconds);    // EMU_STREAM_DELAY_US, default 2000: before each task in mode thread
void emu_set_device_count(int count);              // EMU_DEVICE_COUNT, default 1
void emu_set_device_memory(size_t bytes);          // EMU_DEVICE_MEMORY, default 64 GiB: what aclrtMalloc gives in all
void emu_set_require_opp_path(int required);       // EMU_REQUIRE_OPP_PATH: 561107 while ASCEND_OPP_PATH is unset

// --- failures on demand ---
// `function` is the name of an emulated function, or "aclnnAddLora.kernel" for the work on the device, whose failure
// shows when the stream is synchronised. The nth call from now (1 is the next) fails.
// EMU_FAIL presets them: "function:nth:code:text;..."
void emu_fail_next(const char *function, int code, const char *text);
void emu_fail_at(const char *function, int nth, int code, const char *text);
void emu_clear_failures(void);

// --- what happened ---
// Kinds: tensor, executor, stream, event, context, device_memory, host_memory, scalar, int_array, float_array,
// bool_array, tensor_list. NULL: all of them but contexts, which is what a caller has to give back.
long emu_live_count(const char *kind);
size_t emu_live_bytes(void);
long emu_calls(const char *function);
// Path of the library through which `function` was called last; "" if it never was.
const char *emu_last_library(const char *function);
// Calls that came through libraries whose path contains `part`.
long emu_library_calls(const char *part);
// Broken guard zones around device memory, each block counted once.
long emu_guard_violations(void);
// Wrong uses, by kind (NULL: all): index_above_w, executor_spent, executor_foreign, handle_unknown, double_free,
// use_after_free, write_after_free, out_of_bounds, not_device_memory, device_memory_as_host, host_memory_gone,
// stream_destroyed_with_work, tensor_destroyed_before_run, tensor_unaligned.
long emu_misuse(const char *kind);
// One line for each wrong use so far; valid until this thread's next call.
const char *emu_misuse_log(void);
// All counts as JSON; valid until this thread's next call. EMU_REPORT=path writes it when the process ends.
const char *emu_report(void);

#ifdef __cplusplus
}
#endif
#endif
