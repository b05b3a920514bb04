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
  typedef int32_t ints __attribute__((vector_size(16)));
  static constexpr int width = 4;
  static constexpr int max_sums = 8;
  static constexpr int max_pairs = 8;
  static constexpr int gemm_vectors = 2;
  static constexpr int gemm_sums = 12;

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
  template <typename Value>
  static reg load_some(const Value* p, int64_t count) {
    Value part[width] = {};
    std::memcpy(part, p, count * sizeof(Value));
    return load(part);
  }
  static void store(float* p, reg value) { std::memcpy(p, &value, sizeof value); }
  static reg mul(reg a, reg b) { return a * b; }
  static reg add(reg a, reg b) { return a + b; }
  static reg fma(reg a, reg b, reg c) { return a * b + c; }
  static float sum(reg value) { return (value[0] + value[2]) + (value[1] + value[3]); }
  static void store_quad(float* p, reg value) { store(p, value); }
  static ints words(reg value) {
    ints result;
    std::memcpy(&result, &value, sizeof result);
    return result;
  }
  static ints widen(const uint8_t* bytes) {
    typedef uint8_t four __attribute__((vector_size(4)));
    four narrow;
    std::memcpy(&narrow, bytes, sizeof narrow);
    return __builtin_convertvector(narrow, ints);
  }
  static ints shift(ints words) { return words >> 4; }
  static reg lookup(const float* table, ints index) {
    index &= 0xf;
    return reg{table[index[0]], table[index[1]], table[index[2]], table[index[3]]};
  }
  static reg nibble(ints words) { return __builtin_convertvector(words & 0xf, reg); }
  static reg byte(ints words) { return __builtin_convertvector(words, reg); }
  static reg nibble_level(ints words) { return nibble(words) - 8.0f; }
  static reg byte_levels(const uint8_t* bytes) { return byte(widen(bytes)) - 128.0f; }
  static reg quads(const float* from, int64_t) { return load(from); }
  static void transpose(reg* rows) {
    const reg copy[width] = {rows[0], rows[1], rows[2], rows[3]};
    for (int i = 0; i < width; ++i) rows[i] = reg{copy[0][i], copy[1][i], copy[2][i], copy[3][i]};
  }
  static void stream_line(void* to, const void* from) { std::memcpy(to, from, 64); }
  static void fence() {}
};

}  // namespace

#include "common_impl.h"
#include "lowbit_impl.h"
#include "packed_impl.h"
#include "gemm_impl.h"
#include "attend_impl.h"
#include "kernels_impl.h"

const Kernels portable_kernels = make_kernels("portable");
