#include "api.h"

#include <mutex>
#include <new>
#include <system_error>

#include "attend.h"
#include "ffn.h"
#include "handle.h"
#include "kernels.h"
#include "lowbit.h"
#include "matmul.h"
#include "pool.h"
#include "stream.h"

namespace {

// One plus the index of the first unit outside the arena, or 0.
int64_t first_outside(const hc_arena& arena, const int32_t* units, int64_t count) {
  if (units == nullptr) return count > arena.units ? arena.units + 1 : 0;
  for (int64_t i = 0; i < count; ++i)
    if (units[i] < 0 || units[i] >= arena.units) return i + 1;
  return 0;
}

// Calls compute(pool, kernels) in the pool of a handle, or for null in that of the programs, when its turn comes.
template <typename Compute>
int64_t in_turn(void* pool, Compute compute) {
  try {
    const Handle handle = pool != nullptr ? *static_cast<Handle*>(pool) : common_handle();
    std::lock_guard<std::mutex> turn(handle.pool->turn());
    compute(*handle.pool, *handle.kernels);
  } catch (const std::system_error&) {
    return hc_no_resources;
  } catch (const std::bad_alloc&) {
    return hc_no_memory;
  }
  return hc_ok;
}

// Null on error, with *status set.
const Kernels* kernels_for(const char* isa, int32_t* status) {
  bool known = false;
  const Kernels* kernels = find_kernels(isa, &known);
  *status = kernels != nullptr ? hc_ok : known ? hc_missing_isa : hc_unknown_isa;
  return kernels;
}

}  // namespace

int32_t hc_abi_version(void) { return hc_abi; }

void* hc_pool_create(int32_t threads, const char* isa, int32_t* status) {
  const Kernels* kernels = kernels_for(isa, status);
  if (kernels == nullptr) return nullptr;
  try {
    return open_handle(threads, kernels);
  } catch (const std::system_error&) {
  } catch (const std::bad_alloc&) {
  }
  *status = hc_no_resources;
  return nullptr;
}

void hc_pool_destroy(void* pool) {
  Handle* handle = static_cast<Handle*>(pool);
  handle->pool->turn().lock();  // let a call that another thread is in come to its end
  handle->pool->turn().unlock();
  close_handle(handle);
}

const char* hc_pool_isa(void* pool) { return static_cast<Handle*>(pool)->kernels->isa; }

int64_t hc_ffn(void* pool, const hc_arena* arena, const float* x, int64_t batch, const int32_t* units, int64_t count,
               int32_t activation, float threshold, int32_t skip_zeros, const uint8_t* admit, const float* weights,
               float* y, uint8_t* live, float* values, int64_t* totals) {
  const int64_t outside = first_outside(*arena, units, count);
  if (outside != 0) return outside;
  return in_turn(pool, [&](Pool& own, const Kernels& kernels) {
    const auto compute = weights == nullptr ? ffn : experts;
    compute(own, kernels,
            {*arena, x, batch, units, count, static_cast<Activation>(activation), threshold, skip_zeros != 0, admit,
             weights, y, live, values, totals});
  });
}

int64_t hc_gather(void* pool, const hc_arena* arena, const int32_t* units, int64_t count, void* out) {
  Handle& handle = *static_cast<Handle*>(pool);
  const int64_t outside = first_outside(*arena, units, count);
  if (outside != 0) return outside;
  std::lock_guard<std::mutex> turn(handle.pool->turn());
  gather(*handle.pool, *handle.kernels, *arena, units, count, out);
  return hc_ok;
}

uint64_t hc_read_sum(void* pool, const void* data, int64_t bytes) {
  Handle& handle = *static_cast<Handle*>(pool);
  std::lock_guard<std::mutex> turn(handle.pool->turn());
  return read_sum(*handle.pool, *handle.kernels, data, bytes);
}

int32_t hc_set_common(int32_t threads, const char* isa) {
  int32_t status;
  const Kernels* kernels = kernels_for(isa, &status);
  if (kernels != nullptr) set_fallback(threads, kernels);
  return status;
}

int64_t hc_dot_rows(void* pool, const float* x, int64_t tokens, const hc_matrix* matrices, int64_t count, int64_t width,
                    int32_t dtype) {
  return in_turn(pool, [&](Pool& own, const Kernels& kernels) {
    dot_rows(own, kernels, {x, tokens, matrices, count, width, dtype});
  });
}

int64_t hc_sum_rows(void* pool, const float* x, int64_t tokens, const hc_matrix* matrix, int64_t width, int32_t dtype) {
  return in_turn(pool, [&](Pool& own, const Kernels& kernels) {
    sum_rows(own, kernels, {x, tokens, matrix, 1, width, dtype});
  });
}

int64_t hc_lowbit(void* pool, const float* x, int64_t tokens, int64_t width, const uint8_t* codes,
                  const uint16_t* scales, int64_t rows, int64_t groups, int32_t bits, float* y) {
  return in_turn(pool, [&](Pool& own, const Kernels& kernels) {
    lowbit(own, kernels, {x, tokens, width, codes, scales, rows, groups, bits, y});
  });
}

int64_t hc_attend(void* pool, const hc_attention* call) {
  return in_turn(pool, [&](Pool& own, const Kernels& kernels) { attend(own, kernels, *call); });
}
