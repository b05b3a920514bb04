// What the handlers that use a table have in common.
#pragma once

#include <chrono>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "table.h"
#include "xla/ffi/api/ffi.h"

namespace table_call {

namespace ffi = xla::ffi;
using Table = ffi::BufferR1<ffi::U32>;
using Rows = ffi::BufferR2<ffi::F32>;
using Marks = ffi::BufferR1<ffi::PRED>;

inline void add(int64_t* counter, int64_t value) { __atomic_fetch_add(counter, value, __ATOMIC_RELAXED); }

// Memory that a thread keeps from call to call.
template <typename T>
T* at_least(std::vector<T>* scratch, int64_t size) {
  if (static_cast<int64_t>(scratch->size()) < size) scratch->resize(size);
  return scratch->data();
}

// A custom call: its name, and the layer of the table that it computes.
class Call {
 public:
  Call(const char* name, int32_t index) : name_(name), index_(index) {}

  // Finds the layer and compares it with the operands that all such calls have.
  ffi::Error open(const Table& address, const Rows& h, const Marks& active, const Rows& y) {
    if (address.dimensions()[0] != 2) return refuse("the table must be uint32[2]");
    const FfiTable* table = nullptr;
    std::memcpy(&table, address.typed_data(), sizeof table);
    if (table == nullptr) return refuse("the table's address is zero");
    if (index_ < 0 || index_ >= table->layers)
      return refuse("layer must be in [0, " + std::to_string(table->layers) + "), got " + std::to_string(index_));
    layer_ = table->layer + index_;
    if (layer_->ffn == nullptr) return fail(layer_not_attached);
    const int64_t rows = h.dimensions()[0];
    const int64_t width = h.dimensions()[1];
    if (width != layer_->arena->width)
      return refuse("h must be " + std::to_string(layer_->arena->width) + " wide, got " + std::to_string(width));
    if (active.dimensions()[0] != rows)
      return refuse("active must have " + std::to_string(rows) + " rows, got " +
                    std::to_string(active.dimensions()[0]));
    if (y.dimensions()[0] != rows || y.dimensions()[1] != width) return refuse("y must have the shape of h");
    return ffi::Error::Success();
  }

  // Runs compute(layer), which returns a status, and counts its time.
  template <typename Compute>
  ffi::Error run(Compute compute) {
    int64_t status = hc_no_memory;
    try {
      status = compute(layer_);
    } catch (const std::bad_alloc&) {
    }
    if (status != hc_ok) return fail(status);
    add(&layer_->nanoseconds, std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin_).count());
    return ffi::Error::Success();
  }

  ffi::Error refuse(const std::string& what) const {
    return ffi::Error::InvalidArgument(std::string(name_) + ": " + what);
  }

 private:
  using Clock = std::chrono::steady_clock;

  ffi::Error fail(int64_t status) {
    int64_t none = hc_ok;
    __atomic_compare_exchange_n(&layer_->status, &none, status, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return ffi::Error::Internal(std::string(name_) + ": layer " + std::to_string(index_) + ": " + reason(status));
  }

  std::string reason(int64_t status) const {
    if (status == layer_not_attached) return "nothing is attached";
    if (status == hc_no_memory) return "no memory";
    if (status > layer_no_expert) return "unit " + std::to_string(status - 1) + " is out of range";
    const int32_t id = static_cast<int32_t>(static_cast<uint32_t>(layer_no_expert - status));
    return "there is no expert " + std::to_string(id);
  }

  const char* name_;
  const int32_t index_;
  const Clock::time_point begin_ = Clock::now();
  FfiLayer* layer_ = nullptr;
};

}  // namespace table_call
