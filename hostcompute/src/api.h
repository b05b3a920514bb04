// The C interface of the library. No exception crosses it.
//
// Bump hc_abi here and ABI_VERSION in library.py when anything here or in ffi_src/table.h changes.
#pragma once

#include <cstdint>

constexpr int32_t hc_abi = 8;

#define HC_API extern "C" __attribute__((visibility("default")))

// One layer's units, borrowed, never owned. A unit's rows of one part lie side by side; its parts, and the units, where
// the last two fields say: whole units one behind the other, or every part in an array of its own.
struct hc_arena {
  const void* data;  // the first row of part 0
  int64_t units;
  int64_t parts;  // 3: gate, up, down; 2: up, down
  int64_t rows;   // rows per part: 1 for a neuron, f for an expert
  int64_t width;  // D, in values
  int32_t dtype;  // 0 float32, 1 float16, 2 bfloat16, 3 int8, 4 int4: packed rows, see row_bytes in kernels.h
  int32_t padding;
  int64_t stride;     // bytes from unit to unit
  int64_t places[2];  // bytes from part 0 of a unit to its parts 1 and 2
};

// Results of hc_pool_create and of the calls. A positive result of hc_ffn and hc_gather is one plus the
// index of the first unit that lies outside the arena; nothing was computed then. Where units are null, and so none
// does, hc_ffn may say hc_no_resources.
enum { hc_ok = 0, hc_unknown_isa = 1, hc_missing_isa = 2, hc_no_resources = 3, hc_no_memory = -1 };

HC_API int32_t hc_abi_version(void);

// Pools of as many threads share them. isa: "" for the best one of this CPU, or portable, avx2, avx512,
// avx512vnni. Null on error, with *status set.
HC_API void* hc_pool_create(int32_t threads, const char* isa, int32_t* status);
HC_API void hc_pool_destroy(void* pool);
HC_API const char* hc_pool_isa(void* pool);

// y[B,D] = FFN of x[B,D] over `count` units; units: null for 0, 1, 2, ... pool as in hc_dot_rows. activation: 0 relu, 1
// fatrelu, 2 silu, 3 drelu; the last one, relu(gate) * relu(up), needs three parts. admit: uint8 [B,count] or null:
// where it is 0 the unit is zero for the row, whatever its gate, and one that no row admits is not read; with
// skip_zeros zeros are then skipped of silu too. weights: [B,count] or null, what a unit's share of a row is
// multiplied with, as a router says; where a row's weight is 0, or admit, it costs nothing, and a unit that no row
// wants is not read. live: uint8 [B,count] or null. values: [B,count] or null, what each unit's down row is multiplied
// with; only where arena->rows is 1. totals: int64 [B + 1], the live units of each row, with weights its live neurons;
// then the bytes of weights read.
HC_API int64_t hc_ffn(void* pool, const hc_arena* arena, const float* x, int64_t batch, const int32_t* units,
                      int64_t count, int32_t activation, float threshold, int32_t skip_zeros, const uint8_t* admit,
                      const float* weights, float* y, uint8_t* live, float* values, int64_t* totals);

// out[i] = arena[units[i]]: of whole units that lie one behind the other.
HC_API int64_t hc_gather(void* pool, const hc_arena* arena, const int32_t* units, int64_t count, void* out);

// The sum of the 64-bit words of a buffer, read once by all threads: what a benchmark compares with.
HC_API uint64_t hc_read_sum(void* pool, const void* data, int64_t bytes);

// The rows of a matrix in a program's memory, and where its products go.
struct hc_matrix {
  const void* weights;  // [rows, width]
  int64_t rows;
  float* y;
};

// Products with all rows of several matrices: y[tokens, rows] of each = x[tokens, width] . rows. dtype and width as in
// hc_arena. pool: null for the one that programs share, which is the pool opened first among the open ones; where none
// is, one of as many threads as hc_set_common said last. hc_ok, hc_no_memory or hc_no_resources.
HC_API int64_t hc_dot_rows(void* pool, const float* x, int64_t tokens, const hc_matrix* matrices, int64_t count,
                           int64_t width, int32_t dtype);

// y[tokens, width] = x[tokens, rows] times the rows of a matrix; else the same.
HC_API int64_t hc_sum_rows(void* pool, const float* x, int64_t tokens, const hc_matrix* matrix, int64_t width,
                           int32_t dtype);

// Products with all rows of a packed matrix: y[tokens, rows] = x[tokens, width] . rows. codes: uint8
// [rows, groups * 4 * bits]; scales: float16 [rows, groups]; bits 1, 2, 4 or 8. A group is 32 columns, see
// src/lowbit.h; width is at most that of all groups, and columns behind it count for nothing. pool and result as in
// hc_dot_rows.
HC_API int64_t hc_lowbit(void* pool, const float* x, int64_t tokens, int64_t width, const uint8_t* codes,
                         const uint16_t* scales, int64_t rows, int64_t groups, int32_t bits, float* y);

// Queries over the keys and values of a cache, each over those up to its own position.
struct hc_attention {
  const float* q;            // [batch, tokens, heads, size]
  const void* k;             // [batch, keys, cache_heads, size]
  const void* v;             // [batch, keys, cache_heads, values]
  const int32_t* positions;  // [batch, tokens]: key s is at position s
  float* y;                  // [batch, tokens, heads, values]
  int64_t batch;
  int64_t tokens;
  int64_t heads;  // a multiple of cache_heads: that many in a row share a head of the cache
  int64_t cache_heads;
  int64_t keys;
  int64_t size;
  int64_t values;
  int64_t window;  // keys that a query sees, its own included; 0: all up to its own
  float scale;     // of the products
  int32_t dtype;   // of k and v, as in hc_arena
};

// y = softmax(scale q k) v, zeros where no key is seen. pool and result as in hc_dot_rows.
HC_API int64_t hc_attend(void* pool, const hc_attention* call);

// hc_ok, hc_unknown_isa or hc_missing_isa. Starts no thread.
HC_API int32_t hc_set_common(int32_t threads, const char* isa);
