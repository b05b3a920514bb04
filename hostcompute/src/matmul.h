// Products of float32 rows with matrices as they lie in the memory of a program.
#pragma once

#include "api.h"
#include "kernels.h"
#include "pool.h"

struct MatmulCall {
  const float* x;  // [tokens, width]; to sum rows [tokens, rows]
  int64_t tokens;
  const hc_matrix* matrices;
  int64_t count;  // of them; to sum rows one
  int64_t width;
  int32_t dtype;
};

// y[t] of each matrix = the products of x[t] with each of its rows. The bits depend on x, the matrix and the kernels,
// not on the number of threads nor on the other matrices. Throws std::bad_alloc before anything is written to a y. The
// caller holds pool.turn().
void dot_rows(Pool& pool, const Kernels& kernels, const MatmulCall& call);

// y[t] = the rows of the matrix, summed with the weights x[t]; else the same. Of up to 16 tokens a row that every x[t]
// weighs with zero is not read.
void sum_rows(Pool& pool, const Kernels& kernels, const MatmulCall& call);

constexpr int few_rows_of_x = 16;   // with more, arithmetic takes as long as reading, and longer
constexpr int64_t alone = 1 << 16;  // products; fewer are computed before another thread has woken up
