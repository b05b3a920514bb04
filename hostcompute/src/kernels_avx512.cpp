#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "weights.h"

// GCC 12 warns of the undefined value that its own AVX-512 header passes on purpose.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512vl,avx2,fma,f16c")

namespace {

struct Simd {
  using reg = __m512;
  using ints = __m512i;
  static constexpr int width = 16;
  static constexpr int max_sums = 16;
  static constexpr int max_pairs = 24;
  static constexpr int gemm_vectors = 4;
  static constexpr int gemm_sums = 24;

  static reg zero() { return _mm512_setzero_ps(); }
  static reg broadcast(float value) { return _mm512_set1_ps(value); }
  static reg load(const float* p) { return _mm512_loadu_ps(p); }
  static reg load(const Half* p) { return _mm512_cvtph_ps(load16(p)); }
  static reg load(const Brain* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load16(p)), 16));
  }
  static reg load_some(const float* p, int64_t count) { return _mm512_maskz_loadu_ps(first(count), p); }
  static reg load_some(const Half* p, int64_t count) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(count), p));
  }
  static void store(float* p, reg value) { _mm512_storeu_ps(p, value); }
  static reg mul(reg a, reg b) { return _mm512_mul_ps(a, b); }
  static reg add(reg a, reg b) { return _mm512_add_ps(a, b); }
  static reg fma(reg a, reg b, reg c) { return _mm512_fmadd_ps(a, b, c); }
  static float sum(reg value) { return _mm512_reduce_add_ps(value); }
  static void store_quad(float* p, reg value) {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(value), _mm256_castpd_ps(_mm512_extractf64x4_pd(
                                                                         _mm512_castps_pd(value), 1)));
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
  }
  static ints words(reg value) { return _mm512_castps_si512(value); }
  static ints widen(const uint8_t* bytes) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
  }
  static ints shift(ints words) { return _mm512_srli_epi32(words, 4); }
  static reg lookup(const float* table, ints index) { return _mm512_permutexvar_ps(index, load(table)); }
  static reg nibble(ints words) {
    return _mm512_permutexvar_ps(words, _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  }
  static reg byte(ints words) { return _mm512_cvtepi32_ps(words); }
  static reg nibble_level(ints words) {
    return _mm512_permutexvar_ps(words, _mm512_setr_ps(-8.0f, -7.0f, -6.0f, -5.0f, -4.0f, -3.0f, -2.0f, -1.0f, 0.0f,
                                                       1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f, 7.0f));
  }
  static reg byte_levels(const uint8_t* bytes) { return _mm512_sub_ps(byte(widen(bytes)), _mm512_set1_ps(128.0f)); }
  static reg quads(const float* from, int64_t stride) {
    reg result = _mm512_castps128_ps512(_mm_loadu_ps(from));
    result = _mm512_insertf32x4(result, _mm_loadu_ps(from + 4 * stride), 1);
    result = _mm512_insertf32x4(result, _mm_loadu_ps(from + 8 * stride), 2);
    return _mm512_insertf32x4(result, _mm_loadu_ps(from + 12 * stride), 3);
  }
  static void transpose(reg* rows) {
    const reg low01 = _mm512_unpacklo_ps(rows[0], rows[1]);
    const reg low23 = _mm512_unpacklo_ps(rows[2], rows[3]);
    const reg high01 = _mm512_unpackhi_ps(rows[0], rows[1]);
    const reg high23 = _mm512_unpackhi_ps(rows[2], rows[3]);
    rows[0] = _mm512_shuffle_ps(low01, low23, 0x44);
    rows[1] = _mm512_shuffle_ps(low01, low23, 0xee);
    rows[2] = _mm512_shuffle_ps(high01, high23, 0x44);
    rows[3] = _mm512_shuffle_ps(high01, high23, 0xee);
  }
  static void stream_line(void* to, const void* from) {
    _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_loadu_si512(from));
  }
  static void fence() { _mm_sfence(); }

 private:
  static __mmask16 first(int64_t lanes) { return static_cast<__mmask16>((1u << lanes) - 1); }
  static __m256i load16(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
};

}  // namespace

#include "common_impl.h"
#include "lowbit_impl.h"
#include "packed_impl.h"
#include "gemm_impl.h"
#include "attend_impl.h"
#include "kernels_impl.h"

const Kernels avx512_kernels = make_kernels("avx512");

#pragma GCC push_options
#pragma GCC target("avx512vnni")

namespace {

struct Bytes {
  using ints = Simd::ints;

  static ints load(const void* p) { return _mm512_loadu_si512(p); }
  static ints load_some(const void* p, int64_t bytes) {
    return _mm512_maskz_loadu_epi8((uint64_t{1} << bytes) - 1, p);
  }
  static ints none() { return _mm512_setzero_si512(); }
  static ints fill(int byte) { return _mm512_set1_epi8(static_cast<char>(byte)); }
  static void store_negated(int32_t* p, ints words) { _mm512_storeu_si512(p, _mm512_sub_epi32(none(), words)); }
  static ints add(ints a, ints b) { return _mm512_add_epi32(a, b); }
  template <int N>
  static ints shift_up(ints words) {
    return _mm512_slli_epi32(words, N);
  }
  static ints code_low(ints codes) { return _mm512_and_si512(codes, _mm512_set1_epi8(0xf)); }
  static ints code_high(ints codes) { return code_low(_mm512_srli_epi16(codes, 4)); }
  static ints dot(ints sum, ints codes, ints digits) { return _mm512_dpbusd_epi32(sum, codes, digits); }
  template <int N>
  static Simd::reg spread(Simd::reg from, int i) {
    static_assert(N == 4);
    const ints first = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return _mm512_permutexvar_ps(add(first, _mm512_set1_epi32(i * N)), from);
  }
};

}  // namespace

#include "digits_impl.h"

const Kernels avx512vnni_kernels = with_digits(make_kernels("avx512vnni"));

#pragma GCC pop_options

#endif
