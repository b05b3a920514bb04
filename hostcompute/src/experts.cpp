// One FFN call with weights: a router has said which rows want which units. Every thread computes an equal part of
// the neurons of each unit that is wanted, for the rows that want it, into its own sums; those are then added.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "ffn.h"
#include "plan.h"

namespace {

constexpr int64_t parallel_reduce = 1 << 16;  // floats; below, waking the threads costs more than it saves
constexpr int64_t line_floats = 16;

int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

// The rows that want each unit, in shared scratch.
class Routing {
 public:
  Routing(Pool& pool, const FfnCall& call) : call_(call) {
    int64_t pairs = 0;
    for (int64_t row = 0; row < call.batch; ++row)
      for (int64_t c = 0; c < call.count; ++c) pairs += wants(row, c);
    Buffer& scratch = pool.shared_scratch();
    const int64_t words = 2 * (call.count + 1) + 2 * call.batch;
    scratch.reserve(words * sizeof(int64_t) + pairs * sizeof(Guest));
    int64_t* at = static_cast<int64_t*>(scratch.data());
    starts_ = at;
    wanted_ = at + call.count + 1;
    rows_ = wanted_ + call.count + 1;
    guests_ = reinterpret_cast<Guest*>(at + words);
    count();
    fill();
  }

  int64_t slots() const { return slots_; }           // rows that want something
  int64_t row(int64_t slot) const { return rows_[slot]; }
  int64_t units() const { return units_; }           // that are wanted
  int64_t position(int64_t unit) const { return wanted_[unit]; }  // in the call's list
  int64_t most_guests() const { return most_guests_; }
  int64_t count(int64_t position) const { return starts_[position + 1] - starts_[position]; }
  const Guest* guests(int64_t position) const { return guests_ + starts_[position]; }

 private:
  bool wants(int64_t row, int64_t c) const {  // not a number is a want: it shall show
    const int64_t at = row * call_.count + c;
    return call_.weights[at] != 0 && (call_.admit == nullptr || call_.admit[at] != 0);
  }

  // Where each unit's guests begin, one unit further on: `fill` moves it there.
  void count() {
    std::fill_n(starts_, call_.count + 1, 0);
    for (int64_t row = 0; row < call_.batch; ++row)
      for (int64_t c = 0; c < call_.count; ++c) starts_[c + 1] += wants(row, c);
    int64_t before = 0;
    for (int64_t c = 0; c < call_.count; ++c) {
      const int64_t guests = starts_[c + 1];
      if (guests > 0) wanted_[units_++] = c;
      most_guests_ = std::max(most_guests_, guests);
      starts_[c + 1] = before;
      before += guests;
    }
  }

  void fill() {
    for (int64_t row = 0; row < call_.batch; ++row) {
      bool any = false;
      for (int64_t c = 0; c < call_.count; ++c) {
        if (!wants(row, c)) continue;
        any = true;
        guests_[starts_[c + 1]++] = {static_cast<int32_t>(row), static_cast<int32_t>(slots_),
                                     call_.weights[row * call_.count + c]};
      }
      if (any) rows_[slots_++] = row;
    }
  }

  const FfnCall& call_;
  int64_t* starts_;  // [count + 1]
  int64_t* wanted_;  // [units]
  int64_t* rows_;    // [slots]
  Guest* guests_;
  int64_t slots_ = 0;
  int64_t units_ = 0;
  int64_t most_guests_ = 0;
};

class Experts {
 public:
  Experts(Pool& pool, const Kernels& kernels, const FfnCall& call)
      : pool_(pool), kernels_(kernels), call_(call), routing_(pool, call), d_(call.arena.width) {
    const int64_t floats = sum_floats() + count_floats() + value_floats(call.arena, kernels_, routing_.most_guests());
    for (int thread = 0; thread < pool.threads(); ++thread) pool.scratch(thread).reserve(floats * sizeof(float));
  }

  void run() {
    const int64_t marks = call_.batch * call_.count;
    if (call_.live != nullptr && marks > 0) std::memset(call_.live, 0, marks);
    if (call_.values != nullptr) std::fill_n(call_.values, marks, 0.0f);
    std::fill_n(call_.totals, call_.batch, 0);
    if (routing_.units() > 0)
      pool_.run([](void* context, int thread) { static_cast<Experts*>(context)->compute(thread); }, this);
    add_up();
    call_.totals[call_.batch] = rows_read_.load() * row_bytes(call_.arena);
  }

 private:
  // A thread's scratch: the sums [slots, D], the live neurons of each slot, then the values of one block.
  int64_t sum_floats() const { return round_up(routing_.slots() * d_, line_floats); }
  int64_t count_floats() const { return round_up(routing_.slots() * 2, line_floats); }
  float* sums(int thread) const { return static_cast<float*>(pool_.scratch(thread).data()); }
  int64_t* live(int thread) const { return reinterpret_cast<int64_t*>(sums(thread) + sum_floats()); }

  void compute(int thread) {
    float* y = sums(thread);
    std::memset(y, 0, (sum_floats() + count_floats()) * sizeof(float));
    int64_t rows_read = 0;
    Visit next = find(0, thread);
    for (int64_t unit = 0; unit < routing_.units(); ++unit) {
      Visit visit = next;
      next = find(unit + 1, thread);
      if (visit.begin == visit.end) continue;
      if (next.begin < next.end) visit.then = first_row(next);
      const Plan plan(call_, kernels_, visit);
      rows_read += ::compute(plan, 0, y, y + sum_floats() + count_floats());
    }
    rows_read_.fetch_add(rows_read, std::memory_order_relaxed);
  }

  // The parts of a unit go round: where there is a neuron for some threads only, it is not always the same ones'.
  Visit find(int64_t unit, int thread) const {
    if (unit >= routing_.units()) return {};
    const int64_t position = routing_.position(unit);
    const int64_t part = (unit + thread) % pool_.threads();
    const auto cut = [&](int64_t part) { return call_.arena.rows * part / pool_.threads(); };
    int64_t* counts = live(thread);
    return {position, cut(part), cut(part + 1), routing_.guests(position), routing_.count(position), counts, nullptr};
  }

  const char* first_row(const Visit& visit) const {
    return call_.unit(visit.position) + visit.begin * row_bytes(call_.arena);
  }

  // y = the threads' sums, added in the order of the threads; zero for the other rows.
  void add_up() {
    if (routing_.slots() * d_ * pool_.threads() < parallel_reduce) {
      add_rows(0, routing_.slots());
    } else {
      const auto task = [](void* context, int thread) {
        Experts& own = *static_cast<Experts*>(context);
        const int64_t slots = own.routing_.slots();
        own.add_rows(slots * thread / own.pool_.threads(), slots * (thread + 1) / own.pool_.threads());
      };
      pool_.run(task, this);
    }
    for (int64_t row = 0, slot = 0; row < call_.batch; ++row) {
      if (slot < routing_.slots() && routing_.row(slot) == row) {
        ++slot;
      } else {
        std::memset(call_.y + row * d_, 0, d_ * sizeof(float));
      }
    }
  }

  void add_rows(int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) {
      float* y = call_.y + routing_.row(slot) * d_;
      std::memcpy(y, sums(0) + slot * d_, d_ * sizeof(float));
      int64_t neurons = live(0)[slot];
      for (int thread = 1; thread < pool_.threads(); ++thread) {
        const float* from = sums(thread) + slot * d_;
        for (int64_t i = 0; i < d_; ++i) y[i] += from[i];
        neurons += live(thread)[slot];
      }
      call_.totals[routing_.row(slot)] = neurons;
    }
  }

  Pool& pool_;
  const Kernels& kernels_;
  const FfnCall& call_;
  const Routing routing_;
  const int64_t d_;
  std::atomic<int64_t> rows_read_{0};
};

}  // namespace

void experts(Pool& pool, const Kernels& kernels, const FfnCall& call) { Experts(pool, kernels, call).run(); }
