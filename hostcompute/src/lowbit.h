// Products of float32 rows with a packed matrix of 1, 2, 4 or 8 bits an element.
//
// Code c of a group of 32 columns stands for (c - (2^bits - 1) / 2) * the group's scale. A group takes n = 4 * bits
// bytes; byte j holds the columns j, j + n, j + 2 n, ..., the first in its lowest bits.
#pragma once

#include "kernels.h"
#include "pool.h"

struct LowbitCall {
  const float* x;  // [tokens, width]
  int64_t tokens;
  int64_t width;           // at most groups * 32: the columns behind it count for nothing
  const uint8_t* codes;    // [rows, groups * 4 * bits]
  const uint16_t* scales;  // float16 [rows, groups]
  int64_t rows;
  int64_t groups;
  int bits;
  float* y;  // [tokens, rows]
};

// The bits of y depend on the call and on the kernels, not on the number of threads. Throws std::bad_alloc before
// anything is written to y. The caller holds pool.turn().
void lowbit(Pool& pool, const Kernels& kernels, const LowbitCall& call);
