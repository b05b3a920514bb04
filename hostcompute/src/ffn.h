#pragma once

#include "api.h"
#include "kernels.h"
#include "pool.h"

struct FfnCall {
  const hc_arena& arena;
  const float* x;  // [batch, width]
  int64_t batch;
  const int32_t* units;  // [count], each in [0, arena.units), or null: 0, 1, 2, ...
  int64_t count;
  Activation activation;
  float threshold;
  bool skip_zeros;
  const uint8_t* admit;  // [batch, count], or null: every row admits every unit
  const float* weights;  // [batch, count], or null; a row does without a unit of weight zero
  float* y;              // [batch, width]; may be x
  uint8_t* live;         // [batch, count], or null
  float* values;         // [batch, count], or null; only where arena.rows is 1
  int64_t* totals;       // [batch + 1]

  // The part-0 rows of the unit at a position of the list.
  const char* unit(int64_t position) const {
    return static_cast<const char*>(arena.data) + (units == nullptr ? position : units[position]) * arena.stride;
  }
};

int64_t row_bytes(const hc_arena& arena);

// Both throw std::bad_alloc before anything is written to y. The caller holds pool.turn().
void ffn(Pool& pool, const Kernels& kernels, const FfnCall& call);
void experts(Pool& pool, const Kernels& kernels, const FfnCall& call);  // where there are weights
