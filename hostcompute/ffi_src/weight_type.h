#pragma once

#include "xla/ffi/api/ffi.h"

// A matrix's type as in hc_arena; -1 for what is no type of weights. uint16 holds the bits of bfloat16.
inline int32_t weight_type(xla::ffi::DataType type) {
  switch (type) {
    case xla::ffi::F32:
      return 0;
    case xla::ffi::F16:
      return 1;
    case xla::ffi::BF16:
    case xla::ffi::U16:
      return 2;
    default:
      return -1;
  }
}
