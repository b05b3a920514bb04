// One FFN call: every thread computes its share of the units, then the shares are added.
#include "ffn.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "plan.h"

namespace {

constexpr int64_t parallel_reduce = 1 << 16;  // floats; below, waking the threads costs more than it saves
constexpr int64_t line_floats = 16;

struct Job {
  Plan plan;
  Pool& pool;
  std::atomic<int64_t> rows_read{0};
};

// A thread's scratch: y [B,D], then the values of one block.
int64_t sum_floats(const FfnCall& call) {
  return (call.batch * call.arena.width + line_floats - 1) / line_floats * line_floats;
}

float* partial_sum(const Job& job, int thread) { return static_cast<float*>(job.pool.scratch(thread).data()); }

void compute_share(void* context, int thread) {
  Job& job = *static_cast<Job*>(context);
  const FfnCall& call = job.plan.call;
  float* y = partial_sum(job, thread);
  std::memset(y, 0, sum_floats(call) * sizeof(float));
  const int64_t rows = compute(job.plan, thread, y, y + sum_floats(call));
  job.rows_read.fetch_add(rows, std::memory_order_relaxed);
}

// y = the threads' sums, added in the order of the threads.
void reduce_slice(const Job& job, int64_t begin, int64_t end) {
  float* y = job.plan.call.y;
  std::memcpy(y + begin, partial_sum(job, 0) + begin, (end - begin) * sizeof(float));
  for (int thread = 1; thread < job.pool.threads(); ++thread) {
    const float* from = partial_sum(job, thread);
    for (int64_t i = begin; i < end; ++i) y[i] += from[i];
  }
}

void reduce(Job& job) {
  const int64_t floats = job.plan.call.batch * job.plan.call.arena.width;
  if (floats * job.pool.threads() < parallel_reduce) return reduce_slice(job, 0, floats);
  const auto task = [](void* context, int thread) {
    const Job& job = *static_cast<Job*>(context);
    const int64_t threads = job.pool.threads();
    const int64_t floats = job.plan.call.batch * job.plan.call.arena.width;
    reduce_slice(job, floats * thread / threads, floats * (thread + 1) / threads);
  };
  job.pool.run(task, &job);
}

// Lists the positions that some row admits; returns how many.
int64_t find_admitted(const FfnCall& call, int32_t* positions) {
  int64_t found = 0;
  for (int64_t c = 0; c < call.count; ++c) {
    uint8_t wanted = 0;
    for (int64_t t = 0; t < call.batch; ++t) wanted |= call.admit[t * call.count + c];
    positions[found] = static_cast<int32_t>(c);
    found += wanted != 0;
  }
  return found;
}

}  // namespace

int64_t row_bytes(const hc_arena& arena) { return row_bytes(arena.dtype, arena.width); }

void ffn(Pool& pool, const Kernels& kernels, const FfnCall& call) {
  if (call.batch == 0) {
    call.totals[0] = 0;
    return;
  }
  const int64_t floats = sum_floats(call) + value_floats(call.arena, kernels, call.batch);
  for (int thread = 0; thread < pool.threads(); ++thread) pool.scratch(thread).reserve(floats * sizeof(float));
  const int64_t marks = call.batch * call.count;
  const int64_t listed = call.admit == nullptr ? 0 : call.count * sizeof(int32_t);
  pool.shared_scratch().reserve(listed + (call.live == nullptr ? marks : 0));
  int32_t* positions = listed == 0 ? nullptr : static_cast<int32_t*>(pool.shared_scratch().data());
  const Admitted admitted{positions, positions == nullptr ? 0 : find_admitted(call, positions)};
  uint8_t* live = call.live;
  if (live == nullptr) live = static_cast<uint8_t*>(pool.shared_scratch().data()) + listed;
  if (marks > 0) std::memset(live, 0, marks);
  if (call.values != nullptr) std::fill_n(call.values, marks, 0.0f);
  Job job{Plan(call, kernels, pool.threads(), live, admitted), pool};
  pool.run(compute_share, &job);
  reduce(job);
  for (int64_t t = 0; t < call.batch; ++t) {
    int64_t units = 0;
    for (int64_t c = 0; c < call.count; ++c) units += live[t * call.count + c];
    call.totals[t] = units;
  }
  call.totals[call.batch] = job.rows_read.load() * row_bytes(call.arena);
}
