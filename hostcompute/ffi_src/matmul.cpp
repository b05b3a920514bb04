// Products with 16-bit matrices as an XLA custom call of the CPU backend: `dynajax_matmul`. XLA's own are many times
// slower, and would copy the whole matrix into float32 first.
#include <atomic>
#include <string>

#include "../src/api.h"
#include "weight_type.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using Rows = ffi::BufferR2<ffi::F32>;

std::atomic<decltype(&hc_matmul)> library_matmul{nullptr};

ffi::Error refuse(const std::string& what) { return ffi::Error::InvalidArgument("dynajax_matmul: " + what); }

ffi::Error matmul(Rows x, ffi::AnyBuffer weights, ffi::Result<Rows> y, bool sum_rows) {
  const auto compute = library_matmul.load(std::memory_order_relaxed);
  if (compute == nullptr) return ffi::Error::Internal("dynajax_matmul: the library was not attached");
  Matrix matrix;
  if (!find_matrix(weights, &matrix) || matrix.type == 0)
    return refuse(std::string("weights must be a matrix of ") + matrix_types);
  const int64_t tokens = x.dimensions()[0];
  const int64_t in = sum_rows ? matrix.rows : matrix.width;
  const int64_t out = sum_rows ? matrix.width : matrix.rows;
  if (x.dimensions()[1] != in)
    return refuse("x must be " + std::to_string(in) + " wide, got " + std::to_string(x.dimensions()[1]));
  if (y->dimensions()[0] != tokens || y->dimensions()[1] != out)
    return refuse("y must be [" + std::to_string(tokens) + ", " + std::to_string(out) + "]");
  const int64_t status = compute(nullptr, x.typed_data(), tokens, weights.untyped_data(), matrix.rows, matrix.width,
                                 matrix.type, sum_rows ? 1 : 0, y->typed_data());
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
