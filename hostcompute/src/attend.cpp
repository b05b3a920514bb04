// Few tokens: one piece of work is one token's queries of one head of the cache: the products with its keys up to the
// token's position, their softmax, and the values weighted with it. Keys and values are read once for up to `tile`
// queries.
#include "attend.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace {

constexpr int64_t few_tokens = 4;
constexpr int64_t alone = 1 << 16;  // products; fewer are computed before another thread has woken up

class Attend {
 public:
  Attend(Pool& pool, const Kernels& kernels, const hc_attention& call)
      : pool_(pool),
        call_(call),
        tiles_(kernels.tiles[call.dtype]),
        softmax_(kernels.softmax),
        element_(call.dtype == 0 ? 4 : 2),
        group_(call.heads / call.cache_heads) {}

  void run() {
    const int64_t floats = tile * (call_.keys + call_.size);
    for (int thread = 0; thread < pool_.threads(); ++thread) pool_.scratch(thread).reserve(floats * sizeof(float));
    const auto task = [](void* context, int thread) { static_cast<Attend*>(context)->work(thread); };
    const int64_t pieces = call_.batch * call_.tokens * call_.cache_heads;
    if (pieces == 1 || pieces * group_ * seen_at_most() * (call_.size + call_.values) <= alone) {
      task(this, 0);
    } else {
      pool_.run(task, this);
    }
  }

 private:
  int64_t seen_at_most() const {
    int64_t most = 0;
    for (int64_t i = 0; i < call_.batch * call_.tokens; ++i) {
      const Span seen = seen_keys(call_, i);
      most = std::max(most, seen.end - seen.begin);
    }
    return most;
  }

  void work(int thread) {
    float* scratch = static_cast<float*>(pool_.scratch(thread).data());
    const int64_t pieces = call_.batch * call_.tokens * call_.cache_heads;
    for (int64_t piece = taken_.fetch_add(1); piece < pieces; piece = taken_.fetch_add(1)) {
      const int64_t token = piece / call_.cache_heads;  // of all rows
      const int64_t head = piece % call_.cache_heads;
      for (int64_t first = 0; first < group_; first += tile)
        queries(token, head, first, static_cast<int>(std::min<int64_t>(tile, group_ - first)), scratch);
    }
  }

  // Some queries of one token and one head of the cache.
  void queries(int64_t token, int64_t head, int64_t first, int count, float* scratch) const {
    const int64_t query = token * call_.heads + head * group_ + first;
    float* scaled = scratch + tile * call_.keys;
    const float* x[tile];
    float* y[tile];
    for (int t = 0; t < count; ++t) {
      const float* from = call_.q + (query + t) * call_.size;
      float* to = scaled + t * call_.size;
      for (int64_t i = 0; i < call_.size; ++i) to[i] = from[i] * call_.scale;
      x[t] = to;
      y[t] = call_.y + (query + t) * call_.values;
      std::memset(y[t], 0, call_.values * sizeof(float));
    }
    const Span seen = seen_keys(call_, token);
    const int64_t keys = seen.end - seen.begin;
    if (keys == 0) return;
    const int64_t row = (token / call_.tokens * call_.keys + seen.begin) * call_.cache_heads + head;
    for_rows(call_.k, row, call_.size, keys, [&](int64_t s, int n, const void* const* rows, const void* const* next) {
      tiles_.dot[n != 1][count - 1](rows, x, call_.size, next, scratch + s * count);
    });
    float sums[tile];
    softmax_(scratch, keys, count, sums);
    for_rows(call_.v, row, call_.values, keys, [&](int64_t s, int n, const void* const* rows, const void* const* next) {
      tiles_.axpy[n != 1][count - 1](rows, scratch + s * count, call_.values, next, y);
    });
    for (int t = 0; t < count; ++t)
      for (int64_t i = 0; i < call_.values; ++i) y[t][i] /= sums[t];
  }

  // Calls kernel(s, n, rows, next) for the rows of one head from one on, n = `tile` or 1 of them at a time.
  template <typename Kernel>
  void for_rows(const void* cache, int64_t first, int64_t width, int64_t count, Kernel kernel) const {
    const char* row = static_cast<const char*>(cache) + first * width * element_;
    const int64_t step = call_.cache_heads * width * element_;
    for (int64_t s = 0; s < count;) {
      const int n = count - s >= tile ? tile : 1;
      const int known = static_cast<int>(std::min<int64_t>(2 * n, count - s));
      const void* rows[2 * tile];
      for (int i = 0; i < known; ++i) rows[i] = row + (s + i) * step;
      kernel(s, n, rows, known == 2 * n ? rows + n : nullptr);
      s += n;
    }
  }

  Pool& pool_;
  const hc_attention& call_;
  const Tiles& tiles_;
  void (*const softmax_)(float*, int64_t, int, float*);
  const int64_t element_;
  const int64_t group_;  // queries that share a head of the cache
  std::atomic<int64_t> taken_{0};
};

}  // namespace

void attend(Pool& pool, const Kernels& kernels, const hc_attention& call) {
  call.tokens > few_tokens ? attend_many(pool, kernels, call) : Attend(pool, kernels, call).run();
}
