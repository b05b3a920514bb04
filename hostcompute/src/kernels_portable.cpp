#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "weights.h"

namespace {

float to_float(float value);
float to_float(Half value);
float to_float(Brain value);

// Four floats by the compiler's vector extension: SSE2, NEON, or whatever the target has.
struct Simd {
  typedef float reg __attribute__((vector_size(16)));
  static constexpr int width = 4;
  static constexpr int max_sums = 8;

  static reg zero() { return reg{}; }
  static reg broadcast(float value) { return reg{value, value, value, value}; }
  static reg load(const float* p) {
    reg value;
    std::memcpy(&value, p, sizeof value);
    return value;
  }
  template <typename Weight>
  static reg load(const Weight* p) {
    return reg{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
  }
  static void store(float* p, reg value) { std::memcpy(p, &value, sizeof value); }
  static reg add(reg a, reg b) { return a + b; }
  static reg fma(reg a, reg b, reg c) { return a * b + c; }
  static float sum(reg value) { return (value[0] + value[2]) + (value[1] + value[3]); }
  static void stream_line(void* to, const void* from) { std::memcpy(to, from, 64); }
  static void fence() {}
};

}  // namespace

#include "kernels_impl.h"

const Kernels portable_kernels = make_kernels("portable");
