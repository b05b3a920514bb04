// How the neurons of one FFN call are shared out, and where their rows lie.
//
// The inner rows of all units form one list of `count * rows` neurons. It is cut into blocks of nearly equal
// size, and block b belongs to thread b mod threads. Every thread sums into its own [B,D]. All this depends
// on nothing but the call and the number of threads, so equal calls give equal bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "api.h"
#include "ffn.h"
#include "kernels.h"

constexpr int max_block = 64;  // neurons
constexpr int block_values = 3;  // values of a neuron and a token that a thread has room for
constexpr int few_tokens = 2;  // from more on, x and y no longer fit into the first cache beside the weights

class Plan {
 public:
  Plan(const FfnCall& call, const Kernels& kernels, int threads, uint8_t* live);

  const FfnCall& call;
  const Tiles& tiles;
  const int threads;
  uint8_t* const live;  // [batch, count], zeroed
  int64_t blocks;
  bool skip;  // look for zeros at all

  int down() const { return static_cast<int>(call.arena.parts) - 1; }
  bool has_gate() const { return call.arena.parts == 3; }

  int64_t begin(int64_t block) const { return block * neurons_ / blocks; }  // its first neuron

  // Finds the part-0 row of each neuron of a block; returns how many there are. Part p lies p strides on.
  int find_rows(int64_t block, const char** rows) const;
  int64_t part_stride() const { return call.arena.rows * row_bytes_; }
  int64_t row_bytes() const { return row_bytes_; }

  bool up_decides() const { return skip && call.activation == drelu; }  // which down rows are needed

  // The activation of a neuron's gate for a token, zero where the token does not admit the neuron's unit; the unit is
  // marked live if it is not zero. With dReLU that is left to `times_up`.
  float activate(int64_t neuron, int64_t token, float gate) const;

  // What `activate` gave, times up, which dReLU activates too. Zero stays zero, whatever up is.
  float times_up(int64_t neuron, int64_t token, float value, float up) const;

  // Tells the caller, if it asked, what the neuron's down row is multiplied with; zero needs no telling.
  void tell(int64_t neuron, int64_t token, float value) const {
    if (call.values != nullptr) call.values[token * call.count + neuron] = value;
  }

 private:
  int64_t mark_of(int64_t neuron, int64_t token) const;
  void mark(int64_t neuron, int64_t token) const;

  int64_t neurons_;
  int64_t row_bytes_;
};

// Both add this thread's share of the answer to y [B,D] and return the number of weight rows read. `values`
// has room for block_values * max_block * batch floats.
int64_t compute_few(const Plan& plan, int thread, float* y, float* values);   // batch <= few_tokens
int64_t compute_many(const Plan& plan, int thread, float* y, float* values);
