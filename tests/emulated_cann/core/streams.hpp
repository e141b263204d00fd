// Streams whose work runs later: when somebody synchronises (mode sync), in a thread of the stream after a delay
// (mode thread), or at once (mode now). Events mark a point of a stream.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "error.hpp"
#include "handles.hpp"
#include "settings.hpp"

namespace emu {

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  using Task = std::function<void()>;

  Stream();
  ~Stream();
  Stream(const Stream &) = delete;
  Stream &operator=(const Stream &) = delete;

  void enqueue(Task task);
  // Waits until all that was enqueued before the call has run. Does not throw.
  void wait();
  // The first failure of the stream's work since the last time this was asked.
  std::optional<Error> take_failure();
  bool idle() const;

 private:
  void run_one(const Task &task);
  void work();

  const StreamMode mode_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  uint64_t enqueued_ = 0;
  uint64_t done_ = 0;
  bool stopping_ = false;
  std::optional<Error> failure_;
  std::recursive_mutex running_;  // one task at a time; a callback may synchronise its own stream
  std::thread worker_;
};

// One recording of an event.
class Mark {
 public:
  explicit Mark(std::weak_ptr<Stream> stream) : stream_(std::move(stream)) {}

  void reach();
  bool reached() const;
  // Runs or waits for the recording stream's work up to the mark.
  void wait();
  std::chrono::steady_clock::time_point time() const;

 private:
  std::weak_ptr<Stream> stream_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  std::chrono::steady_clock::time_point time_{};
};

class Event {
 public:
  void record(const std::shared_ptr<Stream> &stream);
  // Null before the first recording: there is nothing to wait for then.
  std::shared_ptr<Mark> last() const;
  void forget();

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<Mark> last_;
};

Handles<Stream> &streams();
Handles<Event> &events();

std::shared_ptr<Stream> new_stream();
// A null handle is the default stream.
std::shared_ptr<Stream> stream_of(void *handle);
void wait_for_all_streams();
std::optional<Error> take_failure_of_any_stream();
void reset_streams();

}  // namespace emu
