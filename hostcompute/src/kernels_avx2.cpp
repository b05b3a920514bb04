#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "weights.h"

#pragma GCC target("avx2,fma,f16c")

namespace {

struct Simd {
  using reg = __m256;
  using ints = __m256i;
  static constexpr int width = 8;
  static constexpr int max_sums = 8;
  static constexpr int max_pairs = 8;
  static constexpr int gemm_vectors = 2;
  static constexpr int gemm_sums = 12;

  static reg zero() { return _mm256_setzero_ps(); }
  static reg broadcast(float value) { return _mm256_set1_ps(value); }
  static reg load(const float* p) { return _mm256_loadu_ps(p); }
  static reg load(const Half* p) { return _mm256_cvtph_ps(load16(p)); }
  static reg load(const Brain* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load16(p)), 16));
  }
  template <typename Value>
  static reg load_some(const Value* p, int64_t count) {
    Value part[width] = {};
    std::memcpy(part, p, count * sizeof(Value));
    return load(part);
  }
  static void store(float* p, reg value) { _mm256_storeu_ps(p, value); }
  static reg mul(reg a, reg b) { return _mm256_mul_ps(a, b); }
  static reg add(reg a, reg b) { return _mm256_add_ps(a, b); }
  static reg fma(reg a, reg b, reg c) { return _mm256_fmadd_ps(a, b, c); }
  static float sum(reg value) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  static void store_quad(float* p, reg value) {
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1)));
  }
  static ints words(reg value) { return _mm256_castps_si256(value); }
  static ints widen(const uint8_t* bytes) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
  }
  static ints shift(ints words) { return _mm256_srli_epi32(words, 4); }
  static reg lookup(const float* table, ints index) {
    const reg low = _mm256_permutevar8x32_ps(load(table), index);
    const reg high = _mm256_permutevar8x32_ps(load(table + width), index);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
  }
  static reg nibble(ints words) { return _mm256_cvtepi32_ps(_mm256_and_si256(words, _mm256_set1_epi32(0xf))); }
  static reg byte(ints words) { return _mm256_cvtepi32_ps(words); }
  static reg nibble_level(ints words) { return _mm256_sub_ps(nibble(words), _mm256_set1_ps(8.0f)); }
  static reg byte_levels(const uint8_t* bytes) { return _mm256_sub_ps(byte(widen(bytes)), _mm256_set1_ps(128.0f)); }
  static reg quads(const float* from, int64_t stride) {
    const reg low = _mm256_castps128_ps256(_mm_loadu_ps(from));
    return _mm256_insertf128_ps(low, _mm_loadu_ps(from + 4 * stride), 1);
  }
  static void transpose(reg* rows) {
    const reg low01 = _mm256_unpacklo_ps(rows[0], rows[1]);
    const reg low23 = _mm256_unpacklo_ps(rows[2], rows[3]);
    const reg high01 = _mm256_unpackhi_ps(rows[0], rows[1]);
    const reg high23 = _mm256_unpackhi_ps(rows[2], rows[3]);
    rows[0] = _mm256_shuffle_ps(low01, low23, 0x44);
    rows[1] = _mm256_shuffle_ps(low01, low23, 0xee);
    rows[2] = _mm256_shuffle_ps(high01, high23, 0x44);
    rows[3] = _mm256_shuffle_ps(high01, high23, 0xee);
  }
  static void stream_line(void* to, const void* from) {
    __m256i* target = static_cast<__m256i*>(to);
    const __m256i* source = static_cast<const __m256i*>(from);
    _mm256_stream_si256(target, _mm256_loadu_si256(source));
    _mm256_stream_si256(target + 1, _mm256_loadu_si256(source + 1));
  }
  static void fence() { _mm_sfence(); }

 private:
  static __m128i load16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
};

}  // namespace

#include "common_impl.h"
#include "lowbit_impl.h"
#include "packed_impl.h"
#include "gemm_impl.h"
#include "attend_impl.h"
#include "kernels_impl.h"

namespace {

struct Bytes {
  using ints = Simd::ints;

  static ints load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static ints load_some(const void* p, int64_t bytes) {
    alignas(32) uint8_t part[32] = {};
    std::memcpy(part, p, bytes);
    return load(part);
  }
  static ints none() { return _mm256_setzero_si256(); }
  static ints fill(int byte) { return _mm256_set1_epi8(static_cast<char>(byte)); }
  static void store_negated(int32_t* p, ints words) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_sub_epi32(none(), words));
  }
  static ints add(ints a, ints b) { return _mm256_add_epi32(a, b); }
  template <int N>
  static ints shift_up(ints words) {
    return _mm256_slli_epi32(words, N);
  }
  static ints code_low(ints codes) { return _mm256_and_si256(codes, _mm256_set1_epi8(0xf)); }
  static ints code_high(ints codes) { return code_low(_mm256_srli_epi16(codes, 4)); }
  static ints dot(ints sum, ints codes, ints digits) {
    return add(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, digits), _mm256_set1_epi16(1)));
  }
  template <int N>
  static Simd::reg spread(Simd::reg from, int i) {
    static_assert(N == 2);
    const ints first = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
    return _mm256_permutevar8x32_ps(from, add(first, _mm256_set1_epi32(i * N)));
  }
};

}  // namespace

#include "digits_impl.h"

const Kernels avx2_kernels = with_digits(make_kernels("avx2"));

#endif
