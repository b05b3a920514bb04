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

void name_this_thread(int thread) {
#if defined(__linux__)
  char name[16];
  std::snprintf(name, sizeof name, "hostcompute-%u", static_cast<unsigned>(thread) % 1000);
  pthread_setname_np(pthread_self(), name);
#else
  (void)thread;
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
      scratch_(threads) {
  try {
    for (int thread = 1; thread < threads; ++thread) workers_.emplace_back([this, thread] { serve(thread); });
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

void Pool::run(Task task, void* context) {
  if (threads_ == 1) {
    task(context, 0);
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    task_ = task;
    context_ = context;
    pending_.store(threads_ - 1);
    generation_.fetch_add(1);
  }
  start_.notify_all();
  task(context, 0);
  const auto finished = [this] { return pending_.load() == 0; };
  if (!spin(finished)) {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, finished);
  }
}

void Pool::serve(int thread) {
  name_this_thread(thread);
  uint64_t seen = 0;
  for (;;) {
    const auto called = [&] { return generation_.load() != seen || stopping_.load(); };
    if (!spin(called)) {
      std::unique_lock<std::mutex> lock(mutex_);
      start_.wait(lock, called);
    }
    if (stopping_.load()) return;
    ++seen;  // `run` does not start a generation before the last one is done, so none is missed
    task_(context_, thread);
    if (pending_.fetch_sub(1) == 1) {
      std::lock_guard<std::mutex> lock(mutex_);  // or the caller could miss this between its check and its wait
      done_.notify_one();
    }
  }
}
