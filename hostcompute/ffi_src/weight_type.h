// What custom calls take for a matrix of weights.
#pragma once

#include "xla/ffi/api/ffi.h"

struct Matrix {
  int64_t rows;
  int64_t width;  // values of a row
  int32_t type;   // as in hc_arena
  int64_t row_bytes;
};

constexpr char matrix_types[] = "float16, bfloat16 or its bits as uint16, or packed in uint8 [rows, groups, 34 or 18]";

// A type of numbers as in hc_arena; -1 for what is none. uint16 holds the bits of bfloat16.
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

// False for what is none; uint8 [rows, groups, bytes] is packed, see src/api.h.
inline bool find_matrix(const xla::ffi::AnyBuffer& array, Matrix* matrix) {
  const auto sizes = array.dimensions();
  if (sizes.size() < 2) return false;
  if (array.element_type() == xla::ffi::U8) {
    if (sizes.size() != 3 || (sizes[2] != 34 && sizes[2] != 18)) return false;
    *matrix = {sizes[0], sizes[1] * 32, sizes[2] == 34 ? 3 : 4, sizes[1] * sizes[2]};
    return true;
  }
  const int32_t type = weight_type(array.element_type());
  *matrix = {sizes[0], sizes[1], type, sizes[1] * (type == 0 ? 4 : 2)};
  return type >= 0 && sizes.size() == 2;
}
