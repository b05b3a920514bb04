// Panels of rows, which the threads take one after the other, times a few tokens at once.
#include "lowbit.h"

#include <algorithm>
#include <atomic>
#include <numeric>

namespace {

constexpr int64_t tokens_at_once = 4;  // whose tables are there at the same time
constexpr int64_t alone = 1 << 18;     // products; fewer are computed before another thread has woken up

// The tables of one group, see `prepared_floats`.
template <int Bits>
void make_tables(const float* elements, float* table) {
  constexpr int levels = 1 << Bits;
  constexpr int together = 4 / Bits;  // elements
  constexpr int bytes = 4 * Bits;
  for (int q = 0; q < 2 * bytes; ++q, table += table_floats) {
    const float* first = elements + q / 2 + q % 2 * together * bytes;
    table[0] = 0;
    for (int i = 0; i < together; ++i) table[0] -= 0.5f * (levels - 1) * first[i * bytes];
    for (int i = 0, size = 1; i < together; ++i, size *= levels)
      for (int level = 1; level < levels; ++level)
        for (int low = 0; low < size; ++low) table[level * size + low] = table[low] + level * first[i * bytes];
  }
}

class Lowbit {
 public:
  Lowbit(Pool& pool, const Kernels& kernels, const LowbitCall& call)
      : pool_(pool),
        call_(call),
        kernels_(kernels.lowbit[call.bits == 1 ? 0 : call.bits == 2 ? 1 : call.bits == 4 ? 2 : 3]),
        token_floats_(call.groups * prepared_floats(call.bits)),
        panel_rows_(panel_rows(call.bits)),
        panels_((call.rows + panel_rows_ - 1) / panel_rows_) {}

  void run() {
    const int64_t together = std::min(tokens_at_once, call_.tokens);
    pool_.shared_scratch().reserve(together * token_floats_ * sizeof(float));
    prepared_ = static_cast<float*>(pool_.shared_scratch().data());
    const bool shared = panels_ > 1 && call_.rows * call_.groups * group_columns > alone;
    for (first_ = 0; first_ < call_.tokens; first_ += together) {
      tokens_ = std::min(together, call_.tokens - first_);
      taken_.store(0);
      if (shared) {
        pool_.run([](void* job, int thread) { static_cast<Lowbit*>(job)->prepare(thread); }, this);
        pool_.run([](void* job, int) { static_cast<Lowbit*>(job)->work(); }, this);
      } else {
        prepare_groups(0, call_.groups);
        work();
      }
    }
  }

 private:
  void prepare(int thread) const {
    const int64_t threads = pool_.threads();
    prepare_groups(call_.groups * thread / threads, call_.groups * (thread + 1) / threads);
  }

  void prepare_groups(int64_t begin, int64_t end) const {
    for (int64_t t = 0; t < tokens_; ++t) {
      const float* x = call_.x + (first_ + t) * call_.width;
      for (int64_t group = begin; group < end; ++group) {
        float elements[group_columns] = {};
        const int64_t column = group * group_columns;
        if (column < call_.width)
          std::copy_n(x + column, std::min<int64_t>(group_columns, call_.width - column), elements);
        prepare_group(elements, group, prepared_ + t * token_floats_);
      }
    }
  }

  void prepare_group(const float* elements, int64_t group, float* to) const {
    if (call_.bits == 1) return make_tables<1>(elements, to + group * prepared_floats(1));
    if (call_.bits == 2) return make_tables<2>(elements, to + group * prepared_floats(2));
    std::copy_n(elements, group_columns, to + group * group_columns);
    const float half = 0.5f * static_cast<float>((1 << call_.bits) - 1);
    to[call_.groups * group_columns + group] = -half * std::accumulate(elements, elements + group_columns, 0.0f);
  }

  const uint8_t* codes(int64_t panel) const {
    return call_.codes + panel * panel_rows_ * call_.groups * 4 * call_.bits;
  }
  const uint16_t* scales(int64_t panel) const { return call_.scales + panel * panel_rows_ * call_.groups; }
  int64_t rows(int64_t panel) const { return std::min(panel_rows_, call_.rows - panel * panel_rows_); }

  void work() {
    int64_t upcoming = taken_.fetch_add(1);
    while (upcoming < panels_) {
      const int64_t panel = upcoming;
      upcoming = taken_.fetch_add(1);  // ahead, so that it can be fetched
      const bool fetch = upcoming < panels_ && rows(upcoming) == panel_rows_;
      for (int64_t t = 0; t < tokens_; t += panel_tokens) {
        const int64_t tokens = std::min<int64_t>(panel_tokens, tokens_ - t);
        const float* x[panel_tokens];
        float* y[panel_tokens];
        for (int64_t i = 0; i < tokens; ++i) {
          x[i] = prepared_ + (t + i) * token_floats_;
          y[i] = call_.y + (first_ + t + i) * call_.rows + panel * panel_rows_;
        }
        const bool now = fetch && t == 0;
        kernels_[tokens - 1]({codes(panel), scales(panel), rows(panel), call_.groups, x, y,
                              now ? codes(upcoming) : nullptr, now ? scales(upcoming) : nullptr});
      }
    }
  }

  Pool& pool_;
  const LowbitCall& call_;
  const LowbitPanel* const kernels_;
  const int64_t token_floats_;
  const int64_t panel_rows_;
  const int64_t panels_;
  float* prepared_ = nullptr;  // [tokens_, groups, prepared_floats]
  int64_t first_ = 0;          // token
  int64_t tokens_ = 0;         // from first_ on
  std::atomic<int64_t> taken_{0};
};

}  // namespace

void lowbit(Pool& pool, const Kernels& kernels, const LowbitCall& call) {
  if (call.rows == 0 || call.tokens == 0) return;
  if (call.groups == 0) {
    std::fill_n(call.y, call.tokens * call.rows, 0.0f);
    return;
  }
  Lowbit(pool, kernels, call).run();
}
