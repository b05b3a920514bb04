// The routed experts on the host as an XLA custom call of the CPU backend: `dynajax_cold_experts`.
#include <algorithm>

#include "call.h"

namespace {

using namespace table_call;
using Ids = ffi::BufferR2<ffi::S32>;

struct Routed {
  const float* h;
  const int32_t* ids;    // [rows, choices]
  const float* weights;  // [rows, choices]
  const bool* active;    // [rows]
  int64_t rows;
  int64_t choices;
  float* y;
};

// Where each expert is in the layer's list, -1 for those elsewhere; or the status of a unit out of range.
int64_t find_positions(const FfiLayer& layer, int32_t* positions) {
  std::fill_n(positions, layer.arena->units, -1);
  for (int64_t c = 0; c < layer.count; ++c) {
    const int32_t unit = layer.units[c];
    if (unit < 0 || unit >= layer.arena->units) return c + 1;
    positions[unit] = static_cast<int32_t>(c);
  }
  return hc_ok;
}

// What each active row gives to each unit: [rows, count], zeroed.
int64_t find_weights(const FfiLayer& layer, const Routed& routed, const int32_t* positions, float* weights) {
  for (int64_t row = 0; row < routed.rows; ++row) {
    if (!routed.active[row]) continue;
    for (int64_t k = row * routed.choices; k < (row + 1) * routed.choices; ++k) {
      const int32_t id = routed.ids[k];
      if (id < 0 || id >= layer.arena->units) return layer_no_expert - static_cast<int64_t>(static_cast<uint32_t>(id));
      if (positions[id] >= 0) weights[row * layer.count + positions[id]] += routed.weights[k];
    }
  }
  return hc_ok;
}

void count(FfiLayer* layer, const Routed& routed, const float* weights, int64_t bytes_read) {
  int64_t pairs = 0;
  int64_t computed = 0;
  for (int64_t c = 0; c < layer->count; ++c) {
    const int64_t before = pairs;
    for (int64_t row = 0; row < routed.rows; ++row) pairs += weights[row * layer->count + c] != 0;
    computed += pairs != before;
  }
  add(&layer->live, pairs);
  add(&layer->computed, computed);
  add(&layer->bytes_read, bytes_read);
  add(&layer->rows, std::count(routed.active, routed.active + routed.rows, true));
}

int64_t compute(FfiLayer* layer, const Routed& routed) {
  static thread_local std::vector<int32_t> position_scratch;
  static thread_local std::vector<float> weight_scratch;
  static thread_local std::vector<int64_t> total_scratch;
  int32_t* positions = at_least(&position_scratch, layer->arena->units);
  float* weights = at_least(&weight_scratch, routed.rows * layer->count + 1);  // never null
  int64_t* totals = at_least(&total_scratch, routed.rows + 1);
  std::fill_n(weights, routed.rows * layer->count, 0.0f);
  int64_t status = find_positions(*layer, positions);
  if (status == hc_ok) status = find_weights(*layer, routed, positions, weights);
  if (status != hc_ok) return status;
  status = layer->ffn(layer->pool, layer->arena, routed.h, routed.rows, layer->units, layer->count, layer->activation,
                      layer->threshold, layer->skip_zeros, nullptr, weights, routed.y, nullptr, nullptr, totals);
  if (status == hc_ok) count(layer, routed, weights, totals[routed.rows]);
  return status;
}

ffi::Error cold_experts(Table address, Rows h, Ids ids, Rows weights, Marks active, ffi::Result<Rows> y,
                        int32_t index) {
  Call call("dynajax_cold_experts", index);
  if (ffi::Error error = call.open(address, h, active, *y); error.failure()) return error;
  const int64_t rows = h.dimensions()[0];
  const int64_t choices = ids.dimensions()[1];
  if (ids.dimensions()[0] != rows)
    return call.refuse("ids must have " + std::to_string(rows) + " rows, got " + std::to_string(ids.dimensions()[0]));
  if (weights.dimensions()[0] != rows || weights.dimensions()[1] != choices)
    return call.refuse("weights must have the shape of ids");
  const Routed routed{h.typed_data(),      ids.typed_data(), weights.typed_data(), active.typed_data(),
                      rows, choices, y->typed_data()};
  return call.run([&](FfiLayer* layer) { return compute(layer, routed); });
}

}  // namespace

HC_API XLA_FFI_Error* dynajax_cold_experts(XLA_FFI_CallFrame* frame);
XLA_FFI_DEFINE_HANDLER_SYMBOL(dynajax_cold_experts, cold_experts,
                              ffi::Ffi::Bind()
                                  .Arg<Table>()  // address
                                  .Arg<Rows>()   // h [B,D]
                                  .Arg<Ids>()    // ids [B,K]
                                  .Arg<Rows>()   // weights [B,K]
                                  .Arg<Marks>()  // active [B]
                                  .Ret<Rows>()   // y [B,D]
                                  .Attr<int32_t>("layer"));
