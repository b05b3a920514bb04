// Attention of a few queries over a cache, as it lies in the memory of a program.
#pragma once

#include "api.h"
#include "kernels.h"
#include "pool.h"

// The bits of y depend on the call and on the kernels, not on the number of threads. Throws std::bad_alloc before
// anything is written to y. The caller holds pool.turn().
void attend(Pool& pool, const Kernels& kernels, const hc_attention& call);
