// What happened: calls by function and by library, live objects by kind, wrong uses by kind; and the failures to come.
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "error.hpp"

namespace emu {

class Ledger {
 public:
  void call(const std::string &function, const std::string &library);
  long calls(const std::string &function) const;
  std::string last_library(const std::string &function) const;
  long library_calls(const std::string &part) const;

  void live(const std::string &kind, long change);
  long live_count(const std::string &kind) const;
  long live_count_all() const;

  void misuse(const std::string &kind, const std::string &text);
  long misuse_count(const std::string &kind) const;
  long misuse_count_all() const;
  std::string misuse_log() const;

  void fail_at(const std::string &function, int nth, Error error);
  void clear_failures();
  // The failure due at this call of `function`, if any; it is used up.
  std::optional<Error> due_failure(const std::string &function);

  std::string as_json() const;
  void reset();

 private:
  struct Failure {
    std::string function;
    int calls_left;
    Error error;
  };

  mutable std::mutex mutex_;
  std::map<std::string, long> calls_;
  std::map<std::string, std::string> last_library_;
  std::map<std::string, long> library_calls_;
  std::map<std::string, long> live_;
  std::map<std::string, long> misuse_;
  std::vector<std::string> misuse_lines_;
  std::vector<Failure> failures_;
};

Ledger &ledger();

}  // namespace emu
