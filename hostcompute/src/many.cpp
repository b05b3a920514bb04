// From three to many_tokens: bound by arithmetic sooner or later. A block of rows is used for all tokens while it
// is in a cache: in tiles of rows and tokens where all is computed, token by token where zeros are skipped, unless
// they are too few for that.
#include <algorithm>
#include <numeric>

#include "plan.h"

namespace {

// Of a tile's products, so large a share must be wanted for the others to cost nothing.
constexpr double crowd = 0.3;

class Many {
 public:
  Many(const Plan& plan, float* y, float* values)
      : plan_(plan),
        d_(plan.call.arena.width),
        y_(y),
        h_(values),
        up_(values + max_block * plan.tokens) {
    std::iota(all_, all_ + max_block, 0);
  }

  int64_t compute(int thread) {
    int64_t rows_read = 0;
    for (int64_t block = thread; block < plan_.blocks; block += plan_.threads) {
      rows_ = plan_.find_rows(block, base_);
      dots(0, all_, rows_, h_);
      first_ = plan_.begin(block);
      for (int64_t t = 0; t < plan_.tokens; ++t)
        for (int r = 0; r < rows_; ++r) h_[t * rows_ + r] = plan_.activate(first_ + r, t, h_[t * rows_ + r]);
      rows_read += rows_ + (plan_.skip ? skipping() : everything(all_, rows_));
      tell();
    }
    return rows_read;
  }

 private:
  void tell() const {
    if (plan_.call.values == nullptr) return;
    for (int64_t t = 0; t < plan_.tokens; ++t)
      for (int r = 0; r < rows_; ++r) plan_.tell(first_ + r, t, h_[t * rows_ + r]);
  }

  // Calls kernel(r, n, rows, next) for the listed neurons from r on, n = `tile` or 1 of them at a time.
  template <typename Kernel>
  void for_groups(const int* list, int count, int part, Kernel kernel) const {
    const void* rows[max_block + tile];
    for (int i = 0; i < count; ++i) rows[i] = base_[list[i]] + plan_.part_place(part);
    for (int i = 0; i < count;) {
      const int n = count - i >= tile ? tile : 1;
      kernel(i, n, rows + i, i + 2 * n <= count ? rows + i + n : nullptr);
      i += n;
    }
  }

  // result[t * rows_ + r] = x[t] . row r, for all tokens and the listed neurons of the block.
  void dots(int part, const int* list, int count, float* result) const {
    for (int64_t t0 = 0; t0 < plan_.tokens; t0 += tile) {
      const int tokens = static_cast<int>(std::min<int64_t>(tile, plan_.tokens - t0));
      const float* x[tile];
      for (int t = 0; t < tokens; ++t) x[t] = plan_.x(t0 + t);
      for_groups(list, count, part, [&](int i, int n, const void* const* rows, const void* const* next) {
        float out[tile * tile];
        plan_.tiles.dot[n != 1][tokens - 1](rows, x, d_, t0 == 0 ? next : nullptr, out);
        for (int r = 0; r < n; ++r)
          for (int t = 0; t < tokens; ++t) result[(t0 + t) * rows_ + list[i + r]] = out[r * tokens + t];
      });
    }
  }

  // The listed neurons for all tokens; returns how many rows that takes.
  int64_t everything(const int* list, int count) {
    int64_t rows_read = 0;
    int needed[max_block];
    if (plan_.has_gate()) {
      dots(1, list, count, up_);
      for (int64_t t = 0; t < plan_.tokens; ++t)
        for (int i = 0; i < count; ++i) times_up(t, list[i], up_[t * rows_ + list[i]]);
      rows_read += count;
      if (plan_.up_decides()) {
        count = find_needed(needed);
        list = needed;
      }
    }
    for (int64_t t0 = 0; t0 < plan_.tokens; t0 += tile) {
      const int tokens = static_cast<int>(std::min<int64_t>(tile, plan_.tokens - t0));
      float* y[tile];
      for (int t = 0; t < tokens; ++t) y[t] = plan_.y(y_, t0 + t);
      for_groups(list, count, plan_.down(), [&](int i, int n, const void* const* rows, const void* const* next) {
        float h[tile * tile];
        for (int r = 0; r < n; ++r)
          for (int t = 0; t < tokens; ++t) h[r * tokens + t] = h_[(t0 + t) * rows_ + list[i + r]];
        plan_.tiles.axpy[n != 1][tokens - 1](rows, h, d_, t0 == 0 ? next : nullptr, y);
      });
    }
    return rows_read + count;
  }

  // Up for all tokens, then down for all: two parts of a block fit into a cache, three may not.
  int64_t skipping() {
    int needed[max_block];
    const int with_gate = find_needed(needed);
    if (plan_.routed() && live_pairs() > crowd * plan_.tokens * rows_) return everything(needed, with_gate);
    for (int64_t t = 0; plan_.has_gate() && t < plan_.tokens; ++t) {
      int list[max_block];
      multiply_by_up(t, list, find_live(t, list));
    }
    const int with_up = plan_.up_decides() ? find_needed(needed) : with_gate;
    for (int64_t t = 0; t < plan_.tokens; ++t) {
      int list[max_block];
      add_down(t, list, find_live(t, list));
    }
    return (plan_.has_gate() ? with_gate : 0) + with_up;
  }

  int64_t live_pairs() const {
    return plan_.tokens * rows_ - std::count(h_, h_ + plan_.tokens * rows_, 0.0f);
  }

  // Lists the neurons of the block that some token needs.
  int find_needed(int* list) const {
    bool needed[max_block] = {};
    for (int64_t t = 0; t < plan_.tokens; ++t)
      for (int r = 0; r < rows_; ++r) needed[r] = needed[r] || h_[t * rows_ + r] != 0;
    int count = 0;
    for (int r = 0; r < rows_; ++r)
      if (needed[r]) list[count++] = r;
    return count;
  }

  void times_up(int64_t t, int r, float up) {
    float& h = h_[t * rows_ + r];
    h = plan_.times_up(first_ + r, t, h, up);
  }

  int find_live(int64_t t, int* list) const {
    int live = 0;
    for (int r = 0; r < rows_; ++r)
      if (h_[t * rows_ + r] != 0) list[live++] = r;
    return live;
  }

  void multiply_by_up(int64_t t, const int* list, int live) {
    const float* x = plan_.x(t);
    for_groups(list, live, 1, [&](int i, int n, const void* const* rows, const void* const* next) {
      float up[tile];
      plan_.tiles.dot[n != 1][0](rows, &x, d_, next, up);
      for (int r = 0; r < n; ++r) times_up(t, list[i + r], up[r]);
    });
  }

  void add_down(int64_t t, const int* list, int live) {
    float* y = plan_.y(y_, t);
    for_groups(list, live, plan_.down(), [&](int i, int n, const void* const* rows, const void* const* next) {
      float h[tile];
      for (int r = 0; r < n; ++r) h[r] = h_[t * rows_ + list[i + r]];
      plan_.tiles.axpy[n != 1][0](rows, h, d_, next, &y);
    });
  }

  const Plan& plan_;
  const int64_t d_;
  float* y_;
  float* h_;   // [tokens, rows_]: gate, then its activation, then times up
  float* up_;  // [tokens, rows_]
  const char* base_[max_block];
  int all_[max_block];  // 0, 1, 2, ...
  int64_t first_ = 0;    // neuron of the block
  int rows_ = 0;
};

}  // namespace

int64_t compute_many(const Plan& plan, int thread, float* y, float* values) {
  return Many(plan, y, values).compute(thread);
}
