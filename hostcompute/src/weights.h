// The 16-bit weight types as they lie in memory; NumPy's float16 and ml_dtypes' bfloat16.
#pragma once

#include <cstdint>

struct Half {
  uint16_t bits;
};

struct Brain {
  uint16_t bits;
};
