// The inner loops, once per instruction set. Everything else of the library is compiled for any CPU.
#pragma once

#include <cstdint>

constexpr int tile = 4;  // weight rows, and tokens, that one kernel call handles at most
constexpr int dtypes = 3;

// out[r * T + t] = rows[r] . x[t] over d elements. `next`: null, or as many rows to prefetch meanwhile.
using DotTile = void (*)(const void* const* rows, const float* const* x, int64_t d, const void* const* next,
                         float* out);

// y[t] += sum over r of h[r * T + t] * rows[r].
using AxpyTile = void (*)(const void* const* rows, const float* h, int64_t d, const void* const* next,
                          float* const* y);

// [0]: one row, [1]: `tile` rows; then [T - 1]. One row at a time keeps the memory busiest, several do more
// with what is in a cache.
struct Tiles {
  DotTile dot[2][tile];
  AxpyTile axpy[2][tile];
};

struct Kernels {
  const char* isa;
  Tiles tiles[dtypes];
  void (*copy)(void* to, const void* from, int64_t bytes);  // past the caches where the CPU can
  uint64_t (*read_sum)(const void* data, int64_t bytes);
};

extern const Kernels portable_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
#endif

// name: "" for the best this CPU has. Null with *known = whether such a set exists at all.
const Kernels* find_kernels(const char* name, bool* known);
