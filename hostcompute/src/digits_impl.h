// int4 rows times one token in integers; included after packed_impl.h, where a set has `Bytes`.
//
// Of each group the token is written as whole multiples of a power of two, exact to 2^-22 of its largest value, and
// these as three digits of a signed byte each. One instruction then multiplies and adds four codes with four digits,
// and the three sums are put together before anything is rounded: about as exact as summing in float32, in half the
// instructions. (int8 rows, with eight bits in a code, leave three digits room for 20 bits only, and wait for memory.)
//
// Bytes has: ints; load, load_some, none (zeros), fill, store_negated, add, shift_up<n>; code_low and code_high, the
// lowest and the highest four bits of each byte; dot(sum, codes, digits), which adds to each word four codes times four
// digits; spread<n>(reg, i), its floats from n * i on, n of them, each in as many lanes as fill a register.

namespace {

constexpr int code_zero = 8;  // the code that stands for 0
constexpr int digit_bits = 8;
constexpr int token_bits = 22;  // of the largest value of a group, without its sign
constexpr int token_digits = 3;

// The groups whose codes fill a register. The first halves of groups lie in low bits, the second in high ones.
struct DigitBlock {
  static constexpr int64_t bytes = Simd::width * 4;
  static constexpr int64_t group_bytes = group_columns / 2;
  static constexpr int64_t groups = bytes / group_bytes;
  static constexpr int group_lanes = group_bytes / 4;

  int8_t digits[token_digits][2][bytes];  // the highest ones first
  int32_t start[Simd::width];             // what takes `code_zero` off all codes
  float unit[Simd::width];                // what 1 stands for, in each lane's group
};

// Of less than 2^22: added to 1.5 * 2^23, a float has no bits left behind the point.
inline int32_t nearest(float value) {
  value += 0x1.8p23f;
  int32_t word;
  std::memcpy(&word, &value, sizeof word);
  return word - 0x4b400000;
}

inline float from_bits(uint32_t word) {
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

// What the sums of a higher digit and of the next one come to.
__attribute__((always_inline)) inline Bytes::ints put_together(Bytes::ints high, Bytes::ints low) {
  return Bytes::add(Bytes::shift_up<digit_bits>(high), low);
}

// The digits of one group; returns what their 1 stands for.
float group_digits(const float* x, int8_t (&digits)[token_digits][group_columns]) {
  constexpr int half = 1 << (digit_bits - 1);
  uint32_t words[group_columns];
  std::memcpy(words, x, sizeof words);
  uint32_t largest = 0;  // the bits of it without the sign, which are in the order of the numbers
  for (const uint32_t word : words) largest = (word & 0x7fffffff) > largest ? word & 0x7fffffff : largest;
  const int exponent = static_cast<int>(largest >> 23);
  // 2^(exponent - 127 + 1 - token_bits), no less than the smallest normal number; no number if x is none.
  const uint32_t place = exponent > token_bits ? exponent + 1 - token_bits : 1;
  const float inverse = from_bits((254 - place) << 23);
  int32_t left[group_columns];
  for (int i = 0; i < group_columns; ++i) left[i] = nearest(x[i] * inverse);
  for (int digit = token_digits - 1; digit > 0; --digit) {
    for (int i = 0; i < group_columns; ++i) {
      const int32_t above = (left[i] + half) >> digit_bits;
      digits[digit][i] = static_cast<int8_t>(left[i] - (above << digit_bits));
      left[i] = above;
    }
  }
  for (int i = 0; i < group_columns; ++i) digits[0][i] = static_cast<int8_t>(left[i]);
  return from_bits(exponent == 255 ? 0x7fc00000 : place << 23);
}

void make_digits(const float* x, int64_t d, float* to) {
  const int64_t groups = d / group_columns;
  DigitBlock* const begin = reinterpret_cast<DigitBlock*>(to);
  DigitBlock* const end = begin + (groups + DigitBlock::groups - 1) / DigitBlock::groups;
  if (groups % DigitBlock::groups != 0) std::memset(end - 1, 0, sizeof *end);
  for (int64_t group = 0; group < groups; ++group) {
    DigitBlock& block = begin[group / DigitBlock::groups];
    const int64_t g = group % DigitBlock::groups;
    int8_t digits[token_digits][group_columns];
    const float unit = group_digits(x + group * group_columns, digits);
    for (int lane = 0; lane < DigitBlock::group_lanes; ++lane) block.unit[g * DigitBlock::group_lanes + lane] = unit;
    for (int digit = 0; digit < token_digits; ++digit)
      for (int half = 0; half < 2; ++half)
        std::memcpy(block.digits[digit][half] + g * DigitBlock::group_bytes,
                    digits[digit] + half * DigitBlock::group_bytes, DigitBlock::group_bytes);
  }
  for (DigitBlock* block = begin; block < end; ++block) {  // only now: what was just stored is slow to load
    Bytes::ints words = Bytes::none();
    for (const auto& digits : block->digits) {
      const Bytes::ints first = Bytes::dot(Bytes::none(), Bytes::fill(code_zero), Bytes::load(digits[0]));
      words = put_together(words, Bytes::dot(first, Bytes::fill(code_zero), Bytes::load(digits[1])));
    }
    Bytes::store_negated(block->start, words);
  }
}

template <int R>
void digit_dot(const void* const* rows, const float* const* x, int64_t d, const void* const* next, float* out) {
  constexpr int64_t block_groups = DigitBlock::groups;
  const int64_t groups = d / group_columns;
  const PackedRows<4, R> packed(rows, groups);
  const DigitBlock* block = reinterpret_cast<const DigitBlock*>(x[0]);
  Ahead<R> ahead(rows, next, groups * (DigitBlock::group_bytes + 2));
  int64_t fetched = 0;
  Simd::reg sums[R];
  for (int r = 0; r < R; ++r) sums[r] = Simd::zero();
  // `left` groups, or all that a block has; `number`: of the block among those whose scales lie in `factors`.
  const auto add = [&](const Simd::reg (&factors)[R], int64_t group, int64_t left, int number)
                       __attribute__((always_inline)) {
    if (fetched <= group * (DigitBlock::group_bytes + 2)) {
      ahead.fetch_chunk(fetched);
      fetched += chunk;
    }
    Bytes::ints codes[R][2];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const uint8_t* from = packed.codes[r] + group * DigitBlock::group_bytes;
      const Bytes::ints both =
          left >= block_groups ? Bytes::load(from) : Bytes::load_some(from, left * DigitBlock::group_bytes);
      codes[r][0] = Bytes::code_low(both);
      codes[r][1] = Bytes::code_high(both);
    }
    Bytes::ints words[R];
#pragma GCC unroll 3
    for (int digit = 0; digit < token_digits; ++digit) {
      const Bytes::ints low = Bytes::load(block->digits[digit][0]);
      const Bytes::ints high = Bytes::load(block->digits[digit][1]);
      const Bytes::ints start = digit + 1 < token_digits ? Bytes::none() : Bytes::load(block->start);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const Bytes::ints sum = Bytes::dot(Bytes::dot(start, codes[r][0], low), codes[r][1], high);
        words[r] = digit == 0 ? sum : put_together(words[r], sum);
      }
    }
    const Simd::reg unit = Simd::load(block->unit);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Simd::reg factor = Simd::mul(Bytes::spread<block_groups>(factors[r], number), unit);
      sums[r] = Simd::fma(Simd::byte(words[r]), factor, sums[r]);
    }
    ++block;
  };
  constexpr int blocks = Simd::width / block_groups;  // whose scales fill a register
  int64_t group = 0;
  for (; group + Simd::width <= groups; group += Simd::width) {
    Simd::reg factors[R];
    for (int r = 0; r < R; ++r) factors[r] = Simd::load(packed.scales[r] + group);
#pragma GCC unroll 4
    for (int i = 0; i < blocks; ++i) add(factors, group + i * block_groups, block_groups, i);
  }
  if (group < groups) {
    Simd::reg factors[R];
    for (int r = 0; r < R; ++r) factors[r] = load_some(packed.scales[r] + group, groups - group);
#pragma GCC unroll 4
    for (int i = 0; i < blocks; ++i) {
      const int64_t left = groups - group - i * block_groups;
      if (left <= 0) break;
      add(factors, group + i * block_groups, left, i);
    }
  }
  all_sums<R>(sums, out);
}

constexpr Kernels with_digits(Kernels kernels) {
  kernels.tiles[4].digits = {sizeof(DigitBlock) / sizeof(float), DigitBlock::groups, make_digits,
                             {digit_dot<1>, digit_dot<pair>, digit_dot<tile>}};
  return kernels;
}

}  // namespace
