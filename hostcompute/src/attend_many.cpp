// Many queries: a piece of work is up to `queries` of those that share a head of the cache, of adjacent tokens. They
// are multiplied with some keys at a time, and what the values add up to is scaled down whenever a larger product turns
// up (Milakov & Gimelshein 2018, "Online normalizer calculation for softmax").
#include <algorithm>
#include <atomic>
#include <cstring>

#include "attend.h"
#include "gemm.h"

namespace {

constexpr int64_t lanes = 16;                  // of the softmax
constexpr int64_t queries = 4 * lanes;         // of a piece
constexpr int64_t block_keys = 8 * gemm_rows;  // whose scores stay in the second cache
constexpr float lowest = -1e30f;

class AttendMany {
 public:
  AttendMany(Pool& pool, const Kernels& kernels, const hc_attention& call)
      : pool_(pool),
        kernels_(kernels),
        call_(call),
        row_bytes_{row_bytes(call.dtype, call.size), row_bytes(call.dtype, call.values)},
        group_(call.heads / call.cache_heads),
        pieces_(ceil_div(call.tokens * group_, queries)) {}

  void run() {
    const int64_t floats = queries * (call_.size + call_.values + block_keys) +
                           PackedTokens::floats(queries, call_.size) + Gemm::scratch_floats(queries);
    for (int thread = 0; thread < pool_.threads(); ++thread) pool_.scratch(thread).reserve(floats * sizeof(float));
    pool_.run([](void* context, int thread) { static_cast<AttendMany*>(context)->work(thread); }, this);
  }

 private:
  // Of a piece: its row, its head of the cache, and its queries, token by token.
  struct Piece {
    int64_t row;
    int64_t head;
    int64_t first;  // of all queries of the row that share the head
    int64_t count;
  };

  // What each query sees of the keys, and its softmax so far.
  struct State {
    int32_t begin[queries];
    int32_t end[queries];
    float most[queries];
    float sums[queries];
    float factors[queries];
    int32_t first;  // key that any of them sees
    int32_t last;   // behind the last such key
  };

  void work(int thread) {
    float* scratch = static_cast<float*>(pool_.scratch(thread).data());
    const int64_t total = call_.batch * call_.cache_heads * pieces_;
    for (int64_t i = taken_.fetch_add(1); i < total; i = taken_.fetch_add(1)) {
      const int64_t first = i % pieces_ * queries;
      const int64_t head = i / pieces_ % call_.cache_heads;
      const int64_t count = std::min(queries, call_.tokens * group_ - first);
      compute({i / pieces_ / call_.cache_heads, head, first, count}, scratch);
    }
  }

  int64_t token(const Piece& piece, int64_t q) const { return piece.row * call_.tokens + (piece.first + q) / group_; }
  int64_t query(const Piece& piece, int64_t q) const {
    return token(piece, q) * call_.heads + piece.head * group_ + (piece.first + q) % group_;
  }

  void compute(const Piece& piece, float* scratch) const {
    float* scaled = scratch;                            // [count, size]
    float* y = scaled + queries * call_.size;           // [count, values]
    float* scores = y + queries * call_.values;         // [block_keys, queries]
    float* packed = scores + queries * block_keys;
    float* rest = packed + PackedTokens::floats(queries, call_.size);
    std::memset(scaled, 0, queries * call_.size * sizeof(float));
    for (int64_t q = 0; q < piece.count; ++q) {
      const float* from = call_.q + query(piece, q) * call_.size;
      for (int64_t i = 0; i < call_.size; ++i) scaled[q * call_.size + i] = from[i] * call_.scale;
    }
    const PackedTokens x(kernels_.gemm, ceil_div(piece.count, lanes) * lanes, call_.size, packed);
    x.pack(0, x.pieces(), [&](int64_t q) { return scaled + q * call_.size; });
    State state;
    start(piece, &state);
    std::memset(y, 0, piece.count * call_.values * sizeof(float));
    for (int32_t key = state.first; key < state.last; key += block_keys)
      add_keys(piece, x, key, std::min<int64_t>(block_keys, state.last - key), &state, scores, y, rest);
    for (int64_t q = 0; q < piece.count; ++q) {
      float* to = call_.y + query(piece, q) * call_.values;
      const float sum = state.sums[q];
      for (int64_t i = 0; i < call_.values; ++i) to[i] = sum == 0 ? 0 : y[q * call_.values + i] / sum;
    }
  }

  void start(const Piece& piece, State* state) const {
    std::fill_n(state->most, queries, lowest);
    std::fill_n(state->sums, queries, 0.0f);
    std::fill_n(state->begin, queries, 0);
    std::fill_n(state->end, queries, 0);
    state->first = static_cast<int32_t>(call_.keys);
    state->last = 0;
    for (int64_t q = 0; q < piece.count; ++q) {
      const Span seen = seen_keys(call_, token(piece, q));
      state->begin[q] = static_cast<int32_t>(seen.begin);
      state->end[q] = static_cast<int32_t>(seen.end);
      state->first = std::min(state->first, state->begin[q]);
      state->last = std::max(state->last, state->end[q]);
    }
  }

  // What a block of keys and values adds to y.
  void add_keys(const Piece& piece, const PackedTokens& x, int64_t key, int64_t count, State* state, float* scores,
                float* y, float* rest) const {
    const void* rows[gemm_rows];
    const Gemm keys(kernels_, call_.dtype, call_.size, rest);
    for (int64_t s = 0; s < count; s += gemm_rows)
      keys.products(x, find_rows(call_.k, 0, piece, key + s, count - s, rows), {}, scores + s * x.stride());
    int32_t begin[queries];
    int32_t end[queries];
    for (int64_t q = 0; q < queries; ++q) {
      begin[q] = state->begin[q] - static_cast<int32_t>(key);
      end[q] = state->end[q] - static_cast<int32_t>(key);
    }
    kernels_.softmax_more({scores, count, x.stride(), begin, end, state->most, state->sums, state->factors});
    for (int64_t q = 0; q < piece.count; ++q)
      if (const float factor = state->factors[q]; factor != 1)
        for (int64_t i = 0; i < call_.values; ++i) y[q * call_.values + i] *= factor;
    const Gemm values(kernels_, call_.dtype, call_.values, rest);
    for (int64_t s = 0; s < count; s += gemm_rows)
      values.sums({scores + s * x.stride(), 1, x.stride()}, piece.count,
                  find_rows(call_.v, 1, piece, key + s, count - s, rows), {}, 0, call_.values,
                  [&](int64_t q) { return y + q * call_.values; });
  }

  // The rows of a cache from a key on. which: 0 keys, 1 values.
  RowSet find_rows(const void* cache, int which, const Piece& piece, int64_t key, int64_t left,
                   const void** rows) const {
    const int64_t count = std::min<int64_t>(gemm_rows, left);
    for (int64_t r = 0; r < count; ++r) {
      const int64_t row = (piece.row * call_.keys + key + r) * call_.cache_heads + piece.head;
      rows[r] = static_cast<const char*>(cache) + row * row_bytes_[which];
    }
    return {rows, count};
  }

  Pool& pool_;
  const Kernels& kernels_;
  const hc_attention& call_;
  const int64_t row_bytes_[2];
  const int64_t group_;
  const int64_t pieces_;  // of each row and head of the cache
  std::atomic<int64_t> taken_{0};
};

}  // namespace

void attend_many(Pool& pool, const Kernels& kernels, const hc_attention& call) {
  AttendMany(pool, kernels, call).run();
}
