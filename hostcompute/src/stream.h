#pragma once

#include "api.h"
#include "kernels.h"
#include "pool.h"

// Both: the caller holds pool.turn().
void gather(Pool& pool, const Kernels& kernels, const hc_arena& arena, const int32_t* units, int64_t count, void* out);
uint64_t read_sum(Pool& pool, const Kernels& kernels, const void* data, int64_t bytes);
