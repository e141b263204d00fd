#include "emu/control.h"

#include <cstdio>
#include <cstdlib>
#include <string>

#include "contexts.hpp"
#include "executors.hpp"
#include "host_memory.hpp"
#include "ledger.hpp"
#include "memory.hpp"
#include "settings.hpp"
#include "streams.hpp"
#include "tensors.hpp"

#define EMU_EXPORT extern "C" __attribute__((visibility("default")))

namespace emu {
namespace {

const char *kept(std::string text) {
  static thread_local std::string held;
  held = std::move(text);
  return held.c_str();
}

std::string report() {
  const long guards = memory().guard_violations();
  return "{\"guard_violations\": " + std::to_string(guards) + ", " + ledger().as_json().substr(1);
}

std::string text_or_empty(const char *text) { return text ? text : ""; }

// Runs when the library is loaded and when the process ends.
class Process {
 public:
  Process() { plan_environment_failures(); }
  ~Process() {
    const char *path = std::getenv("EMU_REPORT");
    if (!path) return;
    if (std::FILE *file = std::fopen(path, "w")) {
      std::fputs(report().c_str(), file);
      std::fclose(file);
    }
  }
};

const Process process;

}  // namespace
}  // namespace emu

EMU_EXPORT void emu_reset(void) {
  emu::reset_streams();
  emu::reset_executors();
  emu::reset_tensors();
  emu::reset_contexts();
  emu::reset_host_memory();
  emu::memory().reset();
  emu::ledger().reset();
  emu::reset_settings();
}

EMU_EXPORT void emu_set_soc(const char *name) {
  emu::change_settings([name](emu::Settings &value) { value.soc = name; });
}

EMU_EXPORT int emu_set_version(const char *version) {
  bool understood = false;
  emu::change_settings([&](emu::Settings &value) { understood = emu::parse_version(version, &value); });
  return understood ? 0 : -1;
}

EMU_EXPORT int emu_set_stream_mode(const char *mode) {
  bool understood = false;
  emu::change_settings([&](emu::Settings &value) { understood = emu::parse_stream_mode(mode, &value); });
  return understood ? 0 : -1;
}

EMU_EXPORT void emu_set_stream_delay_us(int microseconds) {
  emu::change_settings([=](emu::Settings &value) { value.stream_delay_us = microseconds; });
}

EMU_EXPORT void emu_set_device_count(int count) {
  emu::change_settings([=](emu::Settings &value) { value.device_count = count; });
}

EMU_EXPORT void emu_set_device_memory(size_t bytes) {
  emu::change_settings([=](emu::Settings &value) { value.device_memory = bytes; });
}

EMU_EXPORT void emu_set_require_opp_path(int required) {
  emu::change_settings([=](emu::Settings &value) { value.require_opp_path = required != 0; });
}

EMU_EXPORT void emu_fail_at(const char *function, int nth, int code, const char *text) {
  emu::ledger().fail_at(function, nth, {code, emu::text_or_empty(text)});
}

EMU_EXPORT void emu_fail_next(const char *function, int code, const char *text) {
  emu_fail_at(function, 1, code, text);
}

EMU_EXPORT void emu_clear_failures(void) { emu::ledger().clear_failures(); }

EMU_EXPORT long emu_live_count(const char *kind) {
  return kind ? emu::ledger().live_count(kind) : emu::ledger().live_count_all();
}

EMU_EXPORT size_t emu_live_bytes(void) { return emu::memory().live_bytes(); }

EMU_EXPORT long emu_calls(const char *function) { return emu::ledger().calls(function); }

EMU_EXPORT const char *emu_last_library(const char *function) {
  return emu::kept(emu::ledger().last_library(function));
}

EMU_EXPORT long emu_library_calls(const char *part) { return emu::ledger().library_calls(part); }

EMU_EXPORT long emu_guard_violations(void) { return emu::memory().guard_violations(); }

EMU_EXPORT long emu_misuse(const char *kind) {
  return kind ? emu::ledger().misuse_count(kind) : emu::ledger().misuse_count_all();
}

EMU_EXPORT const char *emu_misuse_log(void) { return emu::kept(emu::ledger().misuse_log()); }

EMU_EXPORT const char *emu_report(void) { return emu::kept(emu::report()); }
