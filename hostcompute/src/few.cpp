// One or two tokens: the weights come from memory once and everything else stays in the first cache, so what
// counts is that the memory is never idle. Rows are read one after the other; while one is read the next one comes in,
// of short rows a later one, and the pages of another are looked up. For that the order must be known ahead: the gates
// of a block are read before the other rows of the block before it, whose gates have said which those are. Where up
// has a say in it, the down rows wait for one block more.
#include <algorithm>
#include <utility>

#include "plan.h"

namespace {

constexpr int look_up_ahead = 4;  // rows
constexpr int64_t fetch_ahead = 8192;  // bytes; at least one row
constexpr int64_t page = 4096;

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
  void add(const char* row) { rows_[count_++] = row; }
  void end() { std::fill_n(rows_ + count_, look_up_ahead, nullptr); }
  const char* const* take() { return rows_ + at_++; }  // [0]: the row, [1]: the one behind it, ...

 private:
  const char* rows_[3 * max_block + 2 * look_up_ahead];
  int count_ = 0;
  int at_ = 0;
};

class Few {
 public:
  Few(const Plan& plan, float* y, float* values)
      : plan_(plan),
        d_(plan.call.arena.width),
        tokens_(static_cast<int>(plan.tokens)),
        ahead_(static_cast<int>(std::clamp<int64_t>(fetch_ahead / plan.row_bytes(), 1, look_up_ahead))) {
    for (int t = 0; t < tokens_; ++t) {
      x_[t] = plan.x(t);
      y_[t] = plan.y(y, t);
    }
    for (Block& block : blocks_) {
      block.h = values;
      values += max_block * tokens_;
    }
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
    const int known = std::min(look_up_ahead, plan_.find_upcoming(then, gates));
    for (int r = 0; r < known; ++r) order_.add(gates[r]);
    order_.end();
  }

  void add_needed(const Block& block, int part) {
    for (int i = 0; i < block.count; ++i) order_.add(block.base[block.needed[i]] + plan_.part_place(part));
  }

  void read_gates(Block* block) {
    block->count = 0;
    for (int r = 0; r < block->rows; ++r) {
      float* h = block->h + block->count * tokens_;
      dot(h);
      bool needed = !plan_.skip;
      for (int t = 0; t < tokens_; ++t) {
        h[t] = plan_.activate(block->first + r, t, h[t]);
        needed = needed || h[t] != 0;
      }
      if (needed) block->needed[block->count++] = r;
    }
  }

  void read_ups(Block* block) {
    const int ups = std::exchange(block->count, 0);
    for (int i = 0; i < ups; ++i) {
      const float* gate = block->h + i * tokens_;
      float* h = block->h + block->count * tokens_;
      const int r = block->needed[i];
      float up[few_tokens];
      dot(up);
      bool needed = !plan_.up_decides();
      for (int t = 0; t < tokens_; ++t) {
        h[t] = plan_.times_up(block->first + r, t, gate[t], up[t]);
        needed = needed || h[t] != 0;
      }
      if (needed) block->needed[block->count++] = r;
    }
  }

  void read_downs(const Block& block) {
    for (int i = 0; i < block.count; ++i) {
      const Step step = next_step();
      const float* h = block.h + i * tokens_;
      for (int t = 0; t < tokens_; ++t) plan_.tell(block.first + block.needed[i], t, h[t]);
      plan_.tiles.axpy[0][tokens_ - 1](&step.row, h, d_, step.next(), y_);
    }
  }

  void dot(float* out) {
    const Step step = next_step();
    plan_.tiles.dot[0][tokens_ - 1](&step.row, x_, d_, step.next(), out);
  }

  struct Step {
    const void* row;
    const void* following;
    const void* const* next() const { return following == nullptr ? nullptr : &following; }
  };

  // Also starts the translation of a later row's addresses: an unknown page costs as much as a kilobyte.
  Step next_step() {
    const char* const* rows = order_.take();
    if (const char* later = rows[look_up_ahead]; later != nullptr) {
      for (int64_t at = 0; at < plan_.row_bytes(); at += page) __builtin_prefetch(later + at);
      __builtin_prefetch(later + plan_.row_bytes() - 1);
    }
    return {rows[0], rows[ahead_]};
  }

  const Plan& plan_;
  const int64_t d_;
  const int tokens_;
  const int ahead_;  // how many rows on the one is that is fetched
  const float* x_[few_tokens];
  float* y_[few_tokens];
  Block blocks_[3];
  Order order_;
};

}  // namespace

int64_t compute_few(const Plan& plan, int thread, float* y, float* values) {
  return Few(plan, y, values).compute(thread);
}
