// Five tokens and more of which every neuron is computed: bound by arithmetic. Tiles of rows and tokens whose operands
// are in a cache; what is read next is fetched meanwhile, a bit before each tile.
#include <algorithm>

#include "plan.h"

namespace {

constexpr int64_t line_floats = 16;
constexpr int64_t piece_bytes = 4096;  // of a row: a tile's rows and tokens stay in the first cache

// Cuts tokens, or columns, into nearly equal pieces of at most `most`, which begin at multiples of `unit`.
class Pieces {
 public:
  Pieces(int64_t total, int64_t most, int64_t unit = 1)
      : total_(total), unit_(unit), count_(std::max<int64_t>(1, (total + most - 1) / most)) {}
  int64_t count() const { return count_; }
  int64_t begin(int64_t piece) const { return piece == count_ ? total_ : total_ * piece / count_ / unit_ * unit_; }
  int64_t size(int64_t piece) const { return begin(piece + 1) - begin(piece); }

 private:
  int64_t total_;
  int64_t unit_;
  int64_t count_;
};

// Rows that are read next, to be fetched into the second cache: spread over the calls of a kernel, each of which
// fetches as much of a row as it reads of one.
class Upcoming {
 public:
  Upcoming(const void* const* rows, int64_t count, int64_t pieces, int64_t step, int64_t calls)
      : rows_(rows), count_(count), total_(count * pieces), step_(step), calls_(calls) {}

  // For the next call: null, or `tile` of them, the same several times if there are fewer.
  const void* const* take() {
    const int64_t begin = call_ * total_ / calls_;
    const int64_t some = std::min<int64_t>(tile, ++call_ * total_ / calls_ - begin);
    if (some <= 0) return nullptr;
    for (int64_t i = 0; i < tile; ++i) {
      const int64_t at = begin + i % some;
      taken_[i] = static_cast<const char*>(rows_[at % count_]) + at / count_ * step_;
    }
    return taken_;
  }

 private:
  const void* const* rows_;
  const int64_t count_;
  const int64_t total_;
  const int64_t step_;  // bytes from piece to piece of a row
  const int64_t calls_;
  int64_t call_ = 0;
  const void* taken_[tile];
};

class Dense {
 public:
  Dense(const Plan& plan, float* y, float* values)
      : plan_(plan),
        d_(plan.call.arena.width),
        element_(is_packed(plan.call.arena.dtype) ? sizeof(float) : plan.row_bytes() / d_),
        tiles_(is_packed(plan.call.arena.dtype) ? plan.wide_tiles : plan.tiles),
        y_(y),
        h_(values),
        up_(values + max_block * plan.tokens),
        wide_(is_packed(plan.call.arena.dtype) ? values + 3 * max_block * plan.tokens : nullptr) {}

  int64_t compute(int thread) {
    int64_t rows_read = 0;
    for (int64_t block = thread; block < plan_.blocks; block += plan_.threads) {
      rows_ = plan_.find_rows(block, base_);
      upcoming_ = plan_.find_upcoming(block + plan_.threads, upcoming_base_);
      first_ = plan_.begin(block);
      bring(0);
      dots(0, h_);
      activate();
      if (plan_.has_gate()) {
        bring(1);
        dots(1, up_);
        multiply_by_up();
      }
      bring(plan_.down());
      tiles_.axpy_block[0] != nullptr ? add_block() : add_tiles();
      rows_read += static_cast<int64_t>(plan_.call.arena.parts) * rows_;
    }
    return rows_read;
  }

 private:
  void activate() {
    for (int64_t t = 0; t < plan_.tokens; ++t)
      for (int r = 0; r < rows_; ++r) h_[t * rows_ + r] = plan_.activate(first_ + r, t, h_[t * rows_ + r]);
    if (!plan_.has_gate()) tell();
  }

  void multiply_by_up() {
    for (int64_t t = 0; t < plan_.tokens; ++t) {
      for (int r = 0; r < rows_; ++r) {
        float& h = h_[t * rows_ + r];
        h = plan_.times_up(first_ + r, t, h, up_[t * rows_ + r]);
      }
    }
    tell();
  }

  void tell() const {
    if (plan_.call.values == nullptr) return;
    for (int64_t t = 0; t < plan_.tokens; ++t)
      for (int r = 0; r < rows_; ++r) plan_.tell(first_ + r, t, h_[t * rows_ + r]);
  }

  // Makes a part ready for the kernels; packed rows are there until the next part is brought.
  void bring(int part) const {
    for (int r = 0; wide_ != nullptr && r < rows_; ++r)
      plan_.tiles.widen(base_[r] + plan_.part_place(part), d_, 0, d_, wide_ + r * d_);
  }

  // The rows of a part that was brought, from a column on.
  void find_part(int part, int64_t column, const void** rows) const {
    for (int r = 0; r < rows_; ++r)
      rows[r] = wide_ != nullptr ? reinterpret_cast<const char*>(wide_ + r * d_ + column)
                                 : base_[r] + plan_.part_place(part) + column * element_;
  }

  // What is read behind a part of this block: the next part, or the gates of the next block. Returns how many rows.
  int find_next(int part, const void** rows) const {
    if (wide_ != nullptr) return 0;  // the kernels read what is in a cache
    if (part < plan_.down()) {
      find_part(part + 1, 0, rows);
      return rows_;
    }
    std::copy_n(upcoming_base_, upcoming_, rows);
    return upcoming_;
  }

  Upcoming spread(int part, const void** rows, int64_t pieces, int64_t calls) const {
    return {rows, find_next(part, rows), pieces, plan_.row_bytes() / pieces, calls};
  }

  int tiles() const { return rows_ / tile + rows_ % tile; }
  int tile_at(int r) const { return rows_ - r >= tile ? tile : 1; }

  // result[t * rows_ + r] = x[t] . row r, for all tokens and all neurons of the block.
  void dots(int part, float* result) const {
    const Pieces columns(d_, piece_bytes / element_, line_floats);
    const Pieces tokens(plan_.tokens, tiles_.wide_dot != nullptr ? wide_tokens : tile);
    const void* rows[max_block];
    const void* next[max_block];
    Upcoming upcoming = spread(part, next, columns.count(), columns.count() * tokens.count() * tiles());
    for (int64_t c = 0; c < columns.count(); ++c) {
      find_part(part, columns.begin(c), rows);
      for (int64_t group = 0; group < tokens.count(); ++group) {
        const int64_t t0 = tokens.begin(group);
        const int some = static_cast<int>(tokens.size(group));
        const float* x[wide_tokens];
        for (int t = 0; t < some; ++t) x[t] = plan_.x(t0 + t) + columns.begin(c);
        for (int r0 = 0, n; r0 < rows_; r0 += n) {
          n = tile_at(r0);
          float out[tile * wide_tokens];
          dot(n, rows + r0, x, some, columns.size(c), upcoming.take(), out);
          for (int t = 0; t < some; ++t) {
            float* to = result + (t0 + t) * rows_ + r0;
            for (int r = 0; r < n; ++r) to[r] = (c == 0 ? 0 : to[r]) + out[r * some + t];
          }
        }
      }
    }
  }

  // Of `tile` rows or one.
  void dot(int n, const void* const* rows, const float* const* x, int tokens, int64_t d, const void* const* next,
           float* out) const {
    if (tokens <= tile) return tiles_.dot[n != 1][tokens - 1](rows, x, d, next, out);
    if (n == tile) return tiles_.wide_dot(rows, x, d, next, out);
    tiles_.dot[0][tile - 1](rows, x, d, next, out);
    tiles_.dot[0][0](rows, x + tile, d, nullptr, out + tile);
  }

  void add_block() const {
    const Pieces tokens(plan_.tokens, block_tokens);
    const void* rows[max_block];
    const void* next[max_block];
    find_part(plan_.down(), 0, rows);
    const int64_t fetched = find_next(plan_.down(), next);
    for (int64_t group = 0; group < tokens.count(); ++group) {
      const int64_t t0 = tokens.begin(group);
      float* y[block_tokens];
      for (int t = 0; t < tokens.size(group); ++t) y[t] = plan_.y(y_, t0 + t);
      const int64_t from = fetched * group / tokens.count();
      const int64_t some = std::min<int64_t>(rows_, fetched * (group + 1) / tokens.count() - from);
      tiles_.axpy_block[tokens.size(group) - 1](
          {rows, rows_, h_ + t0 * rows_, rows_, d_, next + from, static_cast<int>(some), y});
    }
  }

  void add_tiles() const {
    const Pieces columns(d_, piece_bytes / element_, line_floats);
    const Pieces tokens(plan_.tokens, tile);
    const void* rows[max_block];
    const void* next[max_block];
    Upcoming upcoming = spread(plan_.down(), next, columns.count(), columns.count() * tokens.count() * tiles());
    for (int64_t c = 0; c < columns.count(); ++c) {
      find_part(plan_.down(), columns.begin(c), rows);
      for (int64_t group = 0; group < tokens.count(); ++group) {
        const int64_t t0 = tokens.begin(group);
        const int some = static_cast<int>(tokens.size(group));
        float* y[tile];
        for (int t = 0; t < some; ++t) y[t] = plan_.y(y_, t0 + t) + columns.begin(c);
        for (int r0 = 0, n; r0 < rows_; r0 += n) {
          n = tile_at(r0);
          float h[tile * tile];
          for (int r = 0; r < n; ++r)
            for (int t = 0; t < some; ++t) h[r * some + t] = h_[(t0 + t) * rows_ + r0 + r];
          tiles_.axpy[n != 1][some - 1](rows + r0, h, columns.size(c), upcoming.take(), y);
        }
      }
    }
  }

  const Plan& plan_;
  const int64_t d_;
  const int64_t element_;  // bytes
  const Tiles& tiles_;
  float* const y_;
  float* const h_;   // [tokens, rows_]: gate, then its activation, then times up
  float* const up_;  // [tokens, rows_]
  float* const wide_;  // [rows_, D] of the part that was brought; null where the kernels read the rows as they are
  const char* base_[max_block];
  const char* upcoming_base_[max_block];  // gates of the block that is read next
  int64_t first_ = 0;                     // neuron of the block
  int rows_ = 0;
  int upcoming_ = 0;
};

}  // namespace

int64_t compute_dense(const Plan& plan, int thread, float* y, float* values) {
  return Dense(plan, y, values).compute(thread);
}
