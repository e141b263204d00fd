#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include "checks.hpp"
#include "cpu/thread_pool.hpp"
#include "digests.hpp"

std::string check_threads() {
  constexpr std::size_t kCallers = 6;
  constexpr int kRounds = 3;
  std::vector<std::unique_ptr<FixedCall>> calls;
  std::vector<std::string> expected;
  for (std::size_t i = 0; i < fixed_case_count(); i += 3) {
    calls.push_back(std::make_unique<FixedCall>(fixed_cases()[i]));
    expected.push_back(fixed_cases()[i].digest);
  }

  std::mutex lock;
  std::string failure;
  std::atomic<bool> stop{false};
  std::vector<std::thread> setters;
  for (int first : {1, 3}) {
    setters.emplace_back([&stop, first] {
      for (int n = first; !stop; n = n % 16 + 1) {
        addlora::cpu::set_thread_count(n);
        std::this_thread::yield();
      }
    });
  }
  std::vector<std::thread> callers;
  for (std::size_t caller = 0; caller < kCallers; ++caller) {
    callers.emplace_back([&, caller] {
      // All begin at different calls, and share the inputs.
      for (std::size_t i = 0; i < calls.size() * kRounds; ++i) {
        const std::size_t at = (i + caller * 5) % calls.size();
        const std::string got = calls[at]->run();
        if (got == expected[at]) continue;
        const std::lock_guard<std::mutex> held(lock);
        failure = "fixed call " + std::to_string(at * 3) + " among others: expected " + expected[at] + ", got " + got;
      }
    });
  }
  for (std::thread& thread : callers) thread.join();
  stop = true;
  for (std::thread& thread : setters) thread.join();
  return failure;
}
