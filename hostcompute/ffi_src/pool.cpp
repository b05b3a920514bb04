// The FFN over the units of a device's pool, whose parts are arrays of a program, as an XLA custom call of the CPU
// backend: `dynajax_pool_ffn`.
#include <atomic>
#include <string>

#include "call.h"
#include "weight_type.h"

namespace {

using namespace table_call;
using Pairs = ffi::BufferR2<ffi::PRED>;
using Counts = ffi::BufferR1<ffi::S32>;

std::atomic<decltype(&hc_ffn)> library_ffn{nullptr};

ffi::Error refuse(const std::string& what) { return ffi::Error::InvalidArgument("dynajax_pool_ffn: " + what); }

// The arena of `parts` equal matrices; a reason if they are none, else empty.
std::string find_arena(const ffi::RemainingArgs& operands, int64_t parts, hc_arena* arena) {
  for (int64_t p = 0; p < parts; ++p) {
    const ffi::ErrorOr<ffi::AnyBuffer> part = operands.get<ffi::AnyBuffer>(p);
    if (!part.has_value()) return "parts must be arrays";
    Matrix own;
    if (!find_matrix(*part, &own)) return std::string("parts must be matrices of float32, ") + matrix_types;
    const char* data = static_cast<const char*>(part->untyped_data());
    if (p == 0) *arena = {data, own.rows, parts, 1, own.width, own.type, 0, own.row_bytes, {0, 0}};
    if (own.rows != arena->units || own.width != arena->width || own.type != arena->dtype) return "parts must be alike";
    if (p > 0) arena->places[p - 1] = data - static_cast<const char*>(arena->data);
  }
  return {};
}

ffi::Error pool_ffn(Rows h, ffi::RemainingArgs operands, ffi::Result<Rows> y, ffi::Result<Pairs> live,
                    ffi::Result<Counts> counts, int32_t parts, int32_t activation, float threshold, bool skip_zeros) {
  const auto compute = library_ffn.load(std::memory_order_relaxed);
  if (compute == nullptr) return ffi::Error::Internal("dynajax_pool_ffn: the library was not attached");
  const int64_t given = operands.size();
  if (parts < 2 || parts > 3 || given < parts || given > parts + 1)
    return refuse("2 or 3 parts are needed, and admit behind them or not");
  hc_arena arena;
  if (const std::string reason = find_arena(operands, parts, &arena); !reason.empty()) return refuse(reason);
  const int64_t rows = h.dimensions()[0];
  if (h.dimensions()[1] != arena.width) return refuse("h must be as wide as the parts");
  if (y->dimensions()[0] != rows || y->dimensions()[1] != arena.width) return refuse("y must have the shape of h");
  if (live->dimensions()[0] != rows || live->dimensions()[1] != arena.units) return refuse("live must be [T,G]");
  if (counts->dimensions()[0] != rows) return refuse("counts must be [T]");
  const uint8_t* admit = nullptr;
  if (given > parts) {
    const ffi::ErrorOr<Pairs> marks = operands.get<Pairs>(parts);
    if (!marks.has_value() || marks->dimensions()[0] != rows || marks->dimensions()[1] != arena.units)
      return refuse("admit must be bool [T,G]");
    admit = reinterpret_cast<const uint8_t*>(marks->typed_data());
  }
  static thread_local std::vector<int64_t> totals;
  int64_t status = hc_no_memory;
  try {
    status = compute(nullptr, &arena, h.typed_data(), rows, nullptr, arena.units, activation, threshold, skip_zeros,
                     admit, nullptr, y->typed_data(), reinterpret_cast<uint8_t*>(live->typed_data()), nullptr,
                     at_least(&totals, rows + 1));
  } catch (const std::bad_alloc&) {
  }
  if (status == hc_no_resources) return ffi::Error::Internal("dynajax_pool_ffn: cannot start threads");
  if (status != hc_ok) return ffi::Error::Internal("dynajax_pool_ffn: no memory");
  for (int64_t t = 0; t < rows; ++t) counts->typed_data()[t] = static_cast<int32_t>(totals[t]);
  return ffi::Error::Success();
}

}  // namespace

// Where the other library's hc_ffn is; before the first program runs.
HC_API void dynajax_use_ffn(decltype(&hc_ffn) address) { library_ffn.store(address); }

HC_API XLA_FFI_Error* dynajax_pool_ffn(XLA_FFI_CallFrame* frame);
XLA_FFI_DEFINE_HANDLER_SYMBOL(dynajax_pool_ffn, pool_ffn,
                              ffi::Ffi::Bind()
                                  .Arg<Rows>()      // h [T,D]
                                  .RemainingArgs()  // (gate,) up, down, and perhaps admit [T,G]
                                  .Ret<Rows>()      // y [T,D]
                                  .Ret<Pairs>()     // live [T,G]
                                  .Ret<Counts>()    // live ones [T]
                                  .Attr<int32_t>("parts")
                                  .Attr<int32_t>("activation")
                                  .Attr<float>("threshold")
                                  .Attr<bool>("skip_zeros"));
