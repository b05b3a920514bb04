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

namespace {

constexpr int few_tokens = 16;
constexpr int bound_tokens = pair;  // by memory
constexpr int64_t alone = 1 << 16;  // products; fewer are computed before another thread has woken up
// A piece for few tokens: some bytes of rows, or a part of all rows, which then has a sum of its own.
constexpr int64_t piece_bytes = 64 * 1024;
constexpr int64_t most_sums = 32;
constexpr int64_t least_sum_bytes = 64 * 1024;
constexpr int64_t least_sums = 8;
constexpr int64_t narrow_bytes = 2048;  // shorter rows are summed several at a time
constexpr int64_t short_bytes = 4096;   // shorter packed rows are read in pairs
// A piece for many tokens: some rows, or some columns of all rows; and how much of it is widened at a time.
constexpr int64_t dot_rows = 32;
constexpr int64_t dot_columns = 1024;
constexpr int64_t sum_columns = 256;
constexpr int64_t least_sum_columns = 64;
constexpr int64_t sum_rows = 16;
constexpr int64_t line_floats = 16;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

class Matmul {
 public:
  Matmul(Pool& pool, const Kernels& kernels, const MatmulCall& call)
      : pool_(pool),
        call_(call),
        tiles_(kernels.tiles[call.dtype]),
        wide_tiles_(kernels.tiles[0]),
        row_bytes_(row_bytes(call.dtype, call.width)),
        few_(call.tokens <= few_tokens),
        size_(piece_size()),
        pieces_(ceil_div(few_ || !call.sum_rows ? call.rows : call.width, size_)) {}

  void run() {
    if (few_ && call_.sum_rows) {
      pool_.shared_scratch().reserve(pieces_ * sum_floats() * sizeof(float));
    } else if (!few_) {
      for (int thread = 0; thread < pool_.threads(); ++thread)
        pool_.scratch(thread).reserve(scratch_floats() * sizeof(float));
    }
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
    if (!call_.sum_rows) return few_ ? std::max<int64_t>(1, piece_bytes / row_bytes_) : dot_rows;
    if (!few_) {
      const int64_t stripes = round_up(ceil_div(call_.width, sum_columns), 8);
      return std::max(least_sum_columns, round_up(ceil_div(call_.width, stripes), group_columns));
    }
    const int64_t most = std::clamp(bound_tokens * most_sums / call_.tokens, least_sums, most_sums);
    const int64_t sums = std::clamp<int64_t>(call_.rows * row_bytes_ / least_sum_bytes, 1, most);
    return ceil_div(call_.rows, sums);
  }

  // Floats that a thread needs for many tokens: widened weights, and the sums of a piece.
  int64_t scratch_floats() const {
    return call_.sum_rows ? (sum_rows + call_.tokens) * size_ : size_ * (dot_columns + group_columns);
  }
  int64_t sum_floats() const { return round_up(call_.tokens * call_.width, line_floats); }
  float* sum(int64_t piece) const { return static_cast<float*>(pool_.shared_scratch().data()) + piece * sum_floats(); }
  const char* row(int64_t r) const { return static_cast<const char*>(call_.weights) + r * row_bytes_; }

  void work(int thread) {
    float* wide = static_cast<float*>(pool_.scratch(thread).data());
    for (int64_t piece = taken_.fetch_add(1); piece < pieces_; piece = taken_.fetch_add(1)) {
      const int64_t total = few_ || !call_.sum_rows ? call_.rows : call_.width;
      const int64_t begin = piece * size_;
      const int64_t end = std::min(total, begin + size_);
      if (!few_) {
        call_.sum_rows ? many_sums(begin, end, wide) : many_dots(begin, end, wide);
      } else if (call_.sum_rows) {
        few_sums(begin, end, sum(piece));
      } else {
        few_dots(begin, end);
      }
    }
  }

  // How many rows one call of a kernel reads.
  int together() const {
    if (call_.tokens > bound_tokens || (call_.sum_rows && row_bytes_ < narrow_bytes)) return tile;
    return is_packed(call_.dtype) && row_bytes_ < short_bytes ? pair : 1;
  }
  DotTile dot_kernel(int rows, int64_t tokens) const {
    return rows == pair ? tiles_.pair_dot[tokens - 1] : tiles_.dot[rows != 1][tokens - 1];
  }
  AxpyTile axpy_kernel(int rows, int64_t tokens) const {
    return rows == pair ? tiles_.pair_axpy[tokens - 1] : tiles_.axpy[rows != 1][tokens - 1];
  }

  // Single rows lie one behind the other, which the CPU sees by itself: fetching them too only holds it up.
  void few_dots(int64_t begin, int64_t end) const {
    const float* x[few_tokens];
    for (int64_t t = 0; t < call_.tokens; ++t) x[t] = call_.x + t * call_.width;
    for (int64_t r = begin; r < end;) {
      const int n = end - r >= together() ? together() : 1;
      const void* rows[tile];
      const void* next[tile];
      for (int i = 0; i < n; ++i) rows[i] = row(r + i);
      const bool known = r + 2 * n <= end;
      for (int i = 0; known && i < n; ++i) next[i] = row(r + n + i);
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

  // Some columns of a row as float32.
  void widen(int64_t r, int64_t column, int64_t count, float* to) const {
    tiles_.widen(row(r), call_.width, column, column + count, to);
  }

  void many_dots(int64_t begin, int64_t end, float* wide) const {
    const int64_t parts = ceil_div(call_.width, dot_columns);
    for (int64_t part = 0; part < parts; ++part) {
      const auto cut = [&](int64_t p) { return call_.width * p / parts / group_columns * group_columns; };
      const int64_t column = cut(part);
      const int64_t stop = part + 1 == parts ? call_.width : cut(part + 1);
      const int64_t columns = stop - column;
      for (int64_t r = begin; r < end; ++r) widen(r, column, columns, wide + (r - begin) * columns);
      for (int64_t t0 = 0; t0 < call_.tokens; t0 += tile) add_dots(begin, end, t0, column, columns, wide);
    }
  }

  // The products of up to `tile` tokens with some columns of the rows from `begin` on, which lie in `wide`, into y.
  void add_dots(int64_t begin, int64_t end, int64_t t0, int64_t column, int64_t columns, const float* wide) const {
    const int tokens = static_cast<int>(std::min<int64_t>(tile, call_.tokens - t0));
    const float* x[tile];
    for (int t = 0; t < tokens; ++t) x[t] = call_.x + (t0 + t) * call_.width + column;
    for (int64_t r = begin; r < end;) {
      const int n = end - r >= tile ? tile : 1;
      const void* rows[tile];
      for (int i = 0; i < n; ++i) rows[i] = wide + (r - begin + i) * columns;
      float out[tile * tile];
      wide_tiles_.dot[n != 1][tokens - 1](rows, x, columns, nullptr, out);
      for (int t = 0; t < tokens; ++t) {
        float* y = call_.y + (t0 + t) * call_.rows + r;
        for (int i = 0; i < n; ++i) y[i] = (column == 0 ? 0 : y[i]) + out[i * tokens + t];
      }
      r += n;
    }
  }

  void many_sums(int64_t begin, int64_t end, float* wide) const {
    const int64_t columns = end - begin;
    float* sums = wide + sum_rows * columns;  // rows of y itself may all lie in the same few sets of a cache
    std::memset(sums, 0, call_.tokens * columns * sizeof(float));
    for (int64_t first = 0; first < call_.rows; first += sum_rows) {
      const int64_t last = std::min(call_.rows, first + sum_rows);
      for (int64_t r = first; r < last; ++r) widen(r, begin, columns, wide + (r - first) * columns);
      for (int64_t t0 = 0; t0 < call_.tokens; t0 += tile) add_rows(first, last, t0, columns, wide, sums);
    }
    for (int64_t t = 0; t < call_.tokens; ++t)
      std::memcpy(call_.y + t * call_.width + begin, sums + t * columns, columns * sizeof(float));
  }

  // The rows from `first` on, whose columns lie in `wide`, into the sums of up to `tile` tokens.
  void add_rows(int64_t first, int64_t last, int64_t t0, int64_t columns, const float* wide, float* sums) const {
    const int tokens = static_cast<int>(std::min<int64_t>(tile, call_.tokens - t0));
    float* y[tile];
    for (int t = 0; t < tokens; ++t) y[t] = sums + (t0 + t) * columns;
    for (int64_t r = first; r < last;) {
      const int n = last - r >= tile ? tile : 1;
      const void* rows[tile];
      float h[tile * tile];
      for (int i = 0; i < n; ++i) {
        rows[i] = wide + (r - first + i) * columns;
        for (int t = 0; t < tokens; ++t) h[i * tokens + t] = call_.x[(t0 + t) * call_.rows + r + i];
      }
      wide_tiles_.axpy[n != 1][tokens - 1](rows, h, columns, nullptr, y);
      r += n;
    }
  }

  Pool& pool_;
  const MatmulCall& call_;
  const Tiles& tiles_;
  const Tiles& wide_tiles_;
  const int64_t row_bytes_;
  const bool few_;
  const int64_t size_;  // rows of a piece; columns, where many tokens sum rows
  const int64_t pieces_;
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
