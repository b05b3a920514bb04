#include "plan.h"

#include <algorithm>

#include "gemm.h"

namespace {

constexpr int64_t line_floats = 16;
constexpr int64_t block_bytes = 256 * 1024;  // one part of a block; two of them stay in a second-level cache

int64_t most_rows(const Plan& plan) {
  if (plan.tokens <= few_tokens) return max_block;
  return plan.dense() ? gemm_rows : std::clamp<int64_t>(block_bytes / plan.row_bytes(), tile, max_block);
}

}  // namespace

int64_t value_floats(const hc_arena& arena, const Kernels& kernels, int64_t tokens) {
  const int64_t digits = kernels.tiles[arena.dtype].digits.floats(arena.width) + line_floats;
  const int64_t copies = few_tokens * (arena.width + line_floats) + digits;  // of x, for few tokens
  const int64_t block = 3 * max_block * tokens + copies;
  return tokens > many_tokens ? std::max(block, dense_floats(arena.width, tokens)) : block;
}

Plan::Plan(const FfnCall& call, const Kernels& kernels, int threads, uint8_t* live, const Admitted& admitted)
    : call(call),
      tiles(kernels.tiles[call.arena.dtype]),
      kernels(kernels),
      threads(threads),
      tokens(call.batch),
      live(live),
      skip(call.skip_zeros && (call.activation != silu || call.admit != nullptr)),  // SiLU has no zeros of its own
      visit_(nullptr),
      admitted_(admitted.positions),
      neurons_((admitted.positions == nullptr ? call.count : admitted.count) * call.arena.rows),
      row_bytes_(::row_bytes(call.arena)) {
  blocks = threads * ceil_div(neurons_, threads * most_rows(*this));
}

Plan::Plan(const FfnCall& call, const Kernels& kernels, const Visit& visit)
    : call(call),
      tiles(kernels.tiles[call.arena.dtype]),
      kernels(kernels),
      threads(1),
      tokens(visit.count),
      live(call.live),
      skip(call.skip_zeros && call.activation != silu),
      visit_(&visit),
      admitted_(nullptr),
      neurons_(visit.end - visit.begin),
      row_bytes_(::row_bytes(call.arena)) {
  blocks = ceil_div(neurons_, most_rows(*this));
}

int Plan::find_rows(int64_t block, const char** rows) const {
  if (block >= blocks) return 0;
  const hc_arena& arena = call.arena;
  const int64_t first = begin(block);
  const int64_t end = (place(block) + 1) * neurons_ / blocks;
  for (int64_t j = first; j < end; ++j) {
    const int64_t unit = unit_of(j);
    const int64_t at = visit_ != nullptr ? visit_->position : position(unit);
    const int64_t inner = visit_ != nullptr ? visit_->begin + j : j - unit * arena.rows;
    rows[j - first] = call.unit(at) + inner * row_bytes_;
  }
  return static_cast<int>(end - first);
}

int Plan::find_upcoming(int64_t block, const char** rows) const {
  if (block < blocks || visit_ == nullptr || visit_->then == nullptr) return find_rows(block, rows);
  const int count = static_cast<int>(std::min(neurons_, most_rows(*this)));
  for (int r = 0; r < count; ++r) rows[r] = visit_->then + r * row_bytes_;
  return count;
}

int64_t compute(const Plan& plan, int thread, float* y, float* values) {
  const auto run = plan.tokens <= few_tokens ? compute_few : plan.dense() ? compute_dense : compute_many;
  return run(plan, thread, y, values);
}
