#include "streams.hpp"

#include <algorithm>
#include <utility>
#include <vector>

namespace emu {
namespace {

struct DefaultStream {
  std::mutex mutex;
  std::shared_ptr<Stream> stream;
};

DefaultStream &default_stream() {
  static DefaultStream &instance = *new DefaultStream;
  return instance;
}

// Every stream that exists, so that a device can be synchronised.
struct AllStreams {
  std::mutex mutex;
  std::vector<std::weak_ptr<Stream>> streams;
};

AllStreams &all_streams() {
  static AllStreams &instance = *new AllStreams;
  return instance;
}

std::vector<std::shared_ptr<Stream>> living_streams() {
  auto &all = all_streams();
  const std::lock_guard lock(all.mutex);
  std::vector<std::shared_ptr<Stream>> living;
  for (const auto &weak : all.streams)
    if (auto stream = weak.lock()) living.push_back(std::move(stream));
  all.streams.assign(living.begin(), living.end());
  return living;
}

}  // namespace

Stream::Stream() : mode_(settings().stream_mode) {
  if (mode_ == StreamMode::kThread) worker_ = std::thread([this] { work(); });
}

Stream::~Stream() {
  if (!worker_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  // The last reference may be dropped by the stream's own work.
  if (worker_.get_id() == std::this_thread::get_id()) {
    worker_.detach();
  } else {
    worker_.join();
  }
}

void Stream::enqueue(Task task) {
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    ++enqueued_;
  }
  changed_.notify_all();
  if (mode_ == StreamMode::kNow) wait();
}

void Stream::wait() {
  if (mode_ == StreamMode::kThread) {
    if (worker_.get_id() == std::this_thread::get_id()) return;
    std::unique_lock lock(mutex_);
    const uint64_t target = enqueued_;
    changed_.wait(lock, [&] { return done_ >= target; });
    return;
  }
  const std::lock_guard one_at_a_time(running_);
  while (true) {
    Task task;
    {
      const std::lock_guard lock(mutex_);
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    run_one(task);
    const std::lock_guard lock(mutex_);
    ++done_;
  }
}

std::optional<Error> Stream::take_failure() {
  const std::lock_guard lock(mutex_);
  return std::exchange(failure_, std::nullopt);
}

bool Stream::idle() const {
  const std::lock_guard lock(mutex_);
  return done_ == enqueued_;
}

void Stream::run_one(const Task &task) {
  try {
    task();
  } catch (const Error &error) {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = error;
  } catch (const std::exception &error) {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = Error{kCoreException, error.what()};
  }
}

void Stream::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    const Task task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(settings().stream_delay_us));
    run_one(task);
    lock.lock();
    ++done_;
    changed_.notify_all();
  }
}

void Mark::reach() {
  {
    const std::lock_guard lock(mutex_);
    reached_ = true;
    time_ = std::chrono::steady_clock::now();
  }
  changed_.notify_all();
}

bool Mark::reached() const {
  const std::lock_guard lock(mutex_);
  return reached_;
}

void Mark::wait() {
  if (reached()) return;
  if (const auto stream = stream_.lock()) stream->wait();
  // In mode thread the mark's own stream may be the caller's, or another thread may be running it.
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return reached_ || stream_.expired(); });
}

std::chrono::steady_clock::time_point Mark::time() const {
  const std::lock_guard lock(mutex_);
  return time_;
}

void Event::record(const std::shared_ptr<Stream> &stream) {
  auto mark = std::make_shared<Mark>(stream);
  {
    const std::lock_guard lock(mutex_);
    last_ = mark;
  }
  stream->enqueue([mark] { mark->reach(); });
}

std::shared_ptr<Mark> Event::last() const {
  const std::lock_guard lock(mutex_);
  return last_;
}

void Event::forget() {
  const std::lock_guard lock(mutex_);
  last_ = nullptr;
}

Handles<Stream> &streams() {
  static Handles<Stream> &instance = *new Handles<Stream>("stream", kRuntimeParameter);
  return instance;
}

Handles<Event> &events() {
  static Handles<Event> &instance = *new Handles<Event>("event", kRuntimeParameter);
  return instance;
}

std::shared_ptr<Stream> new_stream() {
  auto stream = std::make_shared<Stream>();
  auto &all = all_streams();
  const std::lock_guard lock(all.mutex);
  all.streams.push_back(stream);
  return stream;
}

std::shared_ptr<Stream> stream_of(void *handle) {
  if (handle) return streams().get(handle);
  auto &fallback = default_stream();
  const std::lock_guard lock(fallback.mutex);
  if (!fallback.stream) fallback.stream = new_stream();
  return fallback.stream;
}

void wait_for_all_streams() {
  for (const auto &stream : living_streams()) stream->wait();
}

std::optional<Error> take_failure_of_any_stream() {
  std::optional<Error> first;
  for (const auto &stream : living_streams())
    if (auto failure = stream->take_failure(); failure && !first) first = failure;
  return first;
}

void reset_streams() {
  // Work must not touch memory that is about to go.
  wait_for_all_streams();
  streams().clear();
  events().clear();
  auto &fallback = default_stream();
  const std::lock_guard lock(fallback.mutex);
  fallback.stream = nullptr;
}

}  // namespace emu
