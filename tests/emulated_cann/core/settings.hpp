// Which machine is emulated, and how: preset by the environment, changed through emu/control.h.
#pragma once

#include <cstddef>
#include <mutex>
#include <string>

namespace emu {

enum class StreamMode { kNow, kSync, kThread };

struct Settings {
  std::string soc;
  int version_major;
  int version_minor;
  std::string version_text;
  StreamMode stream_mode;
  int stream_delay_us;
  int device_count;
  size_t device_memory;
  bool require_opp_path;

  // CANN 9.1.0 is where aclnnAddLora began to accept a ySliceSize of -1 and to check the column range.
  bool checks_column_range() const { return version_major > 9 || (version_major == 9 && version_minor >= 1); }
  bool is_310p() const { return soc.rfind("Ascend310P", 0) == 0; }
  bool has_add_lora() const { return is_310p() || soc.rfind("Ascend910B", 0) == 0; }
};

// A copy: settings may change while a stream's thread reads them.
Settings settings();

template <class Change>
void change_settings(Change change);

void reset_settings();
bool parse_version(const std::string &text, Settings *into);
bool parse_stream_mode(const std::string &text, Settings *into);

// The failures that EMU_FAIL asks for are planned in the ledger.
void plan_environment_failures();

namespace detail {
struct Guarded {
  std::mutex mutex;
  Settings value;
};
Guarded &guarded_settings();
}  // namespace detail

template <class Change>
void change_settings(Change change) {
  auto &guarded = detail::guarded_settings();
  const std::lock_guard lock(guarded.mutex);
  change(guarded.value);
}

}  // namespace emu
