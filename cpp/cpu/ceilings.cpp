#include "ceilings.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "kernel_sets.hpp"
#include "thread_pool.hpp"

namespace addlora::cpu {
namespace {

constexpr int kRounds = 8;
constexpr std::int64_t kTasks = 64;
constexpr double kWantedOperations = 2e9;

// Runs the tasks a few times, and returns the seconds of the fastest.
template <class Work>
double fastest(const Work& work) {
  class Tasks final : public Phase {
   public:
    explicit Tasks(const Work& task_work) : work_(task_work) {}
    std::int64_t count() const override { return kTasks; }
    void run(std::int64_t task, int) override { work_(task); }

   private:
    const Work& work_;
  } tasks(work);
  Phase* phases[] = {&tasks};
  double best = 1e300;
  for (int round = 0; round < kRounds; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    run_phases(phases, 1, thread_count());
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return best;
}

}  // namespace

double measure_flops() {
  const KernelSet& set = *available_kernel_sets().front();
  const double per_step = 2.0 * set.tile_sums * kLanes;
  const auto steps = static_cast<std::int64_t>(kWantedOperations / per_step / kTasks);
  const double seconds = fastest([&](std::int64_t) {
    alignas(64) float result[kLanes] = {};
    set.multiply_add(steps, result);
  });
  return per_step * static_cast<double>(steps * kTasks) / seconds;
}

double measure_read(const void* data, std::size_t bytes) {
  const KernelSet& set = *available_kernel_sets().front();
  const auto floats = static_cast<std::int64_t>(bytes / sizeof(float)) / (64 * kTasks) * 64;
  const double seconds = fastest([&](std::int64_t task) {
    alignas(64) float result[kLanes] = {};
    set.read(static_cast<const float*>(data) + task * floats, floats, result);
  });
  return static_cast<double>(floats * kTasks) * sizeof(float) / seconds;
}

}  // namespace addlora::cpu
