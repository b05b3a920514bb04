#include "gemm.h"

namespace {

constexpr int64_t line = 64;

}  // namespace

Gemm::Lines::Lines(const Gemm& gemm, const RowSet& rows, int64_t column, int64_t columns) {
  columns = std::min(columns, gemm.width_ - column);
  constexpr int64_t bits_of[dtypes] = {32, 16, 16, 8, 4};  // of packed rows the codes
  const int64_t bits = bits_of[gemm.dtype_];
  for (int64_t r = 0; r < rows.count; ++r) {
    const char* from = static_cast<const char*>(rows.rows[r]) + column * bits / 8;
    for (int64_t at = 0; at < columns * bits / 8; at += line) lines_[count_++] = from + at;
  }
}

void Gemm::dots(const PackedTokens& x, const RowSet& rows, const RowSet& next, float* y, int64_t step) const {
  float* sums = scratch_ + gemm_rows * gemm_stride;
  products(x, rows, next, sums);
  gemm_.unpack(sums, x.stride(), rows.count, x.tokens(), y, step);
}

void Gemm::products(const PackedTokens& x, const RowSet& rows, const RowSet& next, float* sums) const {
  std::memset(sums, 0, gemm_rows * x.stride() * sizeof(float));
  int64_t calls = 0;
  for (int64_t group = 0; group < x.groups(); ++group) {
    const int64_t tile_rows = gemm_.sums / x.vectors(group);
    calls += ceil_div(rows.count, tile_rows);
  }
  for (int64_t piece = 0; piece < x.pieces(); ++piece) {
    const int64_t column = piece * gemm_columns;
    const int64_t columns = x.columns(piece);
    for (int64_t r = 0; r < rows.count; ++r)
      widen_(rows.rows[r], width_, column, column + columns, scratch_ + r * gemm_stride);
    const bool last = piece + 1 == x.pieces();
    Lines lines(*this, last ? next : rows, last ? 0 : column + gemm_columns, gemm_columns);
    for (int64_t group = 0; group < x.groups(); ++group) {
      const int64_t tile_rows = gemm_.sums / x.vectors(group);
      for (int64_t r = 0; r < rows.count; r += tile_rows) {
        const Lines::Some now = lines.take(calls);
        gemm_.dot[x.vectors(group) - 1]({scratch_ + r * gemm_stride, x.data(piece, group), columns,
                                         sums + r * x.stride() + x.first(group), x.stride(), now.lines, now.count});
      }
    }
  }
}
