// What a compiled program finds at the address it is given: where the weights of an engine lie, and counters.
// hostcompute/ffi.py owns the memory and spells the same layout in ctypes.
#pragma once

#include "../src/api.h"

constexpr int64_t layer_not_attached = -2;  // beside the statuses of hc_ffn

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
  int64_t live;  // units, summed over the rows
  int64_t bytes_read;
  int64_t rows;
  int64_t nanoseconds;
  int64_t status;  // of the first call that failed, or hc_ok
};
static_assert(sizeof(FfiLayer) == 96, "as in ffi.py");

struct FfiTable {
  int64_t layers;
  FfiLayer* layer;  // [layers]
};
