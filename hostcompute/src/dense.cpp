// Many tokens: bound by arithmetic. The gates are multiplied for all tokens at once; where that leaves few pairs of a
// token and a neuron, up and down are computed for those alone. What is read next is fetched meanwhile.
#include <algorithm>
#include <numeric>

#include "gemm.h"
#include "plan.h"

namespace {

// Of all pairs of a token and a neuron so many are multiplied as fast as all are.
constexpr double crowd_of_dots = 0.3;
constexpr double crowd_of_sums = 0.4;

class Dense {
 public:
  Dense(const Plan& plan, float* y, float* values)
      : plan_(plan),
        d_(plan.call.arena.width),
        y_(y),
        h_(values),
        up_(values + max_block * plan.tokens),
        packed_(plan.kernels.gemm, plan.tokens, d_, values + 2 * max_block * plan.tokens),
        live_(plan.tokens, packed_.data(0, 0) + PackedTokens::floats(plan.tokens, d_)),
        gemm_(plan.kernels, plan.call.arena.dtype, d_,
              packed_.data(0, 0) + PackedTokens::floats(plan.tokens, d_) + SparseFactors::floats(plan.tokens)) {}

  static int64_t floats(int64_t width, int64_t tokens) {
    return 2 * max_block * tokens + PackedTokens::floats(tokens, width) + SparseFactors::floats(tokens) +
           Gemm::scratch_floats(tokens);
  }

  int64_t compute(int thread) {
    packed_.pack(0, packed_.pieces(), [&](int64_t t) { return plan_.x(t); });
    int64_t rows_read = 0;
    for (int64_t block = thread; block < plan_.blocks; block += plan_.threads) {
      rows_ = plan_.find_rows(block, base_);
      upcoming_ = plan_.find_upcoming(block + plan_.threads, upcoming_base_);
      first_ = plan_.begin(block);
      std::iota(index_, index_ + rows_, 0);
      rows_read += rows_;
      dots(0, h_);
      activate();
      if (plan_.skip) keep_needed();
      if (plan_.has_gate()) {
        rows_read += rows_;
        up_dots();
        multiply_by_up();
      }
      tell();
      if (plan_.up_decides()) keep_needed();
      rows_read += rows_;
      sums();
    }
    return rows_read;
  }

 private:
  void activate() {
    for (int64_t t = 0; t < plan_.tokens; ++t) {
      float* h = h_ + t * rows_;
      if (plan_.plain()) {
        plan_.kernels.activate(h, rows_, plan_.call.activation, plan_.call.threshold,
                               plan_.live + t * plan_.call.count + first_);
      } else {
        for (int r = 0; r < rows_; ++r) h[r] = plan_.activate(first_ + r, t, h[r]);
      }
    }
  }

  void multiply_by_up() {
    if (plan_.plain()) {
      for (int64_t i = 0; i < plan_.tokens * rows_; ++i) h_[i] = h_[i] == 0 ? 0 : h_[i] * up_[i];
      return;
    }
    for (int64_t t = 0; t < plan_.tokens; ++t) {
      for (int r = 0; r < rows_; ++r) {
        float& h = h_[t * rows_ + r];
        h = plan_.times_up(first_ + index_[r], t, h, up_[t * rows_ + r]);
      }
    }
  }

  void tell() const {
    if (plan_.call.values == nullptr) return;
    for (int64_t t = 0; t < plan_.tokens; ++t)
      for (int r = 0; r < rows_; ++r) plan_.tell(first_ + index_[r], t, h_[t * rows_ + r]);
  }

  // Leaves the block's neurons that some token needs.
  void keep_needed() {
    bool needed[max_block] = {};
    for (int64_t t = 0; t < plan_.tokens; ++t)
      for (int r = 0; r < rows_; ++r) needed[r] = needed[r] || h_[t * rows_ + r] != 0;
    int kept = 0;
    int from[max_block];
    for (int r = 0; r < rows_; ++r)
      if (needed[r]) from[kept++] = r;
    if (kept == rows_) return;
    for (int i = 0; i < kept; ++i) {
      base_[i] = base_[from[i]];
      index_[i] = index_[from[i]];
    }
    float* to = h_;
    for (int64_t t = 0; t < plan_.tokens; ++t)
      for (int i = 0; i < kept; ++i) *to++ = h_[t * rows_ + from[i]];
    rows_ = kept;
  }

  // Whether so few pairs of a token and a neuron are live that they are listed.
  bool list_live(double crowd) {
    const int64_t pairs = plan_.tokens * rows_;
    const bool few = static_cast<double>(pairs - std::count(h_, h_ + pairs, 0.0f)) < crowd * static_cast<double>(pairs);
    if (few) live_.find(h_, plan_.tokens, rows_);
    return few;
  }

  RowSet find_part(int part, const void** rows) const {
    for (int r = 0; r < rows_; ++r) rows[r] = base_[r] + plan_.part_place(part);
    return {rows, rows_};
  }

  // What is read behind a part of this block: the next part, or the gates of the next block.
  RowSet find_next(int part, const void** rows) const {
    if (part < plan_.down()) return find_part(part + 1, rows);
    std::copy_n(upcoming_base_, upcoming_, rows);
    return {rows, upcoming_};
  }

  // result[t * rows_ + r] = x[t] . row r, for all tokens and all neurons of the block.
  void dots(int part, float* result) const {
    const void* rows[gemm_rows];
    const void* next[gemm_rows];
    gemm_.dots(packed_, find_part(part, rows), find_next(part, next), result, rows_);
  }

  // up_ = x[t] . up, at least where h_ is not zero.
  void up_dots() {
    if (!plan_.skip || !list_live(crowd_of_dots)) return dots(1, up_);
    const void* rows[gemm_rows];
    const void* next[gemm_rows];
    gemm_.sparse_dots(live_, plan_.tokens, find_part(1, rows), find_next(1, next),
                      [&](int64_t t) { return plan_.x(t); }, up_, rows_);
  }

  void sums() {
    const void* rows[gemm_rows];
    const void* next[gemm_rows];
    const RowSet now = find_part(plan_.down(), rows);
    const RowSet then = find_next(plan_.down(), next);
    const auto y = [&](int64_t t) { return plan_.y(y_, t); };
    if (list_live(crowd_of_sums)) {
      gemm_.sparse_sums(live_, plan_.tokens, now, then, y);
    } else {
      gemm_.sums({h_, rows_, 1}, plan_.tokens, now, then, 0, d_, y);
    }
  }

  const Plan& plan_;
  const int64_t d_;
  float* const y_;
  float* const h_;   // [tokens, rows_]: gate, then its activation, then times up
  float* const up_;  // [tokens, rows_]
  const PackedTokens packed_;
  SparseFactors live_;
  const Gemm gemm_;
  const char* base_[max_block];
  int index_[max_block];                  // of these neurons in the block
  const char* upcoming_base_[max_block];  // gates of the block that is read next
  int64_t first_ = 0;                     // neuron of the block
  int rows_ = 0;
  int upcoming_ = 0;
};

}  // namespace

int64_t dense_floats(int64_t width, int64_t tokens) { return Dense::floats(width, tokens); }

int64_t compute_dense(const Plan& plan, int thread, float* y, float* values) {
  return Dense(plan, y, values).compute(thread);
}
