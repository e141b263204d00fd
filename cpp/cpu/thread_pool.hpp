// A small pool of threads for the CPU backend.
//
// OpenMP was measured against it: libgomp hangs in a child after fork, and spins at barriers for whole scheduler
// quanta where the cores are shared. Here the caller always works, a worker that never wakes is not waited for, and a
// barrier waits for tasks that somebody has begun, not for threads.
#pragma once

#include <cstdint>

namespace addlora::cpu {

// Tasks 0 .. count-1, in any order and at once; `participant` is below the number of threads asked for.
class Phase {
 public:
  virtual ~Phase() = default;
  virtual std::int64_t count() const = 0;
  virtual void run(std::int64_t task, int participant) = 0;
};

// Runs the phases one after the other: a phase begins when every task of the one before has ended. Where the pool is
// busy with another caller's work, this caller does its own alone. Tasks must not throw.
void run_phases(Phase* const* phases, int phase_count, int threads);

void set_thread_count(int threads);
int thread_count();

}  // namespace addlora::cpu
