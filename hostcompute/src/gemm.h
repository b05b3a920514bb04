// Products of a few rows at a time with many tokens, whose vectors were packed side by side before.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels.h"

constexpr int gemm_rows = 48;  // that are multiplied at a time: whole tiles of any shape

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// x of all tokens, columns by columns: of each piece of them, one group of tokens after the other.
class PackedTokens {
 public:
  PackedTokens(const GemmKernels& kernels, int64_t tokens, int64_t width, float* data)
      : kernels_(kernels),
        tokens_(tokens),
        width_(width),
        vectors_(ceil_div(tokens, kernels.lanes)),
        groups_(ceil_div(vectors_, kernels.vectors)),
        data_(data) {}

  static int64_t floats(int64_t tokens, int64_t width) {
    return ceil_div(tokens, GemmKernels::most_lanes) * GemmKernels::most_lanes * width;
  }

  int64_t tokens() const { return tokens_; }
  int64_t stride() const { return vectors_ * kernels_.lanes; }  // tokens, whole registers of them
  int64_t pieces() const { return ceil_div(width_, gemm_columns); }
  int64_t columns(int64_t piece) const { return std::min(gemm_columns, width_ - piece * gemm_columns); }
  int64_t groups() const { return groups_; }
  int64_t first(int64_t group) const { return vectors_ * group / groups_ * kernels_.lanes; }
  int64_t vectors(int64_t group) const { return (first(group + 1) - first(group)) / kernels_.lanes; }

  float* data(int64_t piece, int64_t group) const {
    return data_ + piece * gemm_columns * stride() + first(group) * columns(piece);
  }

  // Packs some pieces; x(t) is where a token's vector is.
  template <typename Find>
  void pack(int64_t begin, int64_t end, Find x) const {
    const float* of[GemmKernels::most_vectors * GemmKernels::most_lanes];
    for (int64_t group = 0; group < groups_; ++group) {
      const int64_t some = std::min(tokens_, first(group + 1)) - first(group);
      for (int64_t t = 0; t < some; ++t) of[t] = x(first(group) + t);
      for (int64_t piece = begin; piece < end; ++piece)
        kernels_.pack(of, some, piece * gemm_columns, columns(piece), data(piece, group));
    }
  }

 private:
  const GemmKernels& kernels_;
  const int64_t tokens_;
  const int64_t width_;
  const int64_t vectors_;
  const int64_t groups_;
  float* const data_;
};

// Weight rows as they lie in memory, of some type.
struct RowSet {
  const void* const* rows;
  int64_t count;  // at most gemm_rows
};

// What rows are multiplied with: data[t * token_step + r * row_step].
struct Factors {
  const float* data;
  int64_t token_step;
  int64_t row_step;
};

// Which of some rows concern each token, and by how much.
class SparseFactors {
 public:
  static constexpr int64_t floats(int64_t tokens) { return tokens * (2 * gemm_rows + 1); }

  SparseFactors(int64_t tokens, float* data)
      : values_(data),
        indices_(reinterpret_cast<int32_t*>(data + tokens * gemm_rows)),
        counts_(indices_ + tokens * gemm_rows) {}

  // Of h [tokens, rows] what is not zero.
  void find(const float* h, int64_t tokens, int64_t rows) {
    for (int64_t t = 0; t < tokens; ++t) {
      int32_t count = 0;
      for (int64_t r = 0; r < rows; ++r) {
        values_[t * gemm_rows + count] = h[t * rows + r];
        indices_[t * gemm_rows + count] = static_cast<int32_t>(r);
        count += h[t * rows + r] != 0;
      }
      counts_[t] = count;
    }
  }

  const float* values(int64_t t) const { return values_ + t * gemm_rows; }
  const int32_t* indices(int64_t t) const { return indices_ + t * gemm_rows; }
  int64_t count(int64_t t) const { return counts_[t]; }

 private:
  float* const values_;
  int32_t* const indices_;
  int32_t* const counts_;
};

// What all calls for the rows of one matrix share. The scratch of a thread has `scratch_floats`.
class Gemm {
 public:
  Gemm(const Kernels& kernels, int32_t dtype, int64_t width, float* scratch)
      : gemm_(kernels.gemm),
        dot_(kernels.tiles[0].dot[0]),
        widen_(kernels.tiles[dtype].widen),
        dtype_(dtype),
        width_(width),
        scratch_(scratch) {}

  static constexpr int64_t scratch_floats(int64_t tokens) {
    return gemm_rows * (gemm_stride + tokens + GemmKernels::most_lanes);
  }

  // y[t * step + r] = x[t] . row r. The rows in `next` begin to come in meanwhile.
  void dots(const PackedTokens& x, const RowSet& rows, const RowSet& next, float* y, int64_t step) const;

  // sums[r * x.stride() + t] = x[t] . row r; whole tiles are written, up to gemm_rows rows.
  void products(const PackedTokens& x, const RowSet& rows, const RowSet& next, float* sums) const;

  // y(t)[i] += sum over r of h of t and r * row r [begin + i], for the columns from `begin` to `end`.
  template <typename Find>
  void sums(const Factors& h, int64_t tokens, const RowSet& rows, const RowSet& next, int64_t begin, int64_t end,
            Find y) const {
    const int64_t calls = ceil_div(tokens, gemm_tokens);
    for_stripes(stripe, rows, next, begin, end, [&](int64_t column, int64_t columns, Lines& lines) {
      for (int64_t call = 0; call < calls; ++call) {
        const int64_t t0 = tokens * call / calls;
        const int64_t some = tokens * (call + 1) / calls - t0;
        float* to[gemm_tokens];
        for (int64_t t = 0; t < some; ++t) to[t] = y(t0 + t) + column - begin;
        const Lines::Some now = lines.take(calls);
        gemm_.sum[some - 1]({scratch_, rows.count, h.data + t0 * h.token_step, h.token_step, h.row_step, columns, to,
                             now.lines, now.count});
      }
    });
  }

  // The same over all columns, where few of the rows concern a token.
  template <typename Find>
  void sparse_sums(const SparseFactors& h, int64_t tokens, const RowSet& rows, const RowSet& next, Find y) const {
    for_stripes(stripe, rows, next, 0, width_, [&](int64_t column, int64_t columns, Lines& lines) {
      for (int64_t t = 0; t < tokens; ++t) {
        const Lines::Some now = lines.take(tokens);
        gemm_.sparse_sum(
            {scratch_, h.indices(t), h.values(t), h.count(t), columns, y(t) + column, now.lines, now.count});
      }
    });
  }

  // y[t * step + r] = x(t) . row r for those r that concern t; anything for the others.
  template <typename Find>
  void sparse_dots(const SparseFactors& pairs, int64_t tokens, const RowSet& rows, const RowSet& next, Find x, float* y,
                   int64_t step) const {
    std::memset(y, 0, tokens * step * sizeof(float));
    for_stripes(gemm_columns, rows, next, 0, width_, [&](int64_t column, int64_t columns, Lines& lines) {
      for (int64_t t = 0; t < tokens; ++t) {
        lines.take(tokens).fetch();
        const float* token = x(t) + column;
        const int64_t count = pairs.count(t);
        for (int64_t k = 0, n; k < count; k += n) {
          n = std::min<int64_t>(tile, count - k);
          const float* of[tile];
          float out[tile];
          for (int64_t i = 0; i < n; ++i) of[i] = scratch_ + pairs.indices(t)[k + i] * columns;
          const void* one = token;
          dot_[n - 1](&one, of, columns, nullptr, out);
          for (int64_t i = 0; i < n; ++i) y[t * step + pairs.indices(t)[k + i]] += out[i];
        }
      }
    });
  }

 private:
  static constexpr int64_t stripe = 128;  // columns of all rows that are in the first cache together

  // The cache lines of some columns of some rows, shared out among the calls that fetch them.
  class Lines {
   public:
    struct Some {
      const void* const* lines;
      int64_t count;
      void fetch() const {
        for (int64_t i = 0; i < count; ++i) __builtin_prefetch(lines[i], 0, 2);
      }
    };
    Lines(const Gemm& gemm, const RowSet& rows, int64_t column, int64_t columns);
    Some take(int64_t calls) {
      const int64_t begin = count_ * call_ / calls;
      ++call_;
      return {lines_ + begin, count_ * call_ / calls - begin};
    }

   private:
    const void* lines_[gemm_rows * gemm_columns / 16];
    int64_t count_ = 0;
    int64_t call_ = 0;
  };

  // Calls work(column, columns, lines) when these columns of all rows, so many at most, were widened to the scratch.
  template <typename Work>
  void for_stripes(int64_t most, const RowSet& rows, const RowSet& next, int64_t begin, int64_t end, Work work) const {
    for (int64_t column = begin; column < end; column += most) {
      const int64_t columns = std::min(most, end - column);
      for (int64_t r = 0; r < rows.count; ++r)
        widen_(rows.rows[r], width_, column, column + columns, scratch_ + r * columns);
      Lines lines(*this, column + most < end ? rows : next, column + most < end ? column + most : begin, most);
      work(column, columns, lines);
    }
  }

  const GemmKernels& gemm_;
  const DotTile* const dot_;  // of one float32 row; then [T - 1]
  const WidenRow widen_;
  const int32_t dtype_;
  const int64_t width_;
  float* const scratch_;
};
