#include "plan.h"

#include <algorithm>
#include <cmath>

namespace {

constexpr int64_t block_bytes = 256 * 1024;  // one part of a block; two of them stay in a second-level cache

}  // namespace

Plan::Plan(const FfnCall& call, const Kernels& kernels, int threads, uint8_t* live)
    : call(call),
      tiles(kernels.tiles[call.arena.dtype]),
      threads(threads),
      live(live),
      skip(call.skip_zeros && (call.activation != silu || call.admit != nullptr)),  // SiLU has no zeros of its own
      neurons_(call.count * call.arena.rows),
      row_bytes_(::row_bytes(call.arena)) {
  const int64_t fit = std::clamp<int64_t>(block_bytes / row_bytes_, tile, max_block);
  const int64_t most = call.batch <= few_tokens ? max_block : fit;
  blocks = threads * ((neurons_ + threads * most - 1) / (threads * most));
}

int Plan::find_rows(int64_t block, const char** rows) const {
  if (block >= blocks) return 0;
  const hc_arena& arena = call.arena;
  const int64_t first = begin(block);
  const int64_t end = begin(block + 1);
  for (int64_t j = first; j < end; ++j) {
    const int64_t position = j / arena.rows;
    const int64_t unit = call.units[position];
    const int64_t inner = j - position * arena.rows;
    rows[j - first] = static_cast<const char*>(arena.data) + unit * arena.parts * part_stride() + inner * row_bytes_;
  }
  return static_cast<int>(end - first);
}

float Plan::activate(int64_t neuron, int64_t token, float gate) const {
  if (call.admit != nullptr && call.admit[mark_of(neuron, token)] == 0) return 0;
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
      value = gate / (1 + std::exp(-gate));
  }
  if (value != 0 && call.activation != drelu) mark(neuron, token);
  return value;
}

float Plan::times_up(int64_t neuron, int64_t token, float value, float up) const {
  if (value == 0) return 0;
  if (call.activation != drelu) return value * up;
  value *= up <= 0 ? 0 : up;
  if (value != 0) mark(neuron, token);
  return value;
}

// Where in [batch, count] the neuron's unit is for a token.
int64_t Plan::mark_of(int64_t neuron, int64_t token) const {
  const int64_t unit = call.arena.rows == 1 ? neuron : neuron / call.arena.rows;  // a division takes a while
  return token * call.count + unit;
}

void Plan::mark(int64_t neuron, int64_t token) const {
  // Two threads may mark the same expert; both write the same value.
  __atomic_store_n(&live[mark_of(neuron, token)], 1, __ATOMIC_RELAXED);
}
