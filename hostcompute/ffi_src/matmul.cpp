// Products with 16-bit and packed matrices as an XLA custom call of the CPU backend: `dynajax_matmul`. XLA's own are many times
// slower, and would copy the whole matrix into float32 first.
#include <atomic>
#include <string>

#include "../src/api.h"
#include "../src/kernels.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using Rows = ffi::BufferR2<ffi::F32>;

std::atomic<decltype(&hc_matmul)> library_matmul{nullptr};

ffi::Error refuse(const std::string& what) { return ffi::Error::InvalidArgument("dynajax_matmul: " + what); }

// As in hc_arena; -1 for what are no weights. uint16 holds the bits of bfloat16, and uint8 packed rows.
int32_t weight_type(const ffi::AnyBuffer& weights) {
  const auto shape = weights.dimensions();
  switch (weights.element_type()) {
    case ffi::U8:
      if (shape.size() != 3) return -1;
      return shape[2] == row_bytes(3, group_columns) ? 3 : shape[2] == row_bytes(4, group_columns) ? 4 : -1;
    case ffi::F16:
      return 1;
    case ffi::BF16:
    case ffi::U16:
      return 2;
    default:
      return -1;
  }
}

ffi::Error matmul(Rows x, ffi::AnyBuffer weights, ffi::Result<Rows> y, bool sum_rows) {
  const auto compute = library_matmul.load(std::memory_order_relaxed);
  if (compute == nullptr) return ffi::Error::Internal("dynajax_matmul: the library was not attached");
  const int32_t type = weight_type(weights);
  if (type < 0)
    return refuse("weights must be float16, bfloat16 or its bits as uint16, or packed in uint8 [rows, groups, 34 or 18]");
  if (type < 3 && weights.dimensions().size() != 2) return refuse("weights must be a matrix");
  const int64_t rows = weights.dimensions()[0];
  const int64_t width = weights.dimensions()[1] * (type < 3 ? 1 : group_columns);
  const int64_t tokens = x.dimensions()[0];
  const int64_t in = sum_rows ? rows : width;
  const int64_t out = sum_rows ? width : rows;
  if (x.dimensions()[1] != in)
    return refuse("x must be " + std::to_string(in) + " wide, got " + std::to_string(x.dimensions()[1]));
  if (y->dimensions()[0] != tokens || y->dimensions()[1] != out)
    return refuse("y must be [" + std::to_string(tokens) + ", " + std::to_string(out) + "]");
  const int64_t status = compute(nullptr, x.typed_data(), tokens, weights.untyped_data(), rows, width, type,
                                 sum_rows ? 1 : 0, y->typed_data());
  if (status == hc_no_resources) return ffi::Error::Internal("dynajax_matmul: cannot start threads");
  if (status != hc_ok) return ffi::Error::Internal("dynajax_matmul: no memory");
  return ffi::Error::Success();
}

}  // namespace

// Where the other library's hc_matmul is; before the first program runs.
HC_API void dynajax_use_matmul(decltype(&hc_matmul) address) { library_matmul.store(address); }

HC_API XLA_FFI_Error* dynajax_matmul(XLA_FFI_CallFrame* frame);
XLA_FFI_DEFINE_HANDLER_SYMBOL(dynajax_matmul, matmul,
                              ffi::Ffi::Bind()
                                  .Arg<Rows>()            // x
                                  .Arg<ffi::AnyBuffer>()  // weights
                                  .Ret<Rows>()            // y
                                  .Attr<bool>("sum_rows"));
