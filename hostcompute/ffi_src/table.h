// What a compiled program finds at the address it is given: where the weights of an engine lie, and counters.
// hostcompute/ffi.py owns the memory and spells the same layout in ctypes.
#pragma once

#include "../src/api.h"

// Beside the statuses of hc_ffn. An expert that a router chose and the arena lacks: layer_no_expert less its id as an
// unsigned number of 32 bits.
constexpr int64_t layer_not_attached = -2;
constexpr int64_t layer_no_expert = -3;

struct FfiLayer {
  decltype(&hc_ffn) ffn;  // null: nothing is attached
  void* pool;
  const hc_arena* arena;
  const int32_t* units;
  int64_t count;  // of units
  int32_t activation;
  float threshold;
  int32_t skip_zeros;
  int32_t padding;

  // Added to by every call.
  int64_t live;  // units, summed over the rows; of experts those that a router chose
  int64_t bytes_read;
  int64_t rows;
  int64_t nanoseconds;
  int64_t computed;  // units, each once a call
  int64_t status;  // of the first call that failed, or hc_ok
};
static_assert(sizeof(FfiLayer) == 104, "as in ffi.py");

struct FfiTable {
  int64_t layers;
  FfiLayer* layer;  // [layers]
};
