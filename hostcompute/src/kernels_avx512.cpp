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
  static void stream_line(void* to, const void* from) {
    _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_loadu_si512(from));
  }
  static void fence() { _mm_sfence(); }

 private:
  static __m256i load16(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
};

}  // namespace

#include "kernels_impl.h"

const Kernels avx512_kernels = make_kernels("avx512");

#endif
