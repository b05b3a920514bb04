// Products with a whole matrix: its rows lie one behind the other, and all are wanted. Cut into pieces whose sizes
// depend on the call alone; the threads take one piece after the other, so that one that wakes up late holds up nobody.
//
// One or two tokens are bound by memory: rows are read one at a time while the next one comes in, short ones several.
// For some more, so are tiles of rows and tokens, and the weights still come from memory once. For many, a piece is
// widened to float32 once and used for all tokens while it is in a cache.
#include "matmul.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "gemm.h"

namespace {

constexpr int few_tokens = 16;
constexpr int bound_tokens = pair;  // by memory
constexpr int64_t alone = 1 << 16;  // products; fewer are computed before another thread has woken up
// A piece for few tokens: some bytes of rows, or a part of all rows, which then has a sum of its own.
constexpr int64_t piece_bytes = 64 * 1024;
constexpr int64_t most_sums = 32;
constexpr int64_t least_sum_bytes = 64 * 1024;
constexpr int64_t least_sums = 8;
constexpr int64_t pairs_ahead = 3;  // where rows are read in pairs, so many are on their way
constexpr int64_t digits_ahead = 14 * 1024;  // bytes, where one token meets rows in integers
// A piece for many tokens: gemm_rows, or some columns of all rows.
constexpr int64_t sum_columns = 256;
constexpr int64_t least_sum_columns = 64;
constexpr int64_t line_floats = 16;

int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

class Matmul {
 public:
  Matmul(Pool& pool, const Kernels& kernels, const MatmulCall& call)
      : pool_(pool),
        call_(call),
        kernels_(kernels),
        tiles_(kernels.tiles[call.dtype]),
        row_bytes_(row_bytes(call.dtype, call.width)),
        few_(call.tokens <= few_tokens),
        digits_(call.tokens == 1 && !call.sum_rows && tiles_.digits.make != nullptr),
        size_(piece_size()),
        pieces_(ceil_div(few_ || !call.sum_rows ? call.rows : call.width, size_)),
        packed_(kernels.gemm, call.tokens, call.width, find_shared()) {}

  void run() {
    for (int thread = 0; thread < pool_.threads(); ++thread)
      pool_.scratch(thread).reserve(scratch_floats() * sizeof(float));
    if (!few_ && !call_.sum_rows) pack();
    const auto task = [](void* context, int thread) { static_cast<Matmul*>(context)->work(thread); };
    if (pieces_ == 1 || call_.rows * call_.width * call_.tokens <= alone) {
      task(this, 0);
    } else {
      pool_.run(task, this);
    }
    if (few_ && call_.sum_rows) add_sums();
  }

 private:
  int64_t piece_size() const {
    if (!call_.sum_rows) return few_ ? std::max<int64_t>(1, piece_bytes / row_bytes_) : gemm_rows;
    if (!few_) {
      const int64_t stripes = round_up(ceil_div(call_.width, sum_columns), 8);
      return std::max(least_sum_columns, round_up(ceil_div(call_.width, stripes), group_columns));
    }
    const int64_t most = std::clamp(bound_tokens * most_sums / call_.tokens, least_sums, most_sums);
    const int64_t sums = std::clamp<int64_t>(call_.rows * row_bytes_ / least_sum_bytes, 1, most);
    return ceil_div(call_.rows, sums);
  }

  // Floats that a thread needs.
  int64_t scratch_floats() const {
    if (few_) return digits_ ? tiles_.digits.floats(call_.width) : 0;
    return Gemm::scratch_floats(call_.tokens) + (call_.sum_rows ? call_.tokens * size_ : 0);
  }
  // All tokens, which all threads share.
  void pack() {
    const auto task = [](void* context, int thread) {
      const Matmul& self = *static_cast<Matmul*>(context);
      const int64_t pieces = self.packed_.pieces();
      const int threads = self.pool_.threads();
      self.packed_.pack(pieces * thread / threads, pieces * (thread + 1) / threads,
                        [&](int64_t t) { return self.call_.x + t * self.call_.width; });
    };
    pool_.run(task, this);
  }

  // Room that all threads share: for the pieces' sums, or for packed tokens.
  float* find_shared() const {
    int64_t floats = 0;
    if (few_ && call_.sum_rows) floats = pieces_ * sum_floats();
    if (!few_ && !call_.sum_rows) floats = PackedTokens::floats(call_.tokens, call_.width);
    pool_.shared_scratch().reserve(floats * sizeof(float));
    return static_cast<float*>(pool_.shared_scratch().data());
  }
  int64_t sum_floats() const { return round_up(call_.tokens * call_.width, line_floats); }
  float* sum(int64_t piece) const { return static_cast<float*>(pool_.shared_scratch().data()) + piece * sum_floats(); }
  const char* row(int64_t r) const { return static_cast<const char*>(call_.weights) + r * row_bytes_; }

  void work(int thread) {
    float* scratch = static_cast<float*>(pool_.scratch(thread).data());
    bool made = !digits_;
    for (int64_t piece = taken_.fetch_add(1); piece < pieces_; piece = taken_.fetch_add(1)) {
      const int64_t total = few_ || !call_.sum_rows ? call_.rows : call_.width;
      const int64_t begin = piece * size_;
      const int64_t end = std::min(total, begin + size_);
      if (!made) tiles_.digits.make(call_.x, call_.width, scratch);
      made = true;
      if (!few_) {
        call_.sum_rows ? many_sums(begin, end, scratch) : many_dots(begin, end, scratch);
      } else if (call_.sum_rows) {
        few_sums(begin, end, sum(piece));
      } else {
        few_dots(begin, end, scratch);
      }
    }
  }

  // How many rows one call of a kernel reads.
  int together() const {
    const bool narrow = row_bytes_ < narrow_bytes && (call_.sum_rows || digits_);
    if (call_.tokens > bound_tokens || narrow) return tile;
    return is_packed(call_.dtype) || call_.width > wide_columns ? pair : 1;
  }
  DotTile dot_kernel(int rows, int64_t tokens) const {
    if (digits_) return tiles_.digits.dot_of(rows);
    return rows == pair ? tiles_.pair_dot[tokens - 1] : tiles_.dot[rows != 1][tokens - 1];
  }
  AxpyTile axpy_kernel(int rows, int64_t tokens) const {
    return rows == pair ? tiles_.pair_axpy[tokens - 1] : tiles_.axpy[rows != 1][tokens - 1];
  }

  // Single rows lie one behind the other, which the CPU sees by itself: fetching them too only holds it up.
  void few_dots(int64_t begin, int64_t end, const float* digits) const {
    const float* x[few_tokens];
    for (int64_t t = 0; t < call_.tokens; ++t) x[t] = digits_ ? digits : call_.x + t * call_.width;
    for (int64_t r = begin; r < end;) {
      const int n = end - r >= together() ? together() : 1;
      const void* rows[tile];
      const void* next[tile];
      for (int i = 0; i < n; ++i) rows[i] = row(r + i);
      const int64_t ahead = n * (digits_ ? std::max<int64_t>(1, digits_ahead / (n * row_bytes_)) : n == pair ? pairs_ahead : 1);
      const bool known = r + ahead + n <= call_.rows;
      for (int i = 0; known && i < n; ++i) next[i] = row(r + ahead + i);
      const bool fetch = known && n != 1;
      for (int64_t t0 = 0; t0 < call_.tokens; t0 += tile) {
        const int64_t some = std::min<int64_t>(tile, call_.tokens - t0);
        float out[tile * tile];
        dot_kernel(n, some)(rows, x + t0, call_.width, fetch && t0 == 0 ? next : nullptr, out);
        for (int64_t t = 0; t < some; ++t)
          for (int i = 0; i < n; ++i) call_.y[(t0 + t) * call_.rows + r + i] = out[i * some + t];
      }
      r += n;
    }
  }

  bool needed(int64_t r) const {
    for (int64_t t = 0; t < call_.tokens; ++t)
      if (call_.x[t * call_.rows + r] != 0) return true;
    return false;
  }

  // Up to `most` rows that some token needs, from *r on, which moves behind them. Returns how many.
  int find_needed(int64_t* r, int64_t end, int most, const void** rows, int64_t* indices) const {
    int n = 0;
    for (; *r < end && n < most; ++*r) {
      if (!needed(*r)) continue;
      indices[n] = *r;
      rows[n++] = row(*r);
    }
    return n;
  }

  void few_sums(int64_t begin, int64_t end, float* y) const {
    std::memset(y, 0, sum_floats() * sizeof(float));
    const int group = together();
    const void* rows[2][tile];
    int64_t indices[2][tile];
    int64_t r = begin;
    int now = 0;
    int n = find_needed(&r, end, group, rows[now], indices[now]);
    while (n > 0) {
      const int next = 1 - now;
      const int following = find_needed(&r, end, group, rows[next], indices[next]);
      if (n == group) {
        const bool adjacent = group == 1 && following == 1 && indices[next][0] == indices[now][0] + 1;
        add_needed(rows[now], indices[now], n, following == group && !adjacent ? rows[next] : nullptr, y);
      } else {
        for (int i = 0; i < n; ++i) add_needed(rows[now] + i, indices[now] + i, 1, nullptr, y);
      }
      now = next;
      n = following;
    }
  }

  // These rows, times what all tokens weigh them with, into y [tokens, width].
  void add_needed(const void* const* rows, const int64_t* indices, int n, const void* const* next, float* y) const {
    for (int64_t t0 = 0; t0 < call_.tokens; t0 += tile) {
      const int64_t some = std::min<int64_t>(tile, call_.tokens - t0);
      float h[tile * tile];
      float* ys[tile];
      for (int64_t t = 0; t < some; ++t) {
        ys[t] = y + (t0 + t) * call_.width;
        for (int i = 0; i < n; ++i) h[i * some + t] = call_.x[(t0 + t) * call_.rows + indices[i]];
      }
      axpy_kernel(n, some)(rows, h, call_.width, t0 == 0 ? next : nullptr, ys);
    }
  }

  // y = the pieces' sums, in their order.
  void add_sums() const {
    const int64_t floats = call_.tokens * call_.width;
    std::memcpy(call_.y, sum(0), floats * sizeof(float));
    for (int64_t piece = 1; piece < pieces_; ++piece) {
      const float* from = sum(piece);
      for (int64_t i = 0; i < floats; ++i) call_.y[i] += from[i];
    }
  }

  RowSet find_rows(int64_t begin, int64_t end, const void** rows) const {
    const int64_t count = std::clamp<int64_t>(end - begin, 0, gemm_rows);
    for (int64_t r = 0; r < count; ++r) rows[r] = row(begin + r);
    return {rows, count};
  }

  void many_dots(int64_t begin, int64_t end, float* scratch) const {
    const void* rows[gemm_rows];
    const void* next[gemm_rows];
    Gemm(kernels_, call_.dtype, call_.width, scratch)
        .dots(packed_, find_rows(begin, end, rows), find_rows(end, call_.rows, next), call_.y + begin, call_.rows);
  }

  void many_sums(int64_t begin, int64_t end, float* scratch) const {
    const int64_t columns = end - begin;
    float* sums = scratch;  // rows of y itself may all lie in the same few sets of a cache
    std::memset(sums, 0, call_.tokens * columns * sizeof(float));
    const Gemm gemm(kernels_, call_.dtype, call_.width, scratch + call_.tokens * columns);
    for (int64_t r = 0; r < call_.rows; r += gemm_rows) {
      const void* rows[gemm_rows];
      const void* next[gemm_rows];
      gemm.sums({call_.x + r, call_.rows, 1}, call_.tokens, find_rows(r, call_.rows, rows),
                find_rows(r + gemm_rows, call_.rows, next), begin, end,
                [&](int64_t t) { return sums + t * columns; });
    }
    for (int64_t t = 0; t < call_.tokens; ++t)
      std::memcpy(call_.y + t * call_.width + begin, sums + t * columns, columns * sizeof(float));
  }

  Pool& pool_;
  const MatmulCall& call_;
  const Kernels& kernels_;
  const Tiles& tiles_;
  const int64_t row_bytes_;
  const bool few_;
  const bool digits_;  // of the token, which each thread makes for itself
  const int64_t size_;  // rows of a piece; columns, where many tokens sum rows
  const int64_t pieces_;
  const PackedTokens packed_;
  std::atomic<int64_t> taken_{0};
};

}  // namespace

void matmul(Pool& pool, const Kernels& kernels, const MatmulCall& call) {
  if (call.rows > 0 && call.width > 0) {
    if (call.tokens > 0) Matmul(pool, kernels, call).run();
    return;
  }
  std::fill_n(call.y, call.tokens * (call.sum_rows ? call.width : call.rows), 0.0f);
}
