// The FFN as an XLA custom call of the CPU backend: `dynajax_cold_ffn`. A library of its own, so that the other one
// knows nothing of jaxlib; it calls that one through the addresses in the table.
#include "call.h"

int32_t hc_abi_version(void) { return hc_abi; }

namespace {

using namespace table_call;

// Which rows are active, and whether they lie side by side.
struct Active {
  int64_t first = 0;
  int64_t end = 0;  // behind the last one
  int64_t count = 0;

  Active(const bool* marks, int64_t rows) {
    for (int64_t t = 0; t < rows; ++t) {
      if (!marks[t]) continue;
      if (count++ == 0) first = t;
      end = t + 1;
    }
  }
  bool adjacent() const { return end - first == count; }
};

class ActiveRows {
 public:
  ActiveRows(FfiLayer* layer, const float* h, const bool* marks, int64_t rows, int64_t width, float* y)
      : layer_(layer), h_(h), marks_(marks), rows_(rows), width_(width), y_(y), active_(marks, rows) {}

  // Every row of y is written, unless the status is not hc_ok. y may be h.
  int64_t run() {
    if (active_.count == 0) {
      zero(0, rows_);
      return hc_ok;
    }
    const int64_t status = active_.adjacent() ? adjacent() : scattered();
    if (status == hc_ok) add(&layer_->rows, active_.count);
    return status;
  }

 private:
  int64_t adjacent() {
    const int64_t at = active_.first * width_;
    const int64_t status = compute(h_ + at, y_ + at);
    if (status != hc_ok) return status;
    zero(0, active_.first);
    zero(active_.end, rows_);
    return hc_ok;
  }

  int64_t scattered() {
    static thread_local std::vector<float> scratch;
    float* packed = at_least(&scratch, active_.count * width_);
    float* to = packed;
    for (int64_t t = active_.first; t < active_.end; ++t)
      if (marks_[t]) to = copy(to, h_ + t * width_) + width_;
    const int64_t status = compute(packed, packed);
    if (status != hc_ok) return status;
    const float* from = packed;
    for (int64_t t = 0; t < rows_; ++t) {
      if (!marks_[t]) {
        zero(t, t + 1);
      } else {
        copy(y_ + t * width_, from);
        from += width_;
      }
    }
    return hc_ok;
  }

  int64_t compute(const float* x, float* y) {
    static thread_local std::vector<int64_t> scratch;
    int64_t* totals = at_least(&scratch, active_.count + 1);
    const int64_t status =
        layer_->ffn(layer_->pool, layer_->arena, x, active_.count, layer_->units, layer_->count, layer_->activation,
                    layer_->threshold, layer_->skip_zeros, nullptr, nullptr, y, nullptr, nullptr, totals);
    if (status != hc_ok) return status;
    int64_t live = 0;
    for (int64_t t = 0; t < active_.count; ++t) live += totals[t];
    add(&layer_->live, live);
    add(&layer_->computed, layer_->count);
    add(&layer_->bytes_read, totals[active_.count]);
    return hc_ok;
  }

  float* copy(float* to, const float* from) const {
    return static_cast<float*>(std::memcpy(to, from, width_ * sizeof(float)));
  }

  void zero(int64_t begin, int64_t end) { std::memset(y_ + begin * width_, 0, (end - begin) * width_ * sizeof(float)); }

  FfiLayer* layer_;
  const float* h_;
  const bool* marks_;
  const int64_t rows_;
  const int64_t width_;
  float* y_;
  const Active active_;
};

ffi::Error cold_ffn(Table address, Rows h, Marks active, ffi::Result<Rows> y, int32_t index) {
  Call call("dynajax_cold_ffn", index);
  if (ffi::Error error = call.open(address, h, active, *y); error.failure()) return error;
  return call.run([&](FfiLayer* layer) {
    return ActiveRows(layer, h.typed_data(), active.typed_data(), h.dimensions()[0], h.dimensions()[1],
                      y->typed_data())
        .run();
  });
}

}  // namespace

HC_API XLA_FFI_Error* dynajax_cold_ffn(XLA_FFI_CallFrame* frame);
XLA_FFI_DEFINE_HANDLER_SYMBOL(dynajax_cold_ffn, cold_ffn,
                              ffi::Ffi::Bind()
                                  .Arg<Table>()           // address
                                  .Arg<Rows>()            // h [T,D]
                                  .Arg<Marks>()           // active [T]
                                  .Ret<Rows>()            // y [T,D]
                                  .Attr<int32_t>("layer"));
