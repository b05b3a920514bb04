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

  static reg zero() { return _mm512_setzero_ps(); }
  static reg broadcast(float value) { return _mm512_set1_ps(value); }
  static reg load(const float* p) { return _mm512_loadu_ps(p); }
  static reg load(const Half* p) { return _mm512_cvtph_ps(load16(p)); }
  static reg load(const Brain* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load16(p)), 16));
  }
  static void store(float* p, reg value) { _mm512_storeu_ps(p, value); }
  static reg add(reg a, reg b) { return _mm512_add_ps(a, b); }
  static reg fma(reg a, reg b, reg c) { return _mm512_fmadd_ps(a, b, c); }
  static float sum(reg value) { return _mm512_reduce_add_ps(value); }
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
  static void transpose(reg* rows) {
    reg pairs[width];
    for (int i = 0; i < width; i += 2) {
      pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
      pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
    reg fours[width];  // [i + c]: of four rows from i on, the columns c, c + 4, c + 8 and c + 12
    for (int i = 0; i < width; i += 4) {
      for (int c = 0; c < 4; c += 2) {
        const __m512d first = _mm512_castps_pd(pairs[i + c / 2]);
        const __m512d second = _mm512_castps_pd(pairs[i + c / 2 + 2]);
        fours[i + c] = _mm512_castpd_ps(_mm512_unpacklo_pd(first, second));
        fours[i + c + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(first, second));
      }
    }
    for (int c = 0; c < 4; ++c) {
      const reg even_low = _mm512_shuffle_f32x4(fours[c], fours[c + 4], 0x88);
      const reg even_high = _mm512_shuffle_f32x4(fours[c + 8], fours[c + 12], 0x88);
      const reg odd_low = _mm512_shuffle_f32x4(fours[c], fours[c + 4], 0xdd);
      const reg odd_high = _mm512_shuffle_f32x4(fours[c + 8], fours[c + 12], 0xdd);
      rows[c] = _mm512_shuffle_f32x4(even_low, even_high, 0x88);
      rows[c + 4] = _mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
      rows[c + 8] = _mm512_shuffle_f32x4(even_low, even_high, 0xdd);
      rows[c + 12] = _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd);
    }
  }
  static void stream_line(void* to, const void* from) {
    _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_loadu_si512(from));
  }
  static void fence() { _mm_sfence(); }

 private:
  static __m256i load16(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
};

}  // namespace

#include "lowbit_impl.h"
#include "kernels_impl.h"

const Kernels avx512_kernels = make_kernels("avx512");

#endif
