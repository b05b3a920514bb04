// Attention over a cache as an XLA custom call of the CPU backend: `dynajax_attend`. XLA would turn the
// cache into float32 first, and copy it, for every token.
#include <atomic>
#include <string>

#include "../src/api.h"
#include "weight_type.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using Heads = ffi::BufferR4<ffi::F32>;
using Positions = ffi::BufferR2<ffi::S32>;

std::atomic<decltype(&hc_attend)> library_attend{nullptr};

ffi::Error refuse(const std::string& what) { return ffi::Error::InvalidArgument("dynajax_attend: " + what); }

ffi::Error attend(Heads q, ffi::AnyBuffer k, ffi::AnyBuffer v, Positions positions, ffi::Result<Heads> y, int64_t window,
                  float scale) {
  const auto compute = library_attend.load(std::memory_order_relaxed);
  if (compute == nullptr) return ffi::Error::Internal("dynajax_attend: the library was not attached");
  const int32_t type = weight_type(k.element_type());
  if (type < 0 || v.element_type() != k.element_type())
    return refuse("k and v must both be float32, float16, bfloat16 or its bits as uint16");
  const auto of_q = q.dimensions(), of_k = k.dimensions(), of_v = v.dimensions(), of_y = y->dimensions();
  if (of_k.size() != 4 || of_v.size() != 4) return refuse("k and v must have four dimensions");
  for (int i = 0; i < 3; ++i)
    if (of_v[i] != of_k[i]) return refuse("v must have the rows of k");
  if (of_k[0] != of_q[0] || of_k[3] != of_q[3] || of_k[2] < 1 || of_q[2] % of_k[2] != 0)
    return refuse("k must have the rows and the size of q, and its heads must divide those of q");
  if (positions.dimensions()[0] != of_q[0] || positions.dimensions()[1] != of_q[1])
    return refuse("positions must be [B,T]");
  for (int i = 0; i < 3; ++i)
    if (of_y[i] != of_q[i]) return refuse("y must have the heads of q");
  if (of_y[3] != of_v[3] || window < 0) return refuse("y must be as wide as v, and window not negative");
  const hc_attention call = {q.typed_data(), k.untyped_data(), v.untyped_data(), positions.typed_data(), y->typed_data(),
                             of_q[0],        of_q[1],          of_q[2],          of_k[2],                of_k[1],
                             of_q[3],        of_v[3],          window,           scale,                  type};
  const int64_t status = compute(nullptr, &call);
  if (status == hc_no_resources) return ffi::Error::Internal("dynajax_attend: cannot start threads");
  if (status != hc_ok) return ffi::Error::Internal("dynajax_attend: no memory");
  return ffi::Error::Success();
}

}  // namespace

// Where the other library's hc_attend is; before the first program runs.
HC_API void dynajax_use_attend(decltype(&hc_attend) address) { library_attend.store(address); }

HC_API XLA_FFI_Error* dynajax_attend(XLA_FFI_CallFrame* frame);
XLA_FFI_DEFINE_HANDLER_SYMBOL(dynajax_attend, attend,
                              ffi::Ffi::Bind()
                                  .Arg<Heads>()           // q [B,T,N,H]
                                  .Arg<ffi::AnyBuffer>()  // k [B,S,KV,H]
                                  .Arg<ffi::AnyBuffer>()  // v [B,S,KV,H']
                                  .Arg<Positions>()       // [B,T]
                                  .Ret<Heads>()           // y [B,T,N,H']
                                  .Attr<int64_t>("window")
                                  .Attr<float>("scale"));
