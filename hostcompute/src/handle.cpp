#include "handle.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

namespace {

struct Registry {
  std::mutex mutex;
  std::map<int, std::weak_ptr<Pool>> pools;  // by number of threads
  std::vector<Handle*> open;                 // in the order in which they were opened
  int fallback_threads = 1;
  const Kernels* fallback_kernels = nullptr;
  std::shared_ptr<Pool> fallback;  // once started, it stays

  std::shared_ptr<Pool> pool_of(int threads) {  // the caller holds the mutex
    std::weak_ptr<Pool>& known = pools[threads];
    std::shared_ptr<Pool> pool = known.lock();
    if (pool == nullptr) {
      pool = std::make_shared<Pool>(threads);
      known = pool;
    }
    return pool;
  }
};

// Never destroyed: a program may still run while the process ends.
Registry& registry() {
  static Registry* const only = new Registry;
  return *only;
}

}  // namespace

Handle* open_handle(int threads, const Kernels* kernels) {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.open.reserve(all.open.size() + 1);
  auto handle = std::make_unique<Handle>(Handle{all.pool_of(threads), kernels});
  all.open.push_back(handle.get());
  return handle.release();
}

void close_handle(Handle* handle) {
  {
    Registry& all = registry();
    std::lock_guard<std::mutex> lock(all.mutex);
    all.open.erase(std::find(all.open.begin(), all.open.end(), handle));
  }
  delete handle;  // without the mutex: it may have to wait for threads
}

Handle common_handle() {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (!all.open.empty()) return *all.open.front();
  if (all.fallback == nullptr || all.fallback->threads() != all.fallback_threads)
    all.fallback = all.pool_of(all.fallback_threads);
  return {all.fallback, all.fallback_kernels};
}

void set_fallback(int threads, const Kernels* kernels) {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.fallback_threads = threads;
  all.fallback_kernels = kernels;
}
