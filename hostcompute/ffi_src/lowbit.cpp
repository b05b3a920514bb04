// Products with packed low-bit matrices as an XLA custom call of the CPU backend: `dynajax_lowbit`. XLA would unpack
// them first.
#include <atomic>
#include <string>

#include "../src/api.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using Rows = ffi::BufferR2<ffi::F32>;
using Codes = ffi::BufferR2<ffi::U8>;
using Scales = ffi::BufferR2<ffi::F16>;

std::atomic<decltype(&hc_lowbit)> library_lowbit{nullptr};

ffi::Error refuse(const std::string& what) { return ffi::Error::InvalidArgument("dynajax_lowbit: " + what); }

ffi::Error lowbit(Rows x, Codes codes, Scales scales, ffi::Result<Rows> y, int32_t bits) {
  const auto compute = library_lowbit.load(std::memory_order_relaxed);
  if (compute == nullptr) return ffi::Error::Internal("dynajax_lowbit: the library was not attached");
  if (bits != 1 && bits != 2 && bits != 4 && bits != 8) return refuse("bits must be 1, 2, 4 or 8");
  const int64_t rows = scales.dimensions()[0];
  const int64_t groups = scales.dimensions()[1];
  const int64_t tokens = x.dimensions()[0];
  const int64_t width = x.dimensions()[1];
  if (codes.dimensions()[0] != rows || codes.dimensions()[1] != groups * 4 * bits)
    return refuse("codes must be [" + std::to_string(rows) + ", " + std::to_string(groups * 4 * bits) + "]");
  if (width > groups * 32)
    return refuse("x must be at most " + std::to_string(groups * 32) + " wide, got " + std::to_string(width));
  if (y->dimensions()[0] != tokens || y->dimensions()[1] != rows)
    return refuse("y must be [" + std::to_string(tokens) + ", " + std::to_string(rows) + "]");
  const int64_t status =
      compute(nullptr, x.typed_data(), tokens, width, codes.typed_data(),
              static_cast<const uint16_t*>(scales.untyped_data()), rows, groups, bits, y->typed_data());
  if (status == hc_no_resources) return ffi::Error::Internal("dynajax_lowbit: cannot start threads");
  if (status != hc_ok) return ffi::Error::Internal("dynajax_lowbit: no memory");
  return ffi::Error::Success();
}

}  // namespace

// Where the other library's hc_lowbit is; before the first program runs.
HC_API void dynajax_use_lowbit(decltype(&hc_lowbit) address) { library_lowbit.store(address); }

HC_API XLA_FFI_Error* dynajax_lowbit(XLA_FFI_CallFrame* frame);
XLA_FFI_DEFINE_HANDLER_SYMBOL(dynajax_lowbit, lowbit,
                              ffi::Ffi::Bind()
                                  .Arg<Rows>()    // x
                                  .Arg<Codes>()   // codes
                                  .Arg<Scales>()  // scales
                                  .Ret<Rows>()    // y
                                  .Attr<int32_t>("bits"));
