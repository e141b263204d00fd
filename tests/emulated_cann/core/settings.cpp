#include "settings.hpp"

#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <vector>

#include "ledger.hpp"

namespace emu {
namespace {

constexpr size_t kDefaultDeviceMemory = size_t{64} << 30;

std::string environment(const char *name, const char *otherwise) {
  const char *value = std::getenv(name);
  return value && *value ? value : otherwise;
}

// A preset that cannot be read would silently test another machine than the one asked for.
void insist(bool understood, const char *name) {
  if (understood) return;
  std::fprintf(stderr, "emulated CANN: cannot read %s=%s\n", name, std::getenv(name));
  std::abort();
}

Settings from_environment() {
  Settings settings{};
  settings.soc = environment("EMU_SOC", "Ascend910B2");
  insist(parse_version(environment("EMU_CANN_VERSION", "9.1.0"), &settings), "EMU_CANN_VERSION");
  insist(parse_stream_mode(environment("EMU_STREAM_MODE", "sync"), &settings), "EMU_STREAM_MODE");
  settings.stream_delay_us = std::atoi(environment("EMU_STREAM_DELAY_US", "2000").c_str());
  settings.device_count = std::atoi(environment("EMU_DEVICE_COUNT", "1").c_str());
  const std::string memory = environment("EMU_DEVICE_MEMORY", "");
  settings.device_memory = memory.empty() ? kDefaultDeviceMemory : std::strtoull(memory.c_str(), nullptr, 10);
  settings.require_opp_path = environment("EMU_REQUIRE_OPP_PATH", "0") != "0";
  return settings;
}

std::vector<std::string> split(const std::string &text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

}  // namespace

namespace detail {
Guarded &guarded_settings() {
  static Guarded &instance = *new Guarded{{}, from_environment()};
  return instance;
}
}  // namespace detail

Settings settings() {
  auto &guarded = detail::guarded_settings();
  const std::lock_guard lock(guarded.mutex);
  return guarded.value;
}

void reset_settings() {
  change_settings([](Settings &value) { value = from_environment(); });
}

bool parse_version(const std::string &text, Settings *into) {
  int major = 0;
  int minor = 0;
  if (std::sscanf(text.c_str(), "%d.%d", &major, &minor) != 2) return false;
  into->version_major = major;
  into->version_minor = minor;
  into->version_text = text;
  return true;
}

bool parse_stream_mode(const std::string &text, Settings *into) {
  if (text == "now") {
    into->stream_mode = StreamMode::kNow;
  } else if (text == "sync") {
    into->stream_mode = StreamMode::kSync;
  } else if (text == "thread") {
    into->stream_mode = StreamMode::kThread;
  } else {
    return false;
  }
  return true;
}

void plan_environment_failures() {
  for (const auto &entry : split(environment("EMU_FAIL", ""), ';')) {
    const auto fields = split(entry, ':');
    insist(fields.size() >= 3, "EMU_FAIL");
    const std::string text = fields.size() > 3 ? fields[3] : "failure on demand";
    ledger().fail_at(fields[0], std::atoi(fields[1].c_str()), {std::atoi(fields[2].c_str()), text});
  }
}

}  // namespace emu
