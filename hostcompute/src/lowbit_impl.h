// The kernels of packed matrices; included as kernels_impl.h is, before it.
//
// Simd has for them: ints (words of 32 bits, as many as a reg has lanes), words(reg), the same bits; widen(bytes), a
// word for each; shift(ints), to the right by four bits; lookup(table, index): of 16 floats the one that the lowest
// four bits name; nibble and byte: the lowest four or eight bits as a float; quads(from, stride): four floats of each
// fourth row, side by side; transpose(reg[4]), each quad with its like.

namespace {

// What is read next: each step fetches as much of it as it reads of this panel.
class NextPanel {
 public:
  NextPanel(const void* next, int64_t bytes)
      : at_(static_cast<const char*>(next)), end_(next == nullptr ? at_ : at_ + bytes) {}

  // Inlined by force, see `Ahead`.
  __attribute__((always_inline)) void fetch(int64_t bytes) {
    if (at_ >= end_) return;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at_ + i, 0, 2);
    at_ += bytes;
  }

 private:
  const char* at_;
  const char* end_;
};

// The first `count` lanes; the others are zero.
template <typename Value>
Simd::reg load_some(const Value* from, int64_t count) {
  return count >= Simd::width ? Simd::load(from) : Simd::load_some(from, count);
}

constexpr bool is_float(const float*) { return true; }
constexpr bool is_float(const Half*) { return false; }

// `count` values of each of Simd::width rows, `stride` apart, as one reg a value; rows from the last one on repeat it.
template <typename Value>
void load_transposed(const Value* from, int64_t stride, int64_t rows, int64_t count, Simd::reg* to) {
  constexpr int lanes = Simd::width;
  float square[lanes * lanes];
  const float* source = square;
  if (is_float(from) && rows >= lanes && count >= lanes) {
    source = reinterpret_cast<const float*>(from);
  } else {
    for (int r = 0; r < lanes; ++r)
      Simd::store(square + r * lanes, load_some(from + (r < rows ? r : rows - 1) * stride, count));
    stride = lanes;
  }
  for (int column = 0; column < lanes; column += 4) {
    for (int r = 0; r < 4; ++r) to[column + r] = Simd::quads(source + column + r * stride, stride);
    Simd::transpose(to + column);
  }
}

// 1 and 2 bits: the rows lie side by side in the lanes, so that one table serves them all, and four bits of the codes
// are looked up at a time. Codes and scales are transposed as they come in; no sum goes across the lanes.
template <int Bits, int T>
void table_panel(const Panel& panel) {
  constexpr int lanes = Simd::width;
  const int64_t stride = panel.groups * Bits;  // words of a row
  const float* codes = reinterpret_cast<const float*>(panel.codes);  // moved, never computed with
  const Half* scales = reinterpret_cast<const Half*>(panel.scales);
  NextPanel next_codes(panel.next_codes, panel.rows * stride * 4);
  NextPanel next_scales(panel.next_scales, panel.rows * panel.groups * 2);
  Simd::reg totals[panel_rows(Bits) / lanes][T];
  for (auto& total : totals)
    for (int t = 0; t < T; ++t) total[t] = Simd::zero();
  for (int64_t first = 0; first < panel.groups; first += lanes) {
    const int64_t groups = panel.groups - first < lanes ? panel.groups - first : lanes;
    for (int64_t row = 0; row < panel.rows; row += lanes) {
      const int64_t left = panel.rows - row;
      Simd::reg words[lanes * Bits];
      Simd::reg factors[lanes];
      for (int64_t w = 0; w < groups * Bits; w += lanes)
        load_transposed(codes + row * stride + first * Bits + w, stride, left, groups * Bits - w, words + w);
      load_transposed(scales + row * panel.groups + first, panel.groups, left, groups, factors);
      for (int64_t g = 0; g < groups; ++g) {
        next_codes.fetch(lanes * Bits * 4);
        next_scales.fetch(lanes * 2);
        Simd::reg sums[T];
        for (int t = 0; t < T; ++t) sums[t] = Simd::zero();
#pragma GCC unroll 2
        for (int w = 0; w < Bits; ++w) {
          Simd::ints index = Simd::words(words[g * Bits + w]);
#pragma GCC unroll 8
          for (int q = 0; q < 8; ++q) {
            const int64_t table = (((first + g) * Bits + w) * 8 + q) * table_floats;
            for (int t = 0; t < T; ++t) sums[t] = Simd::add(sums[t], Simd::lookup(panel.x[t] + table, index));
            index = Simd::shift(index);
          }
        }
        for (int t = 0; t < T; ++t) totals[row / lanes][t] = Simd::fma(sums[t], factors[g], totals[row / lanes][t]);
      }
    }
  }
  for (int t = 0; t < T; ++t) {
    float all[panel_rows(Bits)];
    for (int b = 0; b < panel_rows(Bits) / lanes; ++b) Simd::store(all + b * lanes, totals[b][t]);
    std::memcpy(panel.y[t], all, panel.rows * sizeof(float));
  }
}

// sums[t] = the products of one group's codes, without scale and start, lane by lane.
template <int Bits, int T>
__attribute__((always_inline)) inline void code_sums(const uint8_t* codes, const float* const* x, Simd::reg* sums) {
  constexpr int lanes = Simd::width;
  for (int t = 0; t < T; ++t) sums[t] = Simd::zero();
#pragma GCC unroll 8
  for (int at = 0; at < 4 * Bits; at += lanes) {
    const Simd::ints words = Simd::widen(codes + at);
    const Simd::reg low = Bits == 4 ? Simd::nibble(words) : Simd::byte(words);
    for (int t = 0; t < T; ++t) sums[t] = Simd::fma(low, Simd::load(x[t] + at), sums[t]);
    if constexpr (Bits == 4) {
      const Simd::reg high = Simd::nibble(Simd::shift(words));
      for (int t = 0; t < T; ++t) sums[t] = Simd::fma(high, Simd::load(x[t] + group_columns / 2 + at), sums[t]);
    }
  }
}

// 4 and 8 bits: a few rows at a time, as they lie in memory.
template <int Bits, int T>
void code_panel(const Panel& panel) {
  constexpr int lanes = Simd::width;
  constexpr int R = tile;
  const int64_t row_bytes = panel.groups * 4 * Bits;
  NextPanel next_codes(panel.next_codes, panel.rows * row_bytes);
  NextPanel next_scales(panel.next_scales, panel.rows * panel.groups * 2);
  for (int64_t row = 0; row < panel.rows; row += R) {
    const uint8_t* codes[R];
    const Half* scales[R];
    Simd::reg totals[R][T];
    for (int r = 0; r < R; ++r) {
      const int64_t index = row + r < panel.rows ? row + r : panel.rows - 1;
      codes[r] = panel.codes + index * row_bytes;
      scales[r] = reinterpret_cast<const Half*>(panel.scales) + index * panel.groups;
      for (int t = 0; t < T; ++t) totals[r][t] = Simd::zero();
    }
    for (int64_t first = 0; first < panel.groups; first += lanes) {
      const int64_t groups = panel.groups - first < lanes ? panel.groups - first : lanes;
      float factors[R][lanes];
      for (int r = 0; r < R; ++r) {
        const Simd::reg some = load_some(scales[r] + first, groups);
        Simd::store(factors[r], some);
        for (int t = 0; t < T; ++t) {
          const float* starts = panel.x[t] + panel.groups * group_columns + first;
          totals[r][t] = Simd::fma(some, load_some(starts, groups), totals[r][t]);
        }
      }
      next_scales.fetch(R * lanes * 2);
      for (int64_t g = 0; g < groups; ++g) {
        next_codes.fetch(R * 4 * Bits);
        const float* x[T];
        for (int t = 0; t < T; ++t) x[t] = panel.x[t] + (first + g) * group_columns;
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          Simd::reg sums[T];
          code_sums<Bits, T>(codes[r] + (first + g) * 4 * Bits, x, sums);
          for (int t = 0; t < T; ++t) totals[r][t] = Simd::fma(sums[t], Simd::broadcast(factors[r][g]), totals[r][t]);
        }
      }
    }
    for (int r = 0; r < R && row + r < panel.rows; ++r)
      for (int t = 0; t < T; ++t) panel.y[t][row + r] = Simd::sum(totals[r][t]);
  }
}

}  // namespace
