// The rows of a matrix, summed, in pieces as in dot_rows.cpp. Few tokens: a part of all rows, which then has a sum of
// its own. Many: some columns of all rows.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "gemm.h"
#include "matmul.h"

namespace {

constexpr int64_t most_sums = 32;
constexpr int64_t least_sums = 8;
constexpr int64_t least_sum_bytes = 64 * 1024;
constexpr int64_t sum_columns = 256;
constexpr int64_t least_sum_columns = 64;
constexpr int64_t line_floats = 16;

int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

class SumRows {
 public:
  SumRows(Pool& pool, const Kernels& kernels, const MatmulCall& call)
      : pool_(pool),
        call_(call),
        kernels_(kernels),
        tiles_(kernels.tiles[call.dtype]),
        rows_(call.matrices->rows),
        y_(call.matrices->y),
        row_bytes_(row_bytes(call.dtype, call.width)),
        few_(call.tokens <= few_rows_of_x),
        size_(few_ ? few_size() : many_size()),
        pieces_(ceil_div(few_ ? rows_ : call.width, size_)) {}

  void run() {
    for (int thread = 0; thread < pool_.threads(); ++thread)
      pool_.scratch(thread).reserve(scratch_floats() * sizeof(float));
    if (few_) pool_.shared_scratch().reserve(pieces_ * sum_floats() * sizeof(float));
    const auto task = [](void* context, int thread) { static_cast<SumRows*>(context)->work(thread); };
    if (pieces_ == 1 || rows_ * call_.width * call_.tokens <= alone) {
      task(this, 0);
    } else {
      pool_.run(task, this);
    }
    if (few_) add_sums();
  }

 private:
  int64_t few_size() const {
    const int64_t most = std::clamp(pair * most_sums / call_.tokens, least_sums, most_sums);
    const int64_t sums = std::clamp<int64_t>(rows_ * row_bytes_ / least_sum_bytes, 1, most);
    return ceil_div(rows_, sums);
  }
  int64_t many_size() const {
    const int64_t stripes = round_up(ceil_div(call_.width, sum_columns), 8);
    return std::max(least_sum_columns, round_up(ceil_div(call_.width, stripes), group_columns));
  }

  // Floats that a thread needs.
  int64_t scratch_floats() const {
    return few_ ? 0 : Gemm::scratch_floats(call_.tokens) + call_.tokens * size_;
  }
  int64_t sum_floats() const { return round_up(call_.tokens * call_.width, line_floats); }
  float* sum(int64_t piece) const { return static_cast<float*>(pool_.shared_scratch().data()) + piece * sum_floats(); }
  const char* row(int64_t r) const { return static_cast<const char*>(call_.matrices->weights) + r * row_bytes_; }

  void work(int thread) {
    float* scratch = static_cast<float*>(pool_.scratch(thread).data());
    for (int64_t piece = taken_.fetch_add(1); piece < pieces_; piece = taken_.fetch_add(1)) {
      const int64_t begin = piece * size_;
      const int64_t end = std::min(few_ ? rows_ : call_.width, begin + size_);
      few_ ? few(begin, end, sum(piece)) : many(begin, end, scratch);
    }
  }

  // How many rows one call of a kernel reads.
  int together() const {
    if (call_.tokens > pair || row_bytes_ < narrow_bytes) return tile;
    return is_packed(call_.dtype) || call_.width > wide_columns ? pair : 1;
  }
  AxpyTile axpy_kernel(int rows, int64_t tokens) const {
    return rows == pair ? tiles_.pair_axpy[tokens - 1] : tiles_.axpy[rows != 1][tokens - 1];
  }

  bool needed(int64_t r) const {
    for (int64_t t = 0; t < call_.tokens; ++t)
      if (call_.x[t * rows_ + r] != 0) return true;
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

  void few(int64_t begin, int64_t end, float* y) const {
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
        for (int i = 0; i < n; ++i) h[i * some + t] = call_.x[(t0 + t) * rows_ + indices[i]];
      }
      axpy_kernel(n, some)(rows, h, call_.width, t0 == 0 ? next : nullptr, ys);
    }
  }

  // y = the pieces' sums, in their order.
  void add_sums() const {
    const int64_t floats = call_.tokens * call_.width;
    std::memcpy(y_, sum(0), floats * sizeof(float));
    for (int64_t piece = 1; piece < pieces_; ++piece) {
      const float* from = sum(piece);
      for (int64_t i = 0; i < floats; ++i) y_[i] += from[i];
    }
  }

  RowSet find_rows(int64_t begin, const void** rows) const {
    const int64_t count = std::clamp<int64_t>(rows_ - begin, 0, gemm_rows);
    for (int64_t r = 0; r < count; ++r) rows[r] = row(begin + r);
    return {rows, count};
  }

  void many(int64_t begin, int64_t end, float* scratch) const {
    const int64_t columns = end - begin;
    float* sums = scratch;  // rows of y itself may all lie in the same few sets of a cache
    std::memset(sums, 0, call_.tokens * columns * sizeof(float));
    const Gemm gemm(kernels_, call_.dtype, call_.width, scratch + call_.tokens * columns);
    for (int64_t r = 0; r < rows_; r += gemm_rows) {
      const void* rows[gemm_rows];
      const void* next[gemm_rows];
      gemm.sums({call_.x + r, rows_, 1}, call_.tokens, find_rows(r, rows),
                find_rows(r + gemm_rows, next), begin, end,
                [&](int64_t t) { return sums + t * columns; });
    }
    for (int64_t t = 0; t < call_.tokens; ++t)
      std::memcpy(y_ + t * call_.width + begin, sums + t * columns, columns * sizeof(float));
  }

  Pool& pool_;
  const MatmulCall& call_;
  const Kernels& kernels_;
  const Tiles& tiles_;
  const int64_t rows_;
  float* const y_;
  const int64_t row_bytes_;
  const bool few_;
  const int64_t size_;  // rows of a piece; columns, where there are many tokens
  const int64_t pieces_;
  std::atomic<int64_t> taken_{0};
};

}  // namespace

void sum_rows(Pool& pool, const Kernels& kernels, const MatmulCall& call) {
  if (call.tokens == 0 || call.width == 0) return;
  if (call.matrices->rows > 0) return SumRows(pool, kernels, call).run();
  std::fill_n(call.matrices->y, call.tokens * call.width, 0.0f);
}
