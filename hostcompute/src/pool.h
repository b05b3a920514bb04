// A small fork-join thread pool: the caller works too, the others wait for it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

// Memory for one purpose, kept between calls and grown when needed; 64-byte aligned, not initialised.
class Buffer {
 public:
  Buffer() = default;
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void reserve(size_t bytes);  // throws std::bad_alloc; the old content is lost
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

class Pool {
 public:
  using Task = void (*)(void* context, int share);

  explicit Pool(int threads);  // throws std::system_error when a thread cannot be started
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }
  std::mutex& turn() { return turn_; }  // held by a caller for all of its runs and its use of scratch
  Buffer& scratch(int share) { return scratch_[share]; }
  Buffer& shared_scratch() { return shared_scratch_; }

  // Calls task(context, s) once for every share s in [0, threads) and returns when all are done. Usually each thread
  // takes one, but whoever is there takes what is left: nobody waits for a thread that is slow to wake up. The task
  // must not throw.
  void run(Task task, void* context);

 private:
  void serve();
  bool work();
  bool is_left(uint64_t next) const;
  void stop();
  template <typename Ready>
  bool spin(Ready ready) const;

  const int threads_;
  const bool may_spin_;  // not when threads outnumber the CPUs: a spinning thread keeps a working one off
  std::mutex turn_;
  std::vector<Buffer> scratch_;
  Buffer shared_scratch_;

  std::mutex mutex_;
  std::condition_variable start_;
  std::condition_variable done_;
  std::atomic<uint64_t> next_;  // the run's number in the upper half, in the lower one the share to be taken next
  std::atomic<int> finished_{0};
  std::atomic<bool> stopping_{false};
  Task task_ = nullptr;
  void* context_ = nullptr;
  std::vector<std::thread> workers_;
};
