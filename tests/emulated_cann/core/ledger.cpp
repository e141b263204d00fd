#include "ledger.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

namespace emu {
namespace {

// Enough to find a fault; a test that loops must not fill memory with lines.
constexpr size_t kMisuseLinesKept = 200;

long count_of(const std::map<std::string, long> &counts, const std::string &key) {
  const auto found = counts.find(key);
  return found == counts.end() ? 0 : found->second;
}

std::string json_string(const std::string &text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    if (static_cast<unsigned char>(c) >= 0x20) quoted += c;
  }
  return quoted + '"';
}

std::string json_counts(const std::map<std::string, long> &counts) {
  std::string text = "{";
  for (const auto &[key, count] : counts) {
    if (text.size() > 1) text += ", ";
    text += json_string(key) + ": " + std::to_string(count);
  }
  return text + "}";
}

}  // namespace

void Ledger::call(const std::string &function, const std::string &library) {
  const std::lock_guard lock(mutex_);
  ++calls_[function];
  if (library.empty()) return;
  last_library_[function] = library;
  ++library_calls_[library];
}

long Ledger::calls(const std::string &function) const {
  const std::lock_guard lock(mutex_);
  return count_of(calls_, function);
}

std::string Ledger::last_library(const std::string &function) const {
  const std::lock_guard lock(mutex_);
  const auto found = last_library_.find(function);
  return found == last_library_.end() ? std::string() : found->second;
}

long Ledger::library_calls(const std::string &part) const {
  const std::lock_guard lock(mutex_);
  long sum = 0;
  for (const auto &[library, count] : library_calls_)
    if (library.find(part) != std::string::npos) sum += count;
  return sum;
}

void Ledger::live(const std::string &kind, long change) {
  const std::lock_guard lock(mutex_);
  live_[kind] += change;
}

long Ledger::live_count(const std::string &kind) const {
  const std::lock_guard lock(mutex_);
  return count_of(live_, kind);
}

long Ledger::live_count_all() const {
  const std::lock_guard lock(mutex_);
  long sum = 0;
  for (const auto &[kind, count] : live_)
    if (kind != "context") sum += count;
  return sum;
}

void Ledger::misuse(const std::string &kind, const std::string &text) {
  const std::lock_guard lock(mutex_);
  ++misuse_[kind];
  if (misuse_lines_.size() < kMisuseLinesKept) misuse_lines_.push_back(kind + ": " + text);
  if (std::getenv("EMU_VERBOSE")) std::fprintf(stderr, "emulated CANN: %s: %s\n", kind.c_str(), text.c_str());
}

long Ledger::misuse_count(const std::string &kind) const {
  const std::lock_guard lock(mutex_);
  return count_of(misuse_, kind);
}

long Ledger::misuse_count_all() const {
  const std::lock_guard lock(mutex_);
  long sum = 0;
  for (const auto &entry : misuse_) sum += entry.second;
  return sum;
}

std::string Ledger::misuse_log() const {
  const std::lock_guard lock(mutex_);
  std::string text;
  for (const auto &line : misuse_lines_) text += line + '\n';
  return text;
}

void Ledger::fail_at(const std::string &function, int nth, Error error) {
  const std::lock_guard lock(mutex_);
  failures_.push_back({function, std::max(nth, 1), std::move(error)});
}

void Ledger::clear_failures() {
  const std::lock_guard lock(mutex_);
  failures_.clear();
}

std::optional<Error> Ledger::due_failure(const std::string &function) {
  const std::lock_guard lock(mutex_);
  std::optional<Error> due;
  for (auto failure = failures_.begin(); failure != failures_.end();) {
    if (failure->function == function && --failure->calls_left == 0) {
      if (!due) due = failure->error;
      failure = failures_.erase(failure);
    } else {
      ++failure;
    }
  }
  return due;
}

std::string Ledger::as_json() const {
  const std::lock_guard lock(mutex_);
  std::string lines = "[";
  for (const auto &line : misuse_lines_) lines += (lines.size() > 1 ? ", " : "") + json_string(line);
  return "{\"calls\": " + json_counts(calls_) + ", \"live\": " + json_counts(live_) + ", \"misuse\": " +
         json_counts(misuse_) + ", \"misuse_log\": " + lines + "], \"libraries\": " + json_counts(library_calls_) + "}";
}

void Ledger::reset() {
  const std::lock_guard lock(mutex_);
  calls_.clear();
  last_library_.clear();
  library_calls_.clear();
  live_.clear();
  misuse_.clear();
  misuse_lines_.clear();
  failures_.clear();
}

Ledger &ledger() {
  // Never destroyed: a stream's thread may still count when static objects die.
  static Ledger &instance = *new Ledger;
  return instance;
}

}  // namespace emu
