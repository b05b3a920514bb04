// The kernels of packed rows (int8, int4); included as kernels_impl.h is, before it. A row has the codes of all its
// groups, laid out as lowbit.h says, and behind them the float16 scales.
//
// Simd has for them, besides what lowbit_impl.h wants: mul; nibble_level, what the lowest four bits of a word stand for
// before they are scaled; and byte_levels, what each of a few bytes stands for.

namespace {

constexpr int group_steps = 16 / Simd::width;  // each of which handles two registers of columns, half a group apart
constexpr int group_half = group_columns / 2;
constexpr int scales_ahead = 128;  // that are made ready at a time: a number is slow to load that was stored just now

template <int Bits, int R>
struct PackedRows {
  static constexpr int64_t group_bytes = 4 * Bits;
  const uint8_t* codes[R];
  const Half* scales[R];

  PackedRows(const void* const* rows, int64_t groups) {
    for (int r = 0; r < R; ++r) {
      codes[r] = static_cast<const uint8_t*>(rows[r]);
      scales[r] = reinterpret_cast<const Half*>(codes[r] + groups * group_bytes);
    }
  }
};

// A group's columns from step * Simd::width on, and those half a group further on, without their scale.
template <int Bits>
__attribute__((always_inline)) inline void load_levels(const uint8_t* codes, int step, Simd::reg* levels) {
  const uint8_t* from = codes + step * Simd::width;
  if constexpr (Bits == 4) {
    const Simd::ints words = Simd::widen(from);
    levels[0] = Simd::nibble_level(words);
    levels[1] = Simd::nibble_level(Simd::shift(words));
  } else {
    levels[0] = Simd::byte_levels(from);
    levels[1] = Simd::byte_levels(from + group_half);
  }
}

// Calls group(index, place, k) for every group: its index, its place among the groups whose scales were made ready by
// scales(first, count), and the index modulo 4; and fetches meanwhile what is read next.
template <int Bits, int R, typename Scales, typename Group>
__attribute__((always_inline)) inline void for_groups(const void* const* rows, const void* const* next, int64_t groups,
                                                      Scales scales, Group group) {
  constexpr int64_t quad_bytes = 4 * (4 * Bits + 2);
  Ahead<R> ahead(rows, next, groups * quad_bytes / 4);
  int64_t fetched = 0;
  for (int64_t first = 0; first < groups; first += scales_ahead) {
    const int64_t count = groups - first < scales_ahead ? groups - first : scales_ahead;
    scales(first, count);
    int64_t at = 0;
    for (; at + 4 <= count; at += 4) {
      if (fetched <= (first + at) / 4 * quad_bytes) {
        ahead.fetch_chunk(fetched);
        fetched += chunk;
      }
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) group(first + at + k, at + k, k);
    }
    for (; at < count; ++at) group(first + at, at, 0);
  }
}

// The levels of one step of a group, of every row; times the group's scale where they meet more than one token.
template <int Bits, int R, bool Scaled>
__attribute__((always_inline)) inline void load_rows(const PackedRows<Bits, R>& packed, int64_t index, int step,
                                                     const float (&factors)[R][scales_ahead], int64_t place,
                                                     Simd::reg (&levels)[R][2]) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    load_levels<Bits>(packed.codes[r] + index * packed.group_bytes, step, levels[r]);
    if constexpr (Scaled) {
      const Simd::reg factor = Simd::broadcast(factors[r][place]);
      for (Simd::reg& level : levels[r]) level = Simd::mul(level, factor);
    }
  }
}

template <int Bits, int R, int T>
void packed_dot(const void* const* rows, const float* const* x, int64_t d, const void* const* next, float* out) {
  if constexpr (R * T > Simd::max_pairs && T > 1) {
    in_two_passes<R, T>(packed_dot<Bits, R, T / 2>, packed_dot<Bits, R, T - T / 2>, rows, x, d, next, out);
  } else {
    constexpr int K = R * T >= 4 ? 1 : 4 / (R * T);
    const PackedRows<Bits, R> packed(rows, d / group_columns);
    float factors[R][scales_ahead];
    Simd::reg sums[R][T][K];
    for (int r = 0; r < R; ++r)
      for (int t = 0; t < T; ++t)
        for (int k = 0; k < K; ++k) sums[r][t][k] = Simd::zero();
    const auto scales = [&](int64_t first, int64_t count) __attribute__((always_inline)) {
      for (int r = 0; r < R; ++r)
        for (int64_t at = 0; at < count; at += Simd::width)
          Simd::store(factors[r] + at, load_some(packed.scales[r] + first + at, count - at));
    };
    const auto group = [&](int64_t index, int64_t place, int k) __attribute__((always_inline)) {
      Simd::reg products[R];
#pragma GCC unroll 4
      for (int step = 0; step < group_steps; ++step) {
        Simd::reg levels[R][2];
        load_rows<Bits, R, (T > 1)>(packed, index, step, factors, place, levels);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
          const float* from = x[t] + index * group_columns + step * Simd::width;
          const Simd::reg low = Simd::load(from);
          const Simd::reg high = Simd::load(from + group_half);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) {
            if constexpr (T > 1) {
              sums[r][t][k % K] = Simd::fma(levels[r][1], high, Simd::fma(levels[r][0], low, sums[r][t][k % K]));
            } else {
              const Simd::reg first = step == 0 ? Simd::mul(levels[r][0], low)
                                                : Simd::fma(levels[r][0], low, products[r]);
              products[r] = Simd::fma(levels[r][1], high, first);
            }
          }
        }
      }
      if constexpr (T == 1) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
          sums[r][0][k % K] = Simd::fma(products[r], Simd::broadcast(factors[r][place]), sums[r][0][k % K]);
      }
    };
    for_groups<Bits, R>(rows, next, d / group_columns, scales, group);
    Simd::reg totals[R * T];
    for (int r = 0; r < R; ++r) {
      for (int t = 0; t < T; ++t) {
        totals[r * T + t] = sums[r][t][0];
        for (int k = 1; k < K; ++k) totals[r * T + t] = Simd::add(totals[r * T + t], sums[r][t][k]);
      }
    }
    all_sums<R * T>(totals, out);
  }
}

template <int Bits, int R, int T>
void packed_axpy(const void* const* rows, const float* h, int64_t d, const void* const* next, float* const* y) {
  const PackedRows<Bits, R> packed(rows, d / group_columns);
  Simd::reg weights[R][T];
  float factors[R][scales_ahead];  // scales; of a single token times its weight
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) weights[r][t] = Simd::broadcast(h[r * T + t]);
  const auto scales = [&](int64_t first, int64_t count) __attribute__((always_inline)) {
    for (int r = 0; r < R; ++r) {
      for (int64_t at = 0; at < count; at += Simd::width) {
        const Simd::reg some = load_some(packed.scales[r] + first + at, count - at);
        Simd::store(factors[r] + at, T == 1 ? Simd::mul(some, weights[r][0]) : some);
      }
    }
  };
  const auto group = [&](int64_t index, int64_t place, int) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int step = 0; step < group_steps; ++step) {
      Simd::reg levels[R][2];
      load_rows<Bits, R, (T > 1)>(packed, index, step, factors, place, levels);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        float* to = y[t] + index * group_columns + step * Simd::width;
        Simd::reg low = Simd::load(to);
        Simd::reg high = Simd::load(to + group_half);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const Simd::reg weight = T > 1 ? weights[r][t] : Simd::broadcast(factors[r][place]);
          low = Simd::fma(weight, levels[r][0], low);
          high = Simd::fma(weight, levels[r][1], high);
        }
        Simd::store(to, low);
        Simd::store(to + group_half, high);
      }
    }
  };
  for_groups<Bits, R>(rows, next, d / group_columns, scales, group);
}

template <int Bits>
void packed_widen(const void* row, int64_t d, int64_t begin, int64_t end, float* to) {
  const PackedRows<Bits, 1> packed(&row, d / group_columns);
  const int64_t last = end / group_columns;
  for (int64_t first = begin / group_columns; first < last; first += Simd::width) {
    const int64_t count = last - first < Simd::width ? last - first : Simd::width;
    float factors[Simd::width];
    Simd::store(factors, load_some(packed.scales[0] + first, count));
    for (int64_t g = 0; g < count; ++g, to += group_columns) {
      const Simd::reg factor = Simd::broadcast(factors[g]);
#pragma GCC unroll 4
      for (int step = 0; step < group_steps; ++step) {
        Simd::reg levels[2];
        load_levels<Bits>(packed.codes[0] + (first + g) * packed.group_bytes, step, levels);
        Simd::store(to + step * Simd::width, Simd::mul(levels[0], factor));
        Simd::store(to + group_half + step * Simd::width, Simd::mul(levels[1], factor));
      }
    }
  }
}

template <int Bits>
constexpr Tiles make_packed_tiles() {
  return {{{packed_dot<Bits, 1, 1>, packed_dot<Bits, 1, 2>, packed_dot<Bits, 1, 3>, packed_dot<Bits, 1, 4>},
           {packed_dot<Bits, 4, 1>, packed_dot<Bits, 4, 2>, packed_dot<Bits, 4, 3>, packed_dot<Bits, 4, 4>}},
          {{packed_axpy<Bits, 1, 1>, packed_axpy<Bits, 1, 2>, packed_axpy<Bits, 1, 3>, packed_axpy<Bits, 1, 4>},
           {packed_axpy<Bits, 4, 1>, packed_axpy<Bits, 4, 2>, packed_axpy<Bits, 4, 3>, packed_axpy<Bits, 4, 4>}},
          packed_widen<Bits>,
          {packed_dot<Bits, 2, 1>, packed_dot<Bits, 2, 2>},
          {packed_axpy<Bits, 2, 1>, packed_axpy<Bits, 2, 2>}};
}

}  // namespace
