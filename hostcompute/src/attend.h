// Attention of some queries over a cache, as it lies in the memory of a program.
#pragma once

#include <algorithm>

#include "api.h"
#include "kernels.h"
#include "pool.h"

// The bits of y depend on the call and on the kernels, not on the number of threads. Throws std::bad_alloc before
// anything is written to y. The caller holds pool.turn().
void attend(Pool& pool, const Kernels& kernels, const hc_attention& call);
void attend_many(Pool& pool, const Kernels& kernels, const hc_attention& call);  // what `attend` does with many tokens

struct Span {
  int64_t begin;
  int64_t end;
};

// The keys that a token sees.
inline Span seen_keys(const hc_attention& call, int64_t token) {
  const int64_t position = call.positions[token];
  const int64_t end = std::clamp<int64_t>(position + 1, 0, call.keys);
  return {call.window == 0 ? 0 : std::clamp<int64_t>(position + 1 - call.window, 0, end), end};
}
