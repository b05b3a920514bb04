// Products of float32 rows with one matrix, as it lies in the memory of a program.
#pragma once

#include "kernels.h"
#include "pool.h"

struct MatmulCall {
  const float* x;  // [tokens, width]; to sum rows [tokens, rows]
  int64_t tokens;
  const void* weights;  // [rows, width], or packed rows of so many values
  int64_t rows;
  int64_t width;
  int32_t dtype;
  bool sum_rows;
  float* y;  // [tokens, rows]; to sum rows [tokens, width]
};

// y[t] = the products of x[t] with each row; or the rows, summed with the weights x[t]. A row that every x[t] weighs
// with zero is not read then. The bits depend on the call and on the kernels, not on the number of threads.
// Throws std::bad_alloc before anything is written to y. The caller holds pool.turn().
void matmul(Pool& pool, const Kernels& kernels, const MatmulCall& call);
