// Products with 16-bit and packed matrices as XLA custom calls of the CPU backend: `dynajax_dot_rows`, with several at
// once, and `dynajax_sum_rows`. XLA's own are many times slower, and would copy a whole matrix into float32 first.
#include <atomic>
#include <string>
#include <vector>

#include "call.h"
#include "weight_type.h"

namespace {

using namespace table_call;

std::atomic<decltype(&hc_dot_rows)> library_dot_rows{nullptr};
std::atomic<decltype(&hc_sum_rows)> library_sum_rows{nullptr};

struct Target {
  const char* name;

  ffi::Error refuse(const std::string& what) const {
    return ffi::Error::InvalidArgument(std::string(name) + ": " + what);
  }
  ffi::Error fail(const char* what) const { return ffi::Error::Internal(std::string(name) + ": " + what); }
  ffi::Error result(int64_t status) const {
    if (status == hc_no_resources) return fail("cannot start threads");
    return status == hc_ok ? ffi::Error::Success() : fail("no memory");
  }

  // Compares a matrix with x [tokens, in] and y [tokens, out].
  ffi::Error compare(const Rows& x, int64_t in, ffi::Span<const int64_t> y, int64_t out) const {
    if (x.dimensions()[1] != in)
      return refuse("x must be " + std::to_string(in) + " wide, got " + std::to_string(x.dimensions()[1]));
    const int64_t tokens = x.dimensions()[0];
    if (y.size() != 2 || y[0] != tokens || y[1] != out)
      return refuse("y must be [" + std::to_string(tokens) + ", " + std::to_string(out) + "]");
    return ffi::Error::Success();
  }
};

constexpr Target dots{"dynajax_dot_rows"};
constexpr Target sums{"dynajax_sum_rows"};

bool find_weights(const ffi::AnyBuffer& array, Matrix* matrix) {
  return find_matrix(array, matrix) && matrix->type != 0;
}

ffi::Error dot_rows(Rows x, ffi::RemainingArgs arrays, ffi::RemainingRets results) {
  const auto compute = library_dot_rows.load(std::memory_order_relaxed);
  if (compute == nullptr) return dots.fail("the library was not attached");
  static thread_local std::vector<hc_matrix> matrices;
  if (arrays.size() == 0 || arrays.size() != results.size()) return dots.refuse("each matrix needs a y");
  Matrix first{};
  try {
    matrices.resize(arrays.size());
  } catch (const std::bad_alloc&) {
    return dots.result(hc_no_memory);
  }
  for (size_t i = 0; i < arrays.size(); ++i) {
    const ffi::ErrorOr<ffi::AnyBuffer> array = arrays.get<ffi::AnyBuffer>(i);
    ffi::ErrorOr<ffi::Result<Rows>> y = results.get<Rows>(i);
    Matrix matrix;
    if (!array.has_value() || !find_weights(*array, &matrix))
      return dots.refuse(std::string("weights must be matrices of ") + matrix_types);
    if (!y.has_value()) return dots.refuse("y must be a matrix of float32");
    if (i == 0) first = matrix;
    if (matrix.type != first.type || matrix.width != first.width) return dots.refuse("matrices must be alike");
    const ffi::Error error = dots.compare(x, matrix.width, (*y)->dimensions(), matrix.rows);
    if (error.failure()) return error;
    matrices[i] = {array->untyped_data(), matrix.rows, (*y)->typed_data()};
  }
  const int64_t count = static_cast<int64_t>(arrays.size());
  return dots.result(
      compute(nullptr, x.typed_data(), x.dimensions()[0], matrices.data(), count, first.width, first.type));
}

ffi::Error sum_rows(Rows x, ffi::AnyBuffer weights, ffi::Result<Rows> y) {
  const auto compute = library_sum_rows.load(std::memory_order_relaxed);
  if (compute == nullptr) return sums.fail("the library was not attached");
  Matrix matrix;
  if (!find_weights(weights, &matrix))
    return sums.refuse(std::string("weights must be a matrix of ") + matrix_types);
  const ffi::Error error = sums.compare(x, matrix.rows, y->dimensions(), matrix.width);
  if (error.failure()) return error;
  const hc_matrix call{weights.untyped_data(), matrix.rows, y->typed_data()};
  return sums.result(compute(nullptr, x.typed_data(), x.dimensions()[0], &call, matrix.width, matrix.type));
}

}  // namespace

// Where the other library's functions are; before the first program runs.
HC_API void dynajax_use_dot_rows(decltype(&hc_dot_rows) address) { library_dot_rows.store(address); }
HC_API void dynajax_use_sum_rows(decltype(&hc_sum_rows) address) { library_sum_rows.store(address); }

HC_API XLA_FFI_Error* dynajax_dot_rows(XLA_FFI_CallFrame* frame);
XLA_FFI_DEFINE_HANDLER_SYMBOL(dynajax_dot_rows, dot_rows,
                              ffi::Ffi::Bind()
                                  .Arg<Rows>()        // x
                                  .RemainingArgs()    // matrices
                                  .RemainingRets());  // the y of each

HC_API XLA_FFI_Error* dynajax_sum_rows(XLA_FFI_CallFrame* frame);
XLA_FFI_DEFINE_HANDLER_SYMBOL(dynajax_sum_rows, sum_rows,
                              ffi::Ffi::Bind()
                                  .Arg<Rows>()            // x
                                  .Arg<ffi::AnyBuffer>()  // weights
                                  .Ret<Rows>());          // y
