#include "pool.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <utility>

#if defined(__linux__)
#include <pthread.h>
#endif

namespace {

constexpr auto spin_limit = std::chrono::microseconds(20);
constexpr size_t alignment = 64;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void set_name(std::thread& thread, int number) {
#if defined(__linux__)
  char name[16];
  std::snprintf(name, sizeof name, "hostcompute-%u", static_cast<unsigned>(number) % 1000);
  pthread_setname_np(thread.native_handle(), name);
#else
  (void)thread;
  (void)number;
#endif
}

}  // namespace

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Buffer::~Buffer() { std::free(data_); }

void Buffer::reserve(size_t bytes) {
  if (bytes <= bytes_) return;
  std::free(std::exchange(data_, nullptr));
  bytes_ = 0;
  const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  data_ = std::aligned_alloc(alignment, rounded);
  if (data_ == nullptr) throw std::bad_alloc();
  bytes_ = rounded;
}

Pool::Pool(int threads)
    : threads_(threads),
      may_spin_(static_cast<unsigned>(threads) <= std::thread::hardware_concurrency()),
      scratch_(threads),
      next_(threads) {
  try {
    for (int number = 1; number < threads; ++number) {
      workers_.emplace_back([this] { serve(); });
      set_name(workers_.back(), number);
    }
  } catch (...) {
    stop();
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_.store(true);
  }
  start_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

template <typename Ready>
bool Pool::spin(Ready ready) const {
  if (!may_spin_) return ready();
  const auto deadline = std::chrono::steady_clock::now() + spin_limit;
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

bool Pool::is_left(uint64_t next) const { return (next & 0xffffffff) < static_cast<uint64_t>(threads_); }

void Pool::run(Task task, void* context) {
  if (threads_ == 1) {
    task(context, 0);
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    task_ = task;
    context_ = context;
    finished_.store(0);
    next_.store(((next_.load() >> 32) + 1) << 32);
  }
  start_.notify_all();
  while (work()) {
  }
  const auto finished = [this] { return finished_.load() == threads_; };
  if (!spin(finished)) {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, finished);
  }
}

// Takes a share and computes it; false if none is left. A share that was taken belongs to the run that goes on: the
// next one does not start before all are finished, and has another number.
bool Pool::work() {
  uint64_t next = next_.load();
  do {
    if (!is_left(next)) return false;
  } while (!next_.compare_exchange_weak(next, next + 1));
  task_(context_, static_cast<int>(next & 0xffffffff));
  if (finished_.fetch_add(1) == threads_ - 1) {
    std::lock_guard<std::mutex> lock(mutex_);  // or the caller could miss this between its check and its wait
    done_.notify_one();
  }
  return true;
}

void Pool::serve() {
  for (;;) {
    const auto called = [this] { return is_left(next_.load()) || stopping_.load(); };
    if (!spin(called)) {
      std::unique_lock<std::mutex> lock(mutex_);
      start_.wait(lock, called);
    }
    if (stopping_.load()) return;
    work();
  }
}
