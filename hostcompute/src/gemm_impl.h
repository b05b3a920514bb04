// The micro-kernels of products with many tokens; included as kernels_impl.h is, before it.
//
// Simd has for them: gemm_vectors, how many registers of tokens one tile has at most, and gemm_sums, how many registers
// of running sums, so that some are left for the operands.

namespace {

// Tokens lie in the lanes and rows are broadcast, so that no sum goes across the lanes and every operand that is loaded
// is used several times.
template <int V>
void gemm_dot(const GemmTile& call) {
  constexpr int R = Simd::gemm_sums / V;
  Simd::reg sums[R][V];
#pragma GCC unroll 24
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sums[r][v] = Simd::zero();
  const float* rows = call.rows;
  const float* tokens = call.tokens;
  const auto step = [&](int k) __attribute__((always_inline)) {
    Simd::reg x[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) x[v] = Simd::load(tokens + (k * V + v) * Simd::width);
#pragma GCC unroll 24
    for (int r = 0; r < R; ++r) {
      const Simd::reg weight = Simd::broadcast(rows[r * gemm_stride + k]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[r][v] = Simd::fma(weight, x[v], sums[r][v]);
    }
  };
  constexpr int turn = 4;
  const void* const* fetch = call.fetch;
  const void* const* const fetched = fetch + call.fetches;
  int64_t k = 0;
  for (; k + turn <= call.columns; k += turn, rows += turn, tokens += turn * V * Simd::width) {
    for (int i = 0; i < 2 && fetch < fetched; ++i) __builtin_prefetch(*fetch++, 0, 2);
#pragma GCC unroll 4
    for (int i = 0; i < turn; ++i) step(i);
  }
  for (; k < call.columns; ++k, ++rows, tokens += V * Simd::width) step(0);
#pragma GCC unroll 24
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      float* to = call.sums + r * call.stride + v * Simd::width;
      Simd::store(to, Simd::add(Simd::load(to), sums[r][v]));
    }
}

// The sums of some columns stay in registers while all rows pass. Fetches a line with each row.
template <int T, int V>
int64_t gemm_sum_columns(const GemmBlock& call, int64_t column, int64_t fetched) {
  Simd::reg sums[T][V];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sums[t][v] = Simd::load(call.y[t] + column + v * Simd::width);
  const float* row = call.rows + column;
  for (int64_t r = 0; r < call.count; ++r, row += call.columns) {
    if (fetched < call.fetches) __builtin_prefetch(call.fetch[fetched++], 0, 2);
    Simd::reg weights[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) weights[v] = Simd::load(row + v * Simd::width);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const Simd::reg factor = Simd::broadcast(call.h[t * call.token_step + r * call.row_step]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[t][v] = Simd::fma(factor, weights[v], sums[t][v]);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) Simd::store(call.y[t] + column + v * Simd::width, sums[t][v]);
  return fetched;
}

template <int T>
void gemm_sum(const GemmBlock& call) {
  constexpr int V = Simd::gemm_vectors;
  int64_t i = 0;
  int64_t fetched = 0;
  for (; i + V * Simd::width <= call.columns; i += V * Simd::width) fetched = gemm_sum_columns<T, V>(call, i, fetched);
  for (; i + Simd::width <= call.columns; i += Simd::width) fetched = gemm_sum_columns<T, 1>(call, i, fetched);
  for (; i < call.columns; ++i)
    for (int64_t r = 0; r < call.count; ++r)
      for (int t = 0; t < T; ++t)
        call.y[t][i] += call.h[t * call.token_step + r * call.row_step] * call.rows[r * call.columns + i];
}

// The sums of V registers of columns stay where they are while the rows pass.
template <int V>
void gemm_sparse_columns(const GemmSparse& call, int64_t column) {
  Simd::reg sums[V];
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) sums[v] = Simd::load(call.y + column + v * Simd::width);
  for (int64_t k = 0; k < call.count; ++k) {
    const float* row = call.rows + call.indices[k] * call.columns + column;
    const Simd::reg value = Simd::broadcast(call.values[k]);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sums[v] = Simd::fma(value, Simd::load(row + v * Simd::width), sums[v]);
  }
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) Simd::store(call.y + column + v * Simd::width, sums[v]);
}

void gemm_sparse_sum(const GemmSparse& call) {
  constexpr int V = 8;
  for (int64_t i = 0; i < call.fetches; ++i) __builtin_prefetch(call.fetch[i], 0, 2);
  int64_t column = 0;
  for (; column + V * Simd::width <= call.columns; column += V * Simd::width) gemm_sparse_columns<V>(call, column);
  for (; column + Simd::width <= call.columns; column += Simd::width) gemm_sparse_columns<1>(call, column);
  for (; column < call.columns; ++column)
    for (int64_t k = 0; k < call.count; ++k)
      call.y[column] += call.values[k] * call.rows[call.indices[k] * call.columns + column];
}

template <int V>
constexpr GemmDot gemm_dot_kernel() {
  if constexpr (V <= Simd::gemm_vectors) {
    return gemm_dot<V>;
  } else {
    return nullptr;
  }
}

void gemm_pack(const float* const* x, int64_t tokens, int64_t begin, int64_t columns, float* to) {
  constexpr int lanes = Simd::width;
  const int64_t vectors = (tokens + lanes - 1) / lanes;
  for (int64_t v = 0; v < vectors; ++v) {
    for (int64_t column = 0; column < columns; column += lanes) {
      float square[lanes * lanes] = {};
      for (int64_t t = 0; t < lanes && v * lanes + t < tokens; ++t)
        Simd::store(square + t * lanes, load_some(x[v * lanes + t] + begin + column, columns - column));
      Simd::reg turned[lanes];
      load_transposed(square, lanes, lanes, lanes, turned);
      for (int64_t c = 0; c < lanes && column + c < columns; ++c)
        Simd::store(to + ((column + c) * vectors + v) * lanes, turned[c]);
    }
  }
}

void gemm_unpack(const float* sums, int64_t stride, int64_t rows, int64_t tokens, float* y, int64_t step) {
  constexpr int lanes = Simd::width;
  for (int64_t r = 0; r < rows; r += lanes) {
    for (int64_t t = 0; t < tokens; t += lanes) {
      Simd::reg turned[lanes];
      load_transposed(sums + r * stride + t, stride, lanes, lanes, turned);
      for (int64_t i = 0; i < lanes && t + i < tokens; ++i) {
        float* to = y + (t + i) * step + r;
        if (rows - r >= lanes) {
          Simd::store(to, turned[i]);
        } else {
          float some[lanes];
          Simd::store(some, turned[i]);
          std::memcpy(to, some, (rows - r) * sizeof(float));
        }
      }
    }
  }
}

constexpr GemmKernels make_gemm() {
  return {Simd::width,
          Simd::gemm_vectors,
          Simd::gemm_sums,
          {gemm_dot_kernel<1>(), gemm_dot_kernel<2>(), gemm_dot_kernel<3>(), gemm_dot_kernel<4>()},
          {gemm_sum<1>, gemm_sum<2>, gemm_sum<3>, gemm_sum<4>, gemm_sum<5>, gemm_sum<6>},
          gemm_sparse_sum,
          gemm_pack,
          gemm_unpack};
}

}  // namespace
