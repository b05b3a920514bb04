// Products with whole matrices: their rows lie one behind the other, and all are wanted. Cut into pieces whose sizes
// depend on the call alone; the threads take one piece after the other, so that one that wakes up late holds up nobody.
//
// One or two tokens are bound by memory: rows are read one at a time while the next one comes in, short ones several.
// For some more, so are tiles of rows and tokens, and the weights still come from memory once. For many, a piece is
// widened to float32 once and used for all tokens while it is in a cache.
#include <algorithm>
#include <atomic>

#include "gemm.h"
#include "matmul.h"

namespace {

constexpr int bound_tokens = pair;  // by memory
// A piece for few tokens: an equal share of all rows, within limits, so that threads end together.
constexpr int64_t shares = 16;
constexpr int64_t least_piece_bytes = 8 * 1024;
constexpr int64_t most_piece_bytes = 1024 * 1024;
constexpr int64_t pairs_ahead = 3;  // where rows are read in pairs, so many are on their way
constexpr int64_t bytes_ahead = 14 * 1024;  // of rows that are narrow, or multiplied in integers

class DotRows {
 public:
  DotRows(Pool& pool, const Kernels& kernels, const MatmulCall& call)
      : pool_(pool),
        call_(call),
        kernels_(kernels),
        tiles_(kernels.tiles[call.dtype]),
        row_bytes_(row_bytes(call.dtype, call.width)),
        few_(call.tokens <= few_rows_of_x),
        digits_(call.tokens == 1 && tiles_.digits.make != nullptr),
        size_(few_ ? few_size() : gemm_rows),
        packed_(kernels.gemm, call.tokens, call.width, find_shared()) {}

  void run() {
    for (int thread = 0; thread < pool_.threads(); ++thread)
      pool_.scratch(thread).reserve(scratch_floats() * sizeof(float));
    if (!few_) pack();
    const auto task = [](void* context, int thread) { static_cast<DotRows*>(context)->work(thread); };
    if (rows() * call_.width * call_.tokens <= alone) {
      task(this, 0);
    } else {
      pool_.run(task, this);
    }
  }

 private:
  int64_t rows() const {
    int64_t rows = 0;
    for (int64_t i = 0; i < call_.count; ++i) rows += call_.matrices[i].rows;
    return rows;
  }

  // Whole tiles of rows, so that what is computed together does not depend on it.
  int64_t few_size() const {
    const int64_t bytes = std::clamp(rows() * row_bytes_ / shares, least_piece_bytes, most_piece_bytes);
    return ceil_div(bytes, row_bytes_ * tile) * tile;
  }

  // Floats that a thread needs.
  int64_t scratch_floats() const {
    if (few_) return digits_ ? tiles_.digits.floats(call_.width) : 0;
    return Gemm::scratch_floats(call_.tokens);
  }

  // Room for packed tokens, which all threads share.
  float* find_shared() const {
    if (!few_) pool_.shared_scratch().reserve(PackedTokens::floats(call_.tokens, call_.width) * sizeof(float));
    return static_cast<float*>(pool_.shared_scratch().data());
  }

  void pack() {
    const auto task = [](void* context, int thread) {
      const DotRows& self = *static_cast<DotRows*>(context);
      const int64_t pieces = self.packed_.pieces();
      const int threads = self.pool_.threads();
      self.packed_.pack(pieces * thread / threads, pieces * (thread + 1) / threads,
                        [&](int64_t t) { return self.call_.x + t * self.call_.width; });
    };
    pool_.run(task, this);
  }

  void work(int thread) {
    float* scratch = static_cast<float*>(pool_.scratch(thread).data());
    bool made = !digits_;
    int64_t first = 0;  // piece of the matrix
    const hc_matrix* matrix = call_.matrices;
    for (int64_t piece = taken_.fetch_add(1);; piece = taken_.fetch_add(1)) {
      for (; piece - first >= ceil_div(matrix->rows, size_); ++matrix) {
        first += ceil_div(matrix->rows, size_);
        if (matrix + 1 == call_.matrices + call_.count) return;
      }
      if (!made) tiles_.digits.make(call_.x, call_.width, scratch);
      made = true;
      const int64_t begin = (piece - first) * size_;
      const int64_t end = std::min(matrix->rows, begin + size_);
      few_ ? few(*matrix, begin, end, scratch) : many(*matrix, begin, end, scratch);
    }
  }

  const char* row(const hc_matrix& matrix, int64_t r) const {
    return static_cast<const char*>(matrix.weights) + r * row_bytes_;
  }

  bool narrow() const { return is_packed(call_.dtype) && row_bytes_ < (digits_ ? narrow_bytes : narrow_bytes / 2); }

  // How many rows one call of a kernel reads.
  int together() const {
    if (call_.tokens > bound_tokens || narrow()) return tile;
    return is_packed(call_.dtype) || call_.width > wide_columns ? pair : 1;
  }
  DotTile kernel_for(int rows, int64_t tokens) const {
    if (digits_) return tiles_.digits.dot_of(rows);
    return rows == pair ? tiles_.pair_dot[tokens - 1] : tiles_.dot[rows != 1][tokens - 1];
  }
  // How many rows on the one is that is fetched while one of n is read.
  int64_t rows_ahead(int n) const {
    if (digits_ || (narrow() && call_.tokens <= bound_tokens))
      return n * std::max<int64_t>(1, bytes_ahead / (n * row_bytes_));
    return n == pair ? n * pairs_ahead : n;
  }

  // Single rows lie one behind the other, which the CPU sees by itself: fetching them too only holds it up.
  void few(const hc_matrix& matrix, int64_t begin, int64_t end, const float* digits) const {
    const float* x[few_rows_of_x];
    for (int64_t t = 0; t < call_.tokens; ++t) x[t] = digits_ ? digits : call_.x + t * call_.width;
    for (int64_t r = begin; r < end;) {
      const int n = end - r >= together() ? together() : 1;
      const int64_t ahead = rows_ahead(n);
      const void* now[tile];
      const void* next[tile];
      for (int i = 0; i < n; ++i) {
        now[i] = row(matrix, r + i);
        next[i] = row(matrix, r + ahead + i);
      }
      const bool fetch = n != 1 && r + ahead + n <= matrix.rows;
      for (int64_t t0 = 0; t0 < call_.tokens; t0 += tile) {
        const int64_t some = std::min<int64_t>(tile, call_.tokens - t0);
        float out[tile * tile];
        kernel_for(n, some)(now, x + t0, call_.width, fetch && t0 == 0 ? next : nullptr, out);
        for (int64_t t = 0; t < some; ++t)
          for (int i = 0; i < n; ++i) matrix.y[(t0 + t) * matrix.rows + r + i] = out[i * some + t];
      }
      r += n;
    }
  }

  RowSet find_rows(const hc_matrix& matrix, int64_t begin, const void** rows) const {
    const int64_t count = std::clamp<int64_t>(matrix.rows - begin, 0, gemm_rows);
    for (int64_t r = 0; r < count; ++r) rows[r] = row(matrix, begin + r);
    return {rows, count};
  }

  void many(const hc_matrix& matrix, int64_t begin, int64_t end, float* scratch) const {
    const void* rows[gemm_rows];
    const void* next[gemm_rows];
    Gemm(kernels_, call_.dtype, call_.width, scratch)
        .dots(packed_, find_rows(matrix, begin, rows), find_rows(matrix, end, next), matrix.y + begin, matrix.rows);
  }

  Pool& pool_;
  const MatmulCall& call_;
  const Kernels& kernels_;
  const Tiles& tiles_;
  const int64_t row_bytes_;
  const bool few_;
  const bool digits_;   // of the token, which each thread makes for itself
  const int64_t size_;  // rows of a piece
  const PackedTokens packed_;
  std::atomic<int64_t> taken_{0};
};

}  // namespace

void dot_rows(Pool& pool, const Kernels& kernels, const MatmulCall& call) {
  if (call.tokens == 0 || call.count == 0) return;
  if (call.width > 0) return DotRows(pool, kernels, call).run();
  for (const hc_matrix* matrix = call.matrices; matrix < call.matrices + call.count; ++matrix)
    std::fill_n(matrix->y, call.tokens * matrix->rows, 0.0f);
}
