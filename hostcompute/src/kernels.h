// The inner loops, once per instruction set. Everything else of the library is compiled for any CPU.
#pragma once

#include <cstdint>

enum Activation : int32_t { relu = 0, fatrelu = 1, silu = 2, drelu = 3 };

constexpr int tile = 4;  // weight rows, and tokens, that one kernel call handles at most
constexpr int pair = 2;  // packed rows, and tokens, where memory sets the pace
constexpr int dtypes = 5;
constexpr int group_columns = 32;  // that share a scale in a packed row

// dtype as in hc_arena. A packed row has the codes of all groups, see lowbit.h, and behind them their float16 scales.
constexpr bool is_packed(int32_t dtype) { return dtype >= 3; }
constexpr int64_t row_bytes(int32_t dtype, int64_t width) {
  return is_packed(dtype) ? width / group_columns * (dtype == 3 ? 34 : 18) : width * (dtype == 0 ? 4 : 2);
}

constexpr int64_t wide_columns = 6144;  // from more on a token takes up most of the first cache: rows share it in pairs

constexpr int64_t narrow_bytes = 2048;  // shorter rows are summed, and multiplied in integers, several at a time

// out[r * T + t] = rows[r] . x[t] over d elements. `next`: null, or as many rows to prefetch meanwhile.
using DotTile = void (*)(const void* const* rows, const float* const* x, int64_t d, const void* const* next,
                         float* out);

// y[t] += sum over r of h[r * T + t] * rows[r].
using AxpyTile = void (*)(const void* const* rows, const float* h, int64_t d, const void* const* next,
                          float* const* y);

// to = the columns from `begin` to `end` of a row of d; of packed rows whole groups.
using WidenRow = void (*)(const void* row, int64_t d, int64_t begin, int64_t end, float* to);

// A tile of products with many tokens: sums[r * stride + t] += rows[r] . x[t] over some columns, of whole registers of
// tokens and as many rows as there are sums for.
constexpr int64_t gemm_columns = 256;               // at most
constexpr int64_t gemm_stride = gemm_columns + 16;  // of rows: not so that all of them lie in the same sets of a cache
struct GemmTile {
  const float* rows;    // [R, gemm_stride]
  const float* tokens;  // [columns, lanes of all registers]
  int64_t columns;
  float* sums;
  int64_t stride;
  const void* const* fetch;  // lines to prefetch meanwhile; half of `columns` at most are
  int64_t fetches;
};
using GemmDot = void (*)(const GemmTile& tile);

// y[t] += sum over r of h[t * token_step + r * row_step] * rows[r]: no y is read or written more than once.
constexpr int gemm_tokens = 6;  // that one call handles at most
struct GemmBlock {
  const float* rows;  // [count, columns]
  int64_t count;
  const float* h;
  int64_t token_step;
  int64_t row_step;
  int64_t columns;
  float* const* y;           // [T]
  const void* const* fetch;  // lines to prefetch meanwhile; `count` at most are
  int64_t fetches;
};
using GemmSum = void (*)(const GemmBlock& block);

// y[i] += sum over k of values[k] * row indices[k]: the same for one token, which few of the rows concern.
struct GemmSparse {
  const float* rows;  // [., columns]
  const int32_t* indices;
  const float* values;
  int64_t count;
  int64_t columns;
  float* y;
  const void* const* fetch;  // lines to prefetch meanwhile
  int64_t fetches;
};
using GemmSparseSum = void (*)(const GemmSparse& call);

struct GemmKernels {
  static constexpr int most_vectors = 4;
  static constexpr int most_lanes = 16;
  int lanes;
  int vectors;                // of tokens that a tile has at most
  int sums;                   // registers of them: a tile of V vectors has sums / V rows
  GemmDot dot[most_vectors];  // [V - 1]
  GemmSum sum[gemm_tokens];   // [T - 1]
  GemmSparseSum sparse_sum;
  // to [columns, lanes of all registers] = the columns from `begin` on of up to `vectors` registers of tokens; zeros
  // behind the last one.
  void (*pack)(const float* const* x, int64_t tokens, int64_t begin, int64_t columns, float* to);
  // y[t * step + r] = sums[r * stride + t]. Whole registers of both are read.
  void (*unpack)(const float* sums, int64_t stride, int64_t rows, int64_t tokens, float* y, int64_t step);
};

// Rows times one token in integers, see digits_impl.h; `make` is null where there is no such thing.
struct DigitKernels {
  int64_t block_floats = 0;
  int64_t block_groups = 1;
  void (*make)(const float* x, int64_t d, float* to) = nullptr;  // to: `floats`, at a line's beginning
  DotTile dot[3] = {};  // one row, `pair` and `tile` of them; x[0] is what `make` made

  DotTile dot_of(int rows) const { return dot[rows == tile ? 2 : rows - 1]; }
  int64_t floats(int64_t d) const {
    return (d / group_columns + block_groups - 1) / block_groups * block_floats;
  }
};

// [0]: one row, [1]: `tile` rows; then [T - 1]. One row at a time keeps the memory busiest, several do more
// with what is in a cache.
struct Tiles {
  DotTile dot[2][tile];
  AxpyTile axpy[2][tile];
  WidenRow widen;
  // Of `pair` rows; then [T - 1].
  DotTile pair_dot[pair];
  AxpyTile pair_axpy[pair];
  DigitKernels digits = {};
};

constexpr int panel_rows(int bits) { return bits <= 2 ? 64 : 128 / bits; }  // that one kernel call handles at most
constexpr int panel_tokens = 2;  // at most

// What a kernel wants to know of a token, `prepared_floats` for each group. Of 1 and 2 bits: for every four bits of the
// codes, from the lowest ones of the first byte on, a table of what each value of theirs adds to the product, so that
// nothing need be unpacked. Of 4 and 8 bits: x itself, all groups of it, and then for each group what its sum begins
// with, because codes are multiplied as they are, which is half of the largest one too much.
constexpr int table_floats = 16;
constexpr int64_t prepared_floats(int bits) { return bits <= 2 ? 8 * bits * table_floats : group_columns + 1; }

// Rows of a packed matrix, see lowbit.h, and the tokens to multiply them with.
struct Panel {
  const uint8_t* codes;    // [rows, groups * 4 * bits]
  const uint16_t* scales;  // float16 [rows, groups]
  int64_t rows;            // at least one
  int64_t groups;
  const float* const* x;  // of each token, prepared_floats(bits) a group
  float* const* y;        // [rows] of each token
  const uint8_t* next_codes;  // what is read after this: prefetched meanwhile, as much as this panel has; or null
  const uint16_t* next_scales;
};

using LowbitPanel = void (*)(const Panel& panel);

// Some more keys of queries that lie in the lanes, whose softmax is under way.
struct SoftmaxBlock {
  float* scores;        // [keys, queries] become exp(score - the largest so far), zero where a query sees no key
  int64_t keys;
  int64_t queries;      // a multiple of 16
  const int32_t* begin;  // the keys that each query sees
  const int32_t* end;
  float* most;     // the largest score so far
  float* sums;     // of the exponentials so far
  float* factors;  // what everything before is multiplied with
};

struct Kernels {
  const char* isa;
  Tiles tiles[dtypes];
  GemmKernels gemm;
  // scores [keys, count] become exp(score - the largest), of each of up to `tile` queries; sums: of these.
  void (*softmax)(float* scores, int64_t keys, int count, float* sums);
  void (*softmax_more)(const SoftmaxBlock& block);
  // Of many values; live: whether one is not zero then. Of drelu that of the gate.
  void (*activate)(float* values, int64_t count, int32_t activation, float threshold, uint8_t* live);
  LowbitPanel lowbit[4][panel_tokens];  // of 1, 2, 4 and 8 bits; then [tokens - 1]
  void (*copy)(void* to, const void* from, int64_t bytes);  // past the caches where the CPU can
  uint64_t (*read_sum)(const void* data, int64_t bytes);
};

extern const Kernels portable_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
extern const Kernels avx512vnni_kernels;
#endif

// name: "" for the best this CPU has. Null with *known = whether such a set exists at all.
const Kernels* find_kernels(const char* name, bool* known);
