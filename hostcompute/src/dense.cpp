// Many tokens of which every neuron is computed: bound by arithmetic. What is read next is fetched meanwhile.
#include <algorithm>

#include "gemm.h"
#include "plan.h"

namespace {

class Dense {
 public:
  Dense(const Plan& plan, float* y, float* values)
      : plan_(plan),
        d_(plan.call.arena.width),
        y_(y),
        h_(values),
        up_(values + max_block * plan.tokens),
        packed_(plan.kernels.gemm, plan.tokens, d_, values + 2 * max_block * plan.tokens),
        gemm_(plan.kernels, plan.call.arena.dtype, d_, packed_.data(0, 0) + PackedTokens::floats(plan.tokens, d_)) {}

  static int64_t floats(int64_t width, int64_t tokens) {
    return 2 * max_block * tokens + PackedTokens::floats(tokens, width) + Gemm::scratch_floats(tokens);
  }

  int64_t compute(int thread) {
    packed_.pack(0, packed_.pieces(), [&](int64_t t) { return plan_.x(t); });
    int64_t rows_read = 0;
    for (int64_t block = thread; block < plan_.blocks; block += plan_.threads) {
      rows_ = plan_.find_rows(block, base_);
      upcoming_ = plan_.find_upcoming(block + plan_.threads, upcoming_base_);
      first_ = plan_.begin(block);
      dots(0, h_);
      activate();
      if (plan_.has_gate()) {
        dots(1, up_);
        multiply_by_up();
      }
      sums();
      rows_read += static_cast<int64_t>(plan_.call.arena.parts) * rows_;
    }
    return rows_read;
  }

 private:
  void activate() {
    if (plan_.plain()) {
      for (int64_t t = 0; t < plan_.tokens; ++t)
        plan_.kernels.activate(h_ + t * rows_, rows_, plan_.call.activation, plan_.call.threshold,
                               plan_.live + t * plan_.call.count + first_);
      if (!plan_.has_gate()) tell();
      return;
    }
    for (int64_t t = 0; t < plan_.tokens; ++t)
      for (int r = 0; r < rows_; ++r) h_[t * rows_ + r] = plan_.activate(first_ + r, t, h_[t * rows_ + r]);
    if (!plan_.has_gate()) tell();
  }

  void multiply_by_up() {
    if (plan_.plain()) {
      for (int64_t i = 0; i < plan_.tokens * rows_; ++i) h_[i] = h_[i] == 0 ? 0 : h_[i] * up_[i];
      tell();
      return;
    }
    for (int64_t t = 0; t < plan_.tokens; ++t) {
      for (int r = 0; r < rows_; ++r) {
        float& h = h_[t * rows_ + r];
        h = plan_.times_up(first_ + r, t, h, up_[t * rows_ + r]);
      }
    }
    tell();
  }

  void tell() const {
    if (plan_.call.values == nullptr) return;
    for (int64_t t = 0; t < plan_.tokens; ++t)
      for (int r = 0; r < rows_; ++r) plan_.tell(first_ + r, t, h_[t * rows_ + r]);
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

  void sums() const {
    const void* rows[gemm_rows];
    const void* next[gemm_rows];
    gemm_.sums({h_, rows_, 1}, plan_.tokens, find_part(plan_.down(), rows), find_next(plan_.down(), next), 0, d_,
               [&](int64_t t) { return plan_.y(y_, t); });
  }

  const Plan& plan_;
  const int64_t d_;
  float* const y_;
  float* const h_;   // [tokens, rows_]: gate, then its activation, then times up
  float* const up_;  // [tokens, rows_]
  const PackedTokens packed_;
  const Gemm gemm_;
  const char* base_[max_block];
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
