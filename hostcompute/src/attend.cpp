// Few tokens: one piece of work are some of one token's queries of one head of the cache: the products with its keys up
// to the token's position, their softmax, and the values weighted with it. Keys and values are read once for up to
// `tile` queries.
#include "attend.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "gemm.h"

namespace {

constexpr int64_t few_tokens = 4;
constexpr int64_t least_pieces = 6;  // if need be, keys and values are read more than once for that
constexpr int64_t rows_ahead = 16;   // of one head, that are fetched
constexpr int64_t line = 64;
constexpr int64_t alone = 1 << 16;  // products; fewer are computed before another thread has woken up

class Attend {
 public:
  Attend(Pool& pool, const Kernels& kernels, const hc_attention& call)
      : pool_(pool),
        call_(call),
        tiles_(kernels.tiles[call.dtype]),
        softmax_(kernels.softmax),
        element_(call.dtype == 0 ? 4 : 2),
        group_(call.heads / call.cache_heads),
        together_(find_together()) {}

  void run() {
    const int64_t floats = tile * (call_.keys + call_.size);
    for (int thread = 0; thread < pool_.threads(); ++thread) pool_.scratch(thread).reserve(floats * sizeof(float));
    const auto task = [](void* context, int thread) { static_cast<Attend*>(context)->work(thread); };
    const int64_t queries = call_.batch * call_.tokens * call_.heads;
    if (pieces() == 1 || queries * seen_at_most() * (call_.size + call_.values) <= alone) {
      task(this, 0);
    } else {
      pool_.run(task, this);
    }
  }

 private:
  // Queries of a piece: `tile`, or fewer for threads to have something to share, however many threads there are.
  int64_t find_together() const {
    const int64_t all = call_.batch * call_.tokens * call_.cache_heads;
    int64_t together = std::min<int64_t>(tile, group_);
    while (together > 1 && all * ceil_div(group_, together) < least_pieces) together = ceil_div(together, 2);
    return together;
  }
  int64_t pieces() const { return call_.batch * call_.tokens * call_.cache_heads * ceil_div(group_, together_); }

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
    const int64_t parts = ceil_div(group_, together_);
    for (int64_t piece = taken_.fetch_add(1); piece < pieces(); piece = taken_.fetch_add(1)) {
      const int64_t head = piece / parts;  // of the cache, of all tokens
      const int64_t first = piece % parts * together_;
      const int count = static_cast<int>(std::min(together_, group_ - first));
      queries(head / call_.cache_heads, head % call_.cache_heads, first, count, scratch);
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
    const Heads k = find_heads(call_.k, row, call_.size);
    const Heads v = find_heads(call_.v, row, call_.values);
    for_rows(k, keys, [&](int64_t s, int n, const void* const* rows, const void* const* next) {
      for (int i = 0; i < n; ++i) v.fetch(s + i);
      tiles_.dot[n != 1][count - 1](rows, x, call_.size, next, scratch + s * count);
    });
    float sums[tile];
    softmax_(scratch, keys, count, sums);
    for_rows(v, keys, [&](int64_t s, int n, const void* const* rows, const void* const* next) {
      tiles_.axpy[n != 1][count - 1](rows, scratch + s * count, call_.values, next, y);
    });
    for (int t = 0; t < count; ++t)
      for (int64_t i = 0; i < call_.values; ++i) y[t][i] /= sums[t];
  }

  // The rows of one head in a cache.
  struct Heads {
    const char* first;
    int64_t bytes;
    int64_t step;
    const char* row(int64_t s) const { return first + s * step; }
    __attribute__((always_inline)) void fetch(int64_t s) const {
      for (int64_t at = 0; at < bytes; at += line) __builtin_prefetch(row(s) + at, 0, 2);
    }
  };
  Heads find_heads(const void* cache, int64_t first, int64_t width) const {
    const int64_t bytes = width * element_;
    return {static_cast<const char*>(cache) + first * bytes, bytes, call_.cache_heads * bytes};
  }

  // Calls kernel(s, n, rows, next) for the rows of one head from one on, n = `tile` or 1 of them at a time.
  template <typename Kernel>
  static void for_rows(const Heads& heads, int64_t count, Kernel kernel) {
    for (int64_t s = 0; s < count;) {
      const int n = count - s >= tile ? tile : 1;
      const bool known = s + rows_ahead + n <= count;
      const void* rows[tile];
      const void* next[tile];
      for (int i = 0; i < n; ++i) {
        rows[i] = heads.row(s + i);
        next[i] = heads.row(s + rows_ahead + i);
      }
      kernel(s, n, rows, known ? next : nullptr);
      s += n;
    }
  }

  Pool& pool_;
  const hc_attention& call_;
  const Tiles& tiles_;
  void (*const softmax_)(float*, int64_t, int, float*);
  const int64_t element_;
  const int64_t group_;  // queries that share a head of the cache
  const int64_t together_;
  std::atomic<int64_t> taken_{0};
};

}  // namespace

void attend(Pool& pool, const Kernels& kernels, const hc_attention& call) {
  call.tokens > few_tokens ? attend_many(pool, kernels, call) : Attend(pool, kernels, call).run();
}
