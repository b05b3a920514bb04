// One or two tokens: the weights come from memory once and everything else stays in the first cache, so what
// counts is that the memory is never idle. Rows are read one after the other; while one is read the next one comes in,
// of short rows a later one, and the pages of another are looked up. For that the order must be known ahead: the gates
// of a block are read before the other rows of the block before it, whose gates have said which those are. Where up
// has a say in it, the down rows wait for one block more.
#include <algorithm>
#include <utility>

#include "plan.h"

namespace {

constexpr int look_up_ahead = 12;  // rows
constexpr int most_known = 48;     // rows behind those of a turn
// How far ahead rows are fetched: bytes, at least one row, at most so many. Of packed rows more must be on their way.
constexpr int64_t fetch_ahead = 8192;
constexpr int most_ahead = 4;
constexpr int64_t packed_ahead = 14336;
constexpr int64_t short_bytes = 4096;  // packed rows that are shorter are read in pairs
constexpr int64_t page = 4096;
constexpr int64_t line = 64;
constexpr int64_t line_floats = line / sizeof(float);

struct Block {
  int64_t first;  // neuron
  int rows;
  const char* base[max_block];  // the part-0 row of each neuron
  int needed[max_block];        // the neurons whose next rows are needed
  int count;                    // of needed
  float* h;                     // [count, tokens] activation, then times up
};

// Rows in the order in which they are going to be read; null behind the last one.
class Order {
 public:
  void clear() { count_ = at_ = 0; }
  void add(const void* row) { rows_[count_++] = row; }
  void end() { std::fill_n(rows_ + count_, look_up_ahead + tile, nullptr); }
  const void* const* take(int n) { return rows_ + std::exchange(at_, at_ + n); }  // those, and behind them the next

 private:
  const void* rows_[3 * max_block + most_known + look_up_ahead + tile];
  int count_ = 0;
  int at_ = 0;
};

class Few {
 public:
  Few(const Plan& plan, float* y, float* values)
      : plan_(plan),
        d_(plan.call.arena.width),
        tokens_(static_cast<int>(plan.tokens)),
        pairs_(d_ > wide_columns || (is_packed(plan.call.arena.dtype) && plan.row_bytes() < short_bytes)),
        ahead_(find_ahead(plan)) {
    for (Block& block : blocks_) {
      block.h = values;
      values += max_block * tokens_;
    }
    for (int t = 0; t < tokens_; ++t) {
      x_[t] = plan.x(t);
      y_[t] = plan.y(y, t);
      if (reinterpret_cast<uintptr_t>(x_[t]) % line == 0) continue;
      std::copy_n(x_[t], d_, values);  // half of all loads would cross the border of two cache lines
      x_[t] = values;
      values += (d_ + line_floats - 1) / line_floats * line_floats;
    }
    if (tokens_ > 1 || plan.tiles.digits.make == nullptr) return;
    values += (-reinterpret_cast<uintptr_t>(values) & (line - 1)) / sizeof(float);
    plan.tiles.digits.make(x_[0], d_, values);
    x_[0] = values;
    digits_ = true;
    narrow_ = plan.row_bytes() < narrow_bytes;
  }

  int64_t compute(int thread) {
    int64_t rows_read = 0;
    Block* upcoming = &blocks_[0];
    Block* current = &blocks_[1];
    Block* previous = &blocks_[2];
    current->count = previous->count = 0;
    const int64_t end = plan_.blocks + plan_.threads * (plan_.up_decides() ? 2 : 1);
    for (int64_t block = thread; block < end; block += plan_.threads) {
      const Block& decided = plan_.up_decides() ? *previous : *current;
      find(block, upcoming);
      plan_order(*upcoming, *current, decided, block + plan_.threads);
      read_gates(upcoming);
      rows_read += upcoming->rows + (plan_.has_gate() ? current->count : 0) + decided.count;
      if (plan_.has_gate()) read_ups(current);
      read_downs(decided);
      std::swap(previous, current);
      std::swap(current, upcoming);
    }
    return rows_read;
  }

 private:
  static int find_ahead(const Plan& plan) {
    const int64_t bytes = plan.row_bytes();
    if (!is_packed(plan.call.arena.dtype))
      return static_cast<int>(std::clamp<int64_t>(fetch_ahead / bytes, 1, most_ahead));
    return static_cast<int>(std::clamp<int64_t>(packed_ahead / bytes + 1, 2, most_known - tile));
  }

  void find(int64_t index, Block* block) const {
    block->rows = plan_.find_rows(index, block->base);
    block->first = block->rows == 0 ? 0 : plan_.begin(index);
  }

  void plan_order(const Block& upcoming, const Block& current, const Block& decided, int64_t then) {
    order_.clear();
    for (int r = 0; r < upcoming.rows; ++r) order_.add(upcoming.base[r]);
    if (plan_.has_gate()) add_needed(current, 1);
    add_needed(decided, plan_.down());
    const char* gates[max_block];
    const int known = std::min(most_known, plan_.find_upcoming(then, gates));
    for (int r = 0; r < known; ++r) order_.add(gates[r]);
    order_.end();
  }

  void add_needed(const Block& block, int part) {
    for (int i = 0; i < block.count; ++i) order_.add(block.base[block.needed[i]] + plan_.part_place(part));
  }

  void read_gates(Block* block) {
    block->count = 0;
    const bool plain = tokens_ == 1 && plan_.plain();
    for (int first = 0, n; first < block->rows; first += n) {
      n = together(block->rows - first);
      dot(n, block->h + first * tokens_);
      if (!plain) activate(block, first, n);
    }
    if (!plain) return;
    const FfnCall& call = plan_.call;
    plan_.kernels.activate(block->h, block->rows, call.activation, call.threshold, plan_.live + block->first);
    for (int r = 0; r < block->rows; ++r) {
      const float value = block->h[r];
      block->h[block->count] = value;
      block->needed[block->count] = r;
      block->count += !plan_.skip || value != 0;
    }
  }

  // Of n gates from one on; those that are needed move to the front.
  void activate(Block* block, int first, int n) {
    for (int r = first; r < first + n; ++r) {
      const float* gates = block->h + r * tokens_;
      float* h = block->h + block->count * tokens_;
      bool needed = !plan_.skip;
      for (int t = 0; t < tokens_; ++t) {
        h[t] = plan_.activate(block->first + r, t, gates[t]);
        needed = needed || h[t] != 0;
      }
      if (needed) block->needed[block->count++] = r;
    }
  }

  void read_ups(Block* block) {
    const int ups = std::exchange(block->count, 0);
    for (int first = 0, n; first < ups; first += n) {
      n = together(ups - first);
      float up[tile * few_tokens];
      dot(n, up);
      for (int i = 0; i < n; ++i) {
        const float* gate = block->h + (first + i) * tokens_;
        float* h = block->h + block->count * tokens_;
        const int r = block->needed[first + i];
        bool needed = !plan_.up_decides();
        for (int t = 0; t < tokens_; ++t) {
          h[t] = plan_.times_up(block->first + r, t, gate[t], up[i * tokens_ + t]);
          needed = needed || h[t] != 0;
        }
        if (needed) block->needed[block->count++] = r;
      }
    }
  }

  void read_downs(const Block& block) {
    for (int first = 0, n; first < block.count; first += n) {
      n = together(block.count - first);
      const Step step = next_step(n);
      const float* h = block.h + first * tokens_;
      for (int i = 0; i < n; ++i)
        for (int t = 0; t < tokens_; ++t) plan_.tell(block.first + block.needed[first + i], t, h[i * tokens_ + t]);
      const AxpyTile kernel =
          n == pair ? plan_.tiles.pair_axpy[tokens_ - 1] : plan_.tiles.axpy[n == tile][tokens_ - 1];
      kernel(step.rows, h, d_, step.next, y_);
    }
  }

  // How many of the rows that are left one call of a kernel reads.
  int together(int left) const { return narrow_ && left >= tile ? tile : pairs_ && left >= pair ? pair : 1; }

  void dot(int n, float* out) {
    const Step step = next_step(n);
    const DotTile kernel = digits_  ? plan_.tiles.digits.dot_of(n)
                           : n == 1 ? plan_.tiles.dot[0][tokens_ - 1]
                                    : plan_.tiles.pair_dot[tokens_ - 1];
    kernel(step.rows, x_, d_, step.next, out);
  }

  struct Step {
    const void* const* rows;
    const void* const* next;  // as many to fetch meanwhile, or null
  };

  // Also starts the translation of later rows' addresses: an unknown page costs as much as a kilobyte.
  Step next_step(int n) {
    const void* const* rows = order_.take(n);
    for (int r = 0; r < n; ++r) {
      const char* later = static_cast<const char*>(rows[look_up_ahead + r]);
      if (later == nullptr) break;
      for (int64_t at = 0; at < plan_.row_bytes(); at += page) __builtin_prefetch(later + at);
      __builtin_prefetch(later + plan_.row_bytes() - 1);
    }
    return {rows, rows[ahead_ + n - 1] == nullptr ? nullptr : rows + ahead_};
  }

  const Plan& plan_;
  const int64_t d_;
  const int tokens_;
  const bool pairs_;
  const int ahead_;  // how many rows on the one is that is fetched
  bool digits_ = false;  // in place of a token
  bool narrow_ = false;  // rows, of which it then meets more than two at a time
  const float* x_[few_tokens];
  float* y_[few_tokens];
  Block blocks_[3];
  Order order_;
};

}  // namespace

int64_t compute_few(const Plan& plan, int thread, float* y, float* values) {
  return Few(plan, y, values).compute(thread);
}
