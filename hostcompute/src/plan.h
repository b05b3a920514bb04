// How the neurons of one FFN call are shared out, and where their rows lie.
//
// Without weights the inner rows of all units form one list of `count * rows` neurons. It is cut into blocks of nearly
// equal size, and block b belongs to thread b mod threads. With weights a plan is made for each unit that some row
// wants, and for each thread, see experts.cpp; all of its blocks belong to that thread. Every thread sums into its own
// rows of y. All this depends on nothing but the call and the number of threads, so equal calls give equal bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "api.h"
#include "ffn.h"
#include "kernels.h"

constexpr int max_block = 128;  // neurons
constexpr int few_tokens = 2;  // from more on, x and y no longer fit into the first cache beside the weights
constexpr int many_tokens = 16;  // with more, arithmetic takes as long as reading the weights, and longer

// What a thread needs for a block beside its sums: three values of each neuron and token, and copies of x; or what
// compute_dense wants.
int64_t value_floats(const hc_arena& arena, const Kernels& kernels, int64_t tokens);

// A row of x that wants a unit.
struct Guest {
  int32_t row;   // of x
  int32_t slot;  // its row in the threads' sums
  float weight;
};

// Some neurons of one unit, and the rows they are computed for.
struct Visit {
  int64_t position;  // of the unit in the call's list
  int64_t begin;     // the neurons, counted in the unit
  int64_t end;
  const Guest* guests;
  int64_t count;     // of guests
  int64_t* live;     // of each slot: its live neurons are added up there
  const char* then;  // the row that is read behind the last one, or null
};

// The positions in a call's list of those units that some row admits; null: all of them count.
struct Admitted {
  const int32_t* positions;
  int64_t count;
};

class Plan {
 public:
  Plan(const FfnCall& call, const Kernels& kernels, int threads, uint8_t* live, const Admitted& admitted);
  Plan(const FfnCall& call, const Kernels& kernels, const Visit& visit);  // keeps a pointer to the visit

  const FfnCall& call;
  const Tiles& tiles;
  const Kernels& kernels;
  const int threads;
  const int64_t tokens;
  uint8_t* const live;  // [batch, count], zeroed; with a visit it may be null
  int64_t blocks;
  bool skip;  // look for zeros at all

  int down() const { return static_cast<int>(call.arena.parts) - 1; }
  bool has_gate() const { return call.arena.parts == 3; }

  const float* x(int64_t token) const { return call.x + row(token) * call.arena.width; }
  float* y(float* sums, int64_t token) const {
    return sums + (visit_ == nullptr ? token : visit_->guests[token].slot) * call.arena.width;
  }

  int64_t begin(int64_t block) const { return place(block) * neurons_ / blocks; }  // its first neuron

  // Finds the part-0 row of each neuron of a block; returns how many there are. Part p lies part_place(p) bytes on.
  int find_rows(int64_t block, const char** rows) const;
  // The same, and behind the last block the rows that are read then, as far as they are known.
  int find_upcoming(int64_t block, const char** rows) const;
  int64_t part_place(int part) const { return part == 0 ? 0 : call.arena.places[part - 1]; }
  int64_t row_bytes() const { return row_bytes_; }

  bool routed() const { return visit_ != nullptr; }  // all tokens want all neurons
  bool dense() const { return tokens > many_tokens; }
  bool up_decides() const { return skip && call.activation == drelu; }  // which down rows are needed

  // Whether every token wants every neuron as it is: marks lie side by side, and nothing is weighted or left out.
  bool plain() const {
    return visit_ == nullptr && call.admit == nullptr && call.arena.rows == 1 && call.activation != drelu;
  }

  // The activation of a neuron's gate for a token, zero where the token does not admit the neuron's unit; the unit is
  // marked live if it is not zero. With dReLU that is left to `times_up`. Without a gate it is weighted.
  float activate(int64_t neuron, int64_t token, float gate) const {
    if (visit_ == nullptr && call.admit != nullptr && call.admit[mark_of(neuron, token)] == 0) return 0;
    float value;  // the comparisons let a NaN through, so that a numerical failure shows
    switch (call.activation) {
      case relu:
      case drelu:
        value = gate <= 0 ? 0 : gate;
        break;
      case fatrelu:
        value = gate < call.threshold ? 0 : gate;
        break;
      default:
        uint8_t alive;
        value = gate;
        kernels.activate(&value, 1, call.activation, call.threshold, &alive);  // the bits of many at once
    }
    if (value != 0 && call.activation != drelu) mark(neuron, token);
    return visit_ == nullptr || has_gate() ? value : weighted(token, value);
  }

  // What `activate` gave, times up, which dReLU activates too, and weighted. Zero stays zero, whatever up is.
  float times_up(int64_t neuron, int64_t token, float value, float up) const {
    if (value == 0) return 0;
    if (call.activation == drelu) {
      value *= up <= 0 ? 0 : up;
      if (value != 0) mark(neuron, token);
    } else {
      value *= up;
    }
    return visit_ == nullptr ? value : weighted(token, value);
  }

  // Tells the caller, if it asked, what the neuron's down row is multiplied with; zero needs no telling.
  void tell(int64_t neuron, int64_t token, float value) const {
    if (call.values != nullptr) call.values[mark_of(neuron, token)] = value;
  }

 private:
  // A thread's blocks lie one behind the other, because the memory gives more to long streams.
  int64_t place(int64_t block) const { return block % threads * (blocks / threads) + block / threads; }

  // Without a visit: which of the units a neuron belongs to, and the position of that unit in the call's list.
  int64_t unit_of(int64_t neuron) const {
    return call.arena.rows == 1 ? neuron : neuron / call.arena.rows;  // a division takes a while
  }
  int64_t position(int64_t unit) const { return admitted_ == nullptr ? unit : admitted_[unit]; }

  int64_t row(int64_t token) const { return visit_ == nullptr ? token : visit_->guests[token].row; }

  // Zero counts for nothing, even times an infinite weight.
  float weighted(int64_t token, float value) const { return value == 0 ? 0 : value * visit_->guests[token].weight; }

  // Where in [batch, count] the neuron's unit is for a token.
  int64_t mark_of(int64_t neuron, int64_t token) const {
    if (visit_ != nullptr) return row(token) * call.count + visit_->position;
    return token * call.count + position(unit_of(neuron));
  }

  void mark(int64_t neuron, int64_t token) const {
    if (visit_ != nullptr) ++visit_->live[visit_->guests[token].slot];
    if (live == nullptr) return;
    // Two threads may mark the same expert; both write the same value.
    __atomic_store_n(&live[mark_of(neuron, token)], 1, __ATOMIC_RELAXED);
  }

  const Visit* const visit_;
  const int32_t* const admitted_;
  int64_t neurons_;
  int64_t row_bytes_;
};

// All add this thread's share of the answer to y and return the number of weight rows read. `values` has room for
// value_floats.
int64_t compute_few(const Plan& plan, int thread, float* y, float* values);    // tokens <= few_tokens
int64_t compute_many(const Plan& plan, int thread, float* y, float* values);
int64_t compute_dense(const Plan& plan, int thread, float* y, float* values);  // plan.dense()
int64_t dense_floats(int64_t width, int64_t tokens);                           // of `values` that it takes

// The one that is the fastest.
int64_t compute(const Plan& plan, int thread, float* y, float* values);
