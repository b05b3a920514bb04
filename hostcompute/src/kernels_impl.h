// The kernels, written once over a `Simd` type. Each kernels_<isa>.cpp defines its own `Simd`, switches its
// target on, and includes this file. All is in an unnamed namespace and uses no template of the standard
// library: code compiled for AVX-512 must not be shared by the linker with code for any CPU.
//
// Simd has: reg, width, max_sums (registers for running sums), max_pairs (of a row and a token, so that registers are
// left for the operands), zero, broadcast, load (of each weight type), store, add, fma, sum, transpose and store_quad
// (see all_sums), and stream_line(to, from), which copies 64 aligned bytes past the caches. What packed matrices need
// besides is said in lowbit_impl.h.

namespace {

// Running sums per pair of row and token: several where registers are left, to hide the latency of fma.
template <typename Weight>
constexpr int sums_each(int pairs) {
  const int vectors = chunk / sizeof(Weight) / Simd::width;
  const int fit = Simd::max_sums / pairs;
  const int most = fit < 4 ? fit : 4;
  return most < 1 ? 1 : most < vectors ? most : vectors;
}

template <typename Weight, int R, int T>
void dot_tile(const void* const* rows, const float* const* x, int64_t d, const void* const* next, float* out) {
  if constexpr (R * T > Simd::max_pairs && T > 1) {
    in_two_passes<R, T>(dot_tile<Weight, R, T / 2>, dot_tile<Weight, R, T - T / 2>, rows, x, d, next, out);
  } else {
    constexpr int K = sums_each<Weight>(R * T);
    typename Simd::reg sums[R][T][K];
    const Weight* w[R];
    for (int r = 0; r < R; ++r) {
      w[r] = static_cast<const Weight*>(rows[r]);
      for (int t = 0; t < T; ++t)
        for (int k = 0; k < K; ++k) sums[r][t][k] = Simd::zero();
    }
    const auto step = [&](int64_t at, int k) __attribute__((always_inline)) {
      typename Simd::reg weights[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) weights[r] = Simd::load(w[r] + at);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const typename Simd::reg xs = Simd::load(x[t] + at);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sums[r][t][k] = Simd::fma(weights[r], xs, sums[r][t][k]);
      }
    };
    constexpr int64_t per_chunk = chunk / sizeof(Weight);
    Ahead<R> ahead(rows, next, d * sizeof(Weight));
    int64_t i = 0;
    for (; i + per_chunk <= d; i += per_chunk) {
      ahead.fetch_chunk(i * sizeof(Weight));
#pragma GCC unroll 16
      for (int v = 0; v < per_chunk / Simd::width; ++v) step(i + v * Simd::width, v % K);
    }
    for (; i + Simd::width <= d; i += Simd::width) step(i, 0);
    Simd::reg totals[R * T];
    for (int r = 0; r < R; ++r) {
      for (int t = 0; t < T; ++t) {
        totals[r * T + t] = sums[r][t][0];
        for (int k = 1; k < K; ++k) totals[r * T + t] = Simd::add(totals[r * T + t], sums[r][t][k]);
      }
    }
    all_sums<R * T>(totals, out);
    for (int r = 0; r < R; ++r)
      for (int t = 0; t < T; ++t)
        for (int64_t k = i; k < d; ++k) out[r * T + t] += to_float(w[r][k]) * x[t][k];
  }
}

template <typename Weight, int R, int T>
void axpy_tile(const void* const* rows, const float* h, int64_t d, const void* const* next, float* const* y) {
  const Weight* w[R];
  typename Simd::reg factors[R][T];  // the compiler would load them anew after each store to y, which might be h
  for (int r = 0; r < R; ++r) {
    w[r] = static_cast<const Weight*>(rows[r]);
    for (int t = 0; t < T; ++t) factors[r][t] = Simd::broadcast(h[r * T + t]);
  }
  const auto step = [&](int64_t at) __attribute__((always_inline)) {
    typename Simd::reg weights[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) weights[r] = Simd::load(w[r] + at);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      typename Simd::reg ys = Simd::load(y[t] + at);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) ys = Simd::fma(factors[r][t], weights[r], ys);
      Simd::store(y[t] + at, ys);
    }
  };
  constexpr int64_t per_chunk = chunk / sizeof(Weight);
  Ahead<R> ahead(rows, next, d * sizeof(Weight));
  int64_t i = 0;
  for (; i + per_chunk <= d; i += per_chunk) {
    ahead.fetch_chunk(i * sizeof(Weight));
#pragma GCC unroll 16
    for (int v = 0; v < per_chunk / Simd::width; ++v) step(i + v * Simd::width);
  }
  for (; i + Simd::width <= d; i += Simd::width) step(i);
  for (; i < d; ++i)
    for (int t = 0; t < T; ++t)
      for (int r = 0; r < R; ++r) y[t][i] += h[r * T + t] * to_float(w[r][i]);
}

template <typename Weight>
void widen_row(const void* row, int64_t, int64_t begin, int64_t end, float* to) {
  const Weight* from = static_cast<const Weight*>(row);
  int64_t i = begin;
  for (; i + Simd::width <= end; i += Simd::width, to += Simd::width) Simd::store(to, Simd::load(from + i));
  for (; i < end; ++i) *to++ = to_float(from[i]);
}

void copy(void* to, const void* from, int64_t bytes) {
  char* target = static_cast<char*>(to);
  const char* source = static_cast<const char*>(from);
  const int64_t misaligned = -reinterpret_cast<int64_t>(target) & (line - 1);
  const int64_t head = misaligned < bytes ? misaligned : bytes;
  std::memcpy(target, source, head);
  constexpr int64_t ahead = 16 * line;
  int64_t i = head;
  for (; i + line <= bytes; i += line) {
    __builtin_prefetch(source + i + ahead, 0, 0);
    Simd::stream_line(target + i, source + i);
  }
  std::memcpy(target + i, source + i, bytes - i);
  Simd::fence();
}

uint64_t read_sum(const void* data, int64_t bytes) {
  typedef uint64_t Words __attribute__((vector_size(line), aligned(1), may_alias));
  const char* source = static_cast<const char*>(data);
  Words sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * line <= bytes; i += 4 * line) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) sums[k] += *reinterpret_cast<const Words*>(source + i + k * line);
  }
  uint64_t total = 0;
  for (int k = 0; k < 4; ++k)
    for (unsigned word = 0; word < line / sizeof(uint64_t); ++word) total += sums[k][word];
  for (; i + 8 <= bytes; i += 8) {
    uint64_t word;
    std::memcpy(&word, source + i, sizeof word);
    total += word;
  }
  return total;
}

template <typename Weight>
constexpr Tiles make_tiles() {
  return {{{dot_tile<Weight, 1, 1>, dot_tile<Weight, 1, 2>, dot_tile<Weight, 1, 3>, dot_tile<Weight, 1, 4>},
           {dot_tile<Weight, 4, 1>, dot_tile<Weight, 4, 2>, dot_tile<Weight, 4, 3>, dot_tile<Weight, 4, 4>}},
          {{axpy_tile<Weight, 1, 1>, axpy_tile<Weight, 1, 2>, axpy_tile<Weight, 1, 3>, axpy_tile<Weight, 1, 4>},
           {axpy_tile<Weight, 4, 1>, axpy_tile<Weight, 4, 2>, axpy_tile<Weight, 4, 3>, axpy_tile<Weight, 4, 4>}},
          widen_row<Weight>,
          {dot_tile<Weight, 2, 1>, dot_tile<Weight, 2, 2>},
          {axpy_tile<Weight, 2, 1>, axpy_tile<Weight, 2, 2>}};
}

constexpr Kernels make_kernels(const char* isa) {
  return {isa,
          {make_tiles<float>(), make_tiles<Half>(), make_tiles<Brain>(), make_packed_tiles<8>(),
           make_packed_tiles<4>()},
          make_gemm(),
          softmax,
          softmax_more,
          activate,
          {{table_panel<1, 1>, table_panel<1, 2>},
           {table_panel<2, 1>, table_panel<2, 2>},
           {code_panel<4, 1>, code_panel<4, 2>},
           {code_panel<8, 1>, code_panel<8, 2>}},
          copy,
          read_sum};
}

}  // namespace
