#include "thread_pool.hpp"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>

#include "float_mode.hpp"

namespace addlora::cpu {
namespace {

constexpr int kMaxPhases = 2;
constexpr int kMaxThreads = 256;
// A worker looks out for the next call for this long before it sleeps: enough for chained calls, too short to hurt
// whoever shares the core.
constexpr auto kIdleSpin = std::chrono::microseconds(20);

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins a little, then lets others run: the thread that is waited for may need this very core.
template <class Condition>
void wait_until(const Condition& condition) {
  for (int spins = 0; !condition(); ++spins) {
    if (spins < 256) {
      pause();
    } else {
      sched_yield();
    }
  }
}

struct alignas(64) PhaseState {
  Phase* phase = nullptr;
  std::int64_t count = 0;
  std::atomic<std::int64_t> next{0};
  std::atomic<std::int64_t> done{0};
};

struct Job {
  PhaseState phases[kMaxPhases];
  int phase_count = 0;
  int threads = 1;
};

// Takes tasks until there are none, and stays at each barrier until the tasks of the phase have ended.
void participate(Job& job, int participant) {
  const DefaultFloatMode mode;
  for (int i = 0; i < job.phase_count; ++i) {
    PhaseState& state = job.phases[i];
    for (;;) {
      const std::int64_t task = state.next.fetch_add(1, std::memory_order_relaxed);
      if (task >= state.count) break;
      state.phase->run(task, participant);
      state.done.fetch_add(1, std::memory_order_release);
    }
    wait_until([&] { return state.done.load(std::memory_order_acquire) == state.count; });
  }
}

class Pool {
 public:
  // False where another caller has the pool.
  bool run(Phase* const* phases, int phase_count, int threads) {
    const std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
    if (!owner.owns_lock()) return false;
    start_workers(threads - 1);
    job_.phase_count = phase_count;
    job_.threads = threads;
    for (int i = 0; i < phase_count; ++i) {
      job_.phases[i].phase = phases[i];
      job_.phases[i].count = phases[i]->count();
      job_.phases[i].next.store(0, std::memory_order_relaxed);
      job_.phases[i].done.store(0, std::memory_order_relaxed);
    }
    open();
    participate(job_, 0);
    close();
    return true;
  }

 private:
  // gate_: bit 0 says that the job is open, the rest counts the workers inside, two each.
  void open() {
    joined_.store(1, std::memory_order_relaxed);
    gate_.fetch_or(1, std::memory_order_seq_cst);
    epoch_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      { const std::lock_guard<std::mutex> lock(sleep_); }
      wake_.notify_all();
    }
  }

  // Every task has ended, so a worker that is still inside only has to look around and leave.
  void close() {
    gate_.fetch_and(~std::int64_t{1}, std::memory_order_acq_rel);
    wait_until([&] { return gate_.load(std::memory_order_acquire) == 0; });
  }

  void start_workers(int wanted) {
    try {
      for (; workers_ < wanted; ++workers_) std::thread([this] { work(); }).detach();
    } catch (const std::system_error&) {
      // The process may have no more threads; those that are here, the caller at least, do the work.
    }
  }

  void work() {
    std::int64_t seen = 0;
    for (;;) {
      seen = next_epoch(seen);
      if ((gate_.fetch_add(2, std::memory_order_acq_rel) & 1) != 0) {
        const int participant = joined_.fetch_add(1, std::memory_order_relaxed);
        if (participant < job_.threads) participate(job_, participant);
      }
      gate_.fetch_sub(2, std::memory_order_release);
    }
  }

  std::int64_t next_epoch(std::int64_t seen) {
    const auto until = std::chrono::steady_clock::now() + kIdleSpin;
    do {
      for (int i = 0; i < 16; ++i) {
        if (const auto now = epoch_.load(std::memory_order_acquire); now != seen) return now;
        pause();
      }
    } while (std::chrono::steady_clock::now() < until);
    std::unique_lock<std::mutex> lock(sleep_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [&] { return epoch_.load(std::memory_order_seq_cst) != seen; });
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
    return epoch_.load(std::memory_order_acquire);
  }

  std::mutex owner_;
  int workers_ = 0;
  Job job_;
  alignas(64) std::atomic<std::int64_t> gate_{0};
  alignas(64) std::atomic<std::int64_t> epoch_{0};
  std::atomic<int> joined_{1};
  std::atomic<int> sleepers_{0};
  std::mutex sleep_;
  std::condition_variable wake_;
};

// Never destroyed: workers sleep in it until the process ends. A child after fork has no workers, so it gets a new one.
std::atomic<Pool*> the_pool{nullptr};

Pool& pool() {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { the_pool.store(nullptr); }); });
  Pool* current = the_pool.load(std::memory_order_acquire);
  if (current != nullptr) return *current;
  auto* made = new Pool;
  if (the_pool.compare_exchange_strong(current, made, std::memory_order_acq_rel)) return *made;
  delete made;  // another thread was first, and this one has no workers yet
  return *current;
}

int limited(long threads) {
  return threads < 1 ? 1 : threads > kMaxThreads ? kMaxThreads : static_cast<int>(threads);
}

int default_thread_count() {
  for (const char* variable : {"ADDLORA_NUM_THREADS", "OMP_NUM_THREADS"}) {
    const char* text = std::getenv(variable);
    const long threads = text == nullptr ? 0 : std::strtol(text, nullptr, 10);
    if (threads > 0) return limited(threads);
  }
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) == 0) return limited(CPU_COUNT(&cores));
  return limited(static_cast<long>(std::thread::hardware_concurrency()));
}

std::atomic<int>& threads_setting() {
  static std::atomic<int> threads{default_thread_count()};
  return threads;
}

}  // namespace

void run_phases(Phase* const* phases, int phase_count, int threads) {
  if (threads > 1 && pool().run(phases, phase_count, threads)) return;
  const DefaultFloatMode mode;
  for (int i = 0; i < phase_count; ++i) {
    const std::int64_t count = phases[i]->count();
    for (std::int64_t task = 0; task < count; ++task) phases[i]->run(task, 0);
  }
}

void set_thread_count(int threads) { threads_setting().store(limited(threads)); }
int thread_count() { return threads_setting().load(std::memory_order_relaxed); }

}  // namespace addlora::cpu
