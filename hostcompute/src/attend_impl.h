// Softmax and activations; included as kernels_impl.h is, before it. Plain loops that compilers turn into vectors of
// whatever there is.

namespace {

// exp(x) for x <= 0, and NaN for NaN. Cephes' polynomial.
inline float exp_of(float x) {
  constexpr float least = -87.0f;
  constexpr float to_integer = 12582912.0f;  // added and taken away again it rounds
  x = x < least ? least : x;
  const float n = (x * 1.44269504f + to_integer) - to_integer;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

// values become their activation; live: whether it is not zero. The comparisons let a NaN through.
void activate(float* values, int64_t count, int32_t activation, float threshold, uint8_t* live) {
  if (activation == silu) {
    for (int64_t i = 0; i < count; ++i) {
      const float power = exp_of(values[i] < 0 ? values[i] : -values[i]);
      values[i] *= (values[i] < 0 ? power : 1.0f) / (1.0f + power);
    }
  } else {
    const bool bare = activation != fatrelu;
    for (int64_t i = 0; i < count; ++i) {
      const bool dead = bare ? values[i] <= 0 : values[i] < threshold;
      values[i] = dead ? 0.0f : values[i];
    }
  }
  for (int64_t i = 0; i < count; ++i) live[i] = values[i] != 0;
}

void softmax(float* scores, int64_t keys, int count, float* sums) {
  float most[tile];
  for (int t = 0; t < count; ++t) most[t] = scores[t];
  for (int64_t s = 1; s < keys; ++s)
    for (int t = 0; t < count; ++t) most[t] = scores[s * count + t] > most[t] ? scores[s * count + t] : most[t];
  for (int64_t s = 0; s < keys; ++s)
    for (int t = 0; t < count; ++t) scores[s * count + t] -= most[t];
  for (int64_t i = 0; i < keys * count; ++i) scores[i] = exp_of(scores[i]);
  for (int t = 0; t < count; ++t) sums[t] = 0;
  for (int64_t s = 0; s < keys; ++s)
    for (int t = 0; t < count; ++t) sums[t] += scores[s * count + t];
}

void softmax_more(const SoftmaxBlock& block) {
  constexpr int lanes = 16;
  for (int64_t first = 0; first < block.queries; first += lanes) {
    float most[lanes];
    float sums[lanes];
    int32_t begin[lanes];
    int32_t end[lanes];
    for (int q = 0; q < lanes; ++q) {
      most[q] = block.most[first + q];
      begin[q] = block.begin[first + q];
      end[q] = block.end[first + q];
    }
    for (int32_t s = 0; s < block.keys; ++s) {
      const float* row = block.scores + s * block.queries + first;
      for (int q = 0; q < lanes; ++q) {
        const float score = s >= begin[q] && s < end[q] ? row[q] : most[q];
        most[q] = score > most[q] ? score : most[q];
      }
    }
    for (int q = 0; q < lanes; ++q) {
      const float factor = exp_of(block.most[first + q] - most[q]);
      block.factors[first + q] = factor;
      sums[q] = block.sums[first + q] * factor;
      block.most[first + q] = most[q];
    }
    for (int32_t s = 0; s < block.keys; ++s) {
      float* row = block.scores + s * block.queries + first;
      for (int q = 0; q < lanes; ++q) {
        const float weight = exp_of(row[q] - most[q]);
        row[q] = s >= begin[q] && s < end[q] ? weight : 0.0f;
        sums[q] += row[q];
      }
    }
    for (int q = 0; q < lanes; ++q) block.sums[first + q] = sums[q];
  }
}

}  // namespace
