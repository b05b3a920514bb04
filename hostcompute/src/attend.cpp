// One piece of work is one token's queries of one head of the cache: the products with its keys up to the token's
// position, their softmax, and the values weighted with it. Keys and values are read once for up to `tile` queries.
#include "attend.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace {

constexpr int64_t alone = 1 << 16;  // products; fewer are computed before another thread has woken up

// exp(x) for x <= 0, and NaN for NaN: simple enough for compilers to compute several at once. Cephes' polynomial.
float exp_of(float x) {
  constexpr float least = -87.0f;
  constexpr float to_integer = 12582912.0f;  // added and taken away again it rounds
  x = x < least ? least : x;
  const float n = (x * 1.44269504f + to_integer) - to_integer;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

class Attend {
 public:
  Attend(Pool& pool, const Kernels& kernels, const hc_attention& call)
      : pool_(pool),
        call_(call),
        tiles_(kernels.tiles[call.dtype]),
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
  // The keys that a token at a position sees, and the first of them.
  int64_t end(int64_t position) const { return std::clamp<int64_t>(position + 1, 0, call_.keys); }
  int64_t begin(int64_t position) const {
    return call_.window == 0 ? 0 : std::clamp<int64_t>(position + 1 - call_.window, 0, end(position));
  }

  int64_t seen_at_most() const {
    int64_t most = 0;
    for (int64_t i = 0; i < call_.batch * call_.tokens; ++i)
      most = std::max(most, end(call_.positions[i]) - begin(call_.positions[i]));
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
    const int64_t position = call_.positions[token];
    const int64_t keys = end(position) - begin(position);
    if (keys == 0) return;
    const int64_t row = (token / call_.tokens * call_.keys + begin(position)) * call_.cache_heads + head;
    for_rows(call_.k, row, call_.size, keys, [&](int64_t s, int n, const void* const* rows, const void* const* next) {
      tiles_.dot[n != 1][count - 1](rows, x, call_.size, next, scratch + s * count);
    });
    float sums[tile];
    softmax(scratch, keys, count, sums);
    for_rows(call_.v, row, call_.values, keys, [&](int64_t s, int n, const void* const* rows, const void* const* next) {
      tiles_.axpy[n != 1][count - 1](rows, scratch + s * count, call_.values, next, y);
    });
    for (int t = 0; t < count; ++t)
      for (int64_t i = 0; i < call_.values; ++i) y[t][i] /= sums[t];
  }

  // scores [keys, count] become exp(score - the largest); sums: of each query.
  static void softmax(float* scores, int64_t keys, int count, float* sums) {
    float most[tile];
    std::copy_n(scores, count, most);
    for (int64_t s = 1; s < keys; ++s)
      for (int t = 0; t < count; ++t) most[t] = std::max(most[t], scores[s * count + t]);
    for (int64_t s = 0; s < keys; ++s)
      for (int t = 0; t < count; ++t) scores[s * count + t] -= most[t];
    for (int64_t i = 0; i < keys * count; ++i) scores[i] = exp_of(scores[i]);
    std::fill_n(sums, count, 0.0f);
    for (int64_t s = 0; s < keys; ++s)
      for (int t = 0; t < count; ++t) sums[t] += scores[s * count + t];
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
  const int64_t element_;
  const int64_t group_;  // queries that share a head of the cache
  std::atomic<int64_t> taken_{0};
};

}  // namespace

void attend(Pool& pool, const Kernels& kernels, const hc_attention& call) { Attend(pool, kernels, call).run(); }
