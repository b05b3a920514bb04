// What all kernels share: numbers as they lie in memory, and what is fetched while they compute. Included as
// kernels_impl.h is, before it.

namespace {

constexpr int64_t line = 64;  // bytes of a cache line

float to_float(float value) { return value; }

float to_float(Half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const uint32_t magnitude = value.bits & 0x7fff;
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;  // right even where denormals are flushed
  uint32_t bits;
  std::memcpy(&bits, &subnormal, sizeof bits);
  if (magnitude >= 0x7c00) {
    bits = 0x7f800000 | (magnitude << 13);
  } else if (magnitude >= 0x0400) {
    bits = (magnitude << 13) + 0x38000000;
  }
  bits |= sign;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

float to_float(Brain value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

constexpr int64_t chunk = 2 * line;  // bytes of a weight row that one turn of a main loop handles

// Fetches what is read next. For a single row: in pieces of two pages, one piece ahead, so that it still is in the
// first cache when its turn comes; the two halves of a piece side by side, for one page alone does not keep the
// memory busy. For several rows: the same place in each of the next ones.
template <int R>
class Ahead {
 public:
  Ahead(const void* const* rows, const void* const* next, int64_t row_bytes) : next_(next) {
    if constexpr (R == 1) {
      constexpr int64_t two_pages = 8192;
      left_ = (row_bytes + two_pages - 1) / two_pages;
      half_ = row_bytes / left_ / 2;
      at_ = static_cast<const char*>(rows[0]) + half_;
      stop_ = at_;
    }
  }

  // Inlined by force: GCC takes a function that only prefetches for one without effect, and drops the call.
  __attribute__((always_inline)) void fetch_chunk(int64_t offset) {
    if (next_ == nullptr) return;
    if constexpr (R == 1) {
      if (at_ >= stop_) {
        at_ = --left_ == 0 ? static_cast<const char*>(next_[0]) : at_ + half_;
        stop_ = at_ + half_;
      }
      __builtin_prefetch(at_);
      __builtin_prefetch(at_ + half_);
      at_ += line;
    } else {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const char* row = static_cast<const char*>(next_[r]) + offset;
        __builtin_prefetch(row, 0, 3);
        __builtin_prefetch(row + line, 0, 3);
      }
    }
  }

 private:
  const void* const* next_;
  const char* at_ = nullptr;
  const char* stop_ = nullptr;
  int64_t half_ = 0;
  int64_t left_ = 0;  // pieces of this row that are not fetched yet, the first one included
};

// A dot of R rows with T tokens where registers are few: half of the tokens, then the rest, over rows that are in the
// first cache by now.
template <int R, int T>
void in_two_passes(DotTile early, DotTile late, const void* const* rows, const float* const* x, int64_t d,
                   const void* const* next, float* out) {
  constexpr int first = T / 2;
  float part[tile * tile];
  early(rows, x, d, next, part);
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < first; ++t) out[r * T + t] = part[r * first + t];
  late(rows, x + first, d, nullptr, part);
  for (int r = 0; r < R; ++r)
    for (int t = first; t < T; ++t) out[r * T + t] = part[r * (T - first) + t - first];
}

// out[i] = the sum over regs[i], which are used up: four of them at a time, which takes as much as two alone.
template <int N>
__attribute__((always_inline)) inline void all_sums(Simd::reg (&regs)[N], float* out) {
  int at = 0;
  for (; at + 4 <= N; at += 4) {
    Simd::reg* four = regs + at;
    Simd::transpose(four);
    Simd::store_quad(out + at, Simd::add(Simd::add(four[0], four[1]), Simd::add(four[2], four[3])));
  }
  for (; at < N; ++at) out[at] = Simd::sum(regs[at]);
}

}  // namespace
