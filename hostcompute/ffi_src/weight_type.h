// What custom calls take for a matrix of weights.
#pragma once

#include "xla/ffi/api/ffi.h"

struct Matrix {
  int64_t rows;
  int64_t width;  // values of a row
  int32_t type;   // as in hc_arena
  int64_t row_bytes;

  bool operator==(const Matrix& other) const {
    return rows == other.rows && width == other.width && type == other.type;
  }
};

constexpr char matrix_types[] = "float16, bfloat16 or its bits as uint16, or packed in uint8 [rows,groups,34 or 18]";

// False for what is none. uint16 holds the bits of bfloat16; uint8 [rows, groups, bytes] is packed, see src/api.h.
inline bool find_matrix(const xla::ffi::AnyBuffer& array, Matrix* matrix) {
  const auto sizes = array.dimensions();
  if (sizes.size() < 2) return false;
  *matrix = {sizes[0], sizes[1], -1, 0};
  switch (array.element_type()) {
    case xla::ffi::F32:
      matrix->type = 0;
      break;
    case xla::ffi::F16:
      matrix->type = 1;
      break;
    case xla::ffi::BF16:
    case xla::ffi::U16:
      matrix->type = 2;
      break;
    case xla::ffi::U8: {
      if (sizes.size() != 3 || (sizes[2] != 34 && sizes[2] != 18)) return false;
      *matrix = {sizes[0], sizes[1] * 32, sizes[2] == 34 ? 3 : 4, sizes[1] * sizes[2]};
      return true;
    }
    default:
      return false;
  }
  matrix->row_bytes = matrix->width * (matrix->type == 0 ? 4 : 2);
  return sizes.size() == 2;
}
