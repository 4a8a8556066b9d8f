// The online softmax of one row over one tile of keys, and what changes scores before it.

constexpr float kInf = __builtin_inff();
constexpr float kLog2e = 1.44269504088896340736f;

// Above this the rounding of scale * score could put a weight far above 1; products of smaller
// ones are within 2^-9 of it.
constexpr float kFused = 8192.0f;

// c * tanh(s / c). Where s / c is small the difference of exponentials would lose digits.
static inline V::F soft_cap(V::F s, float cap) {
  V::F x = V::mul(s, V::set1(1.0f / cap));
  V::F size = V::abs(x);
  V::F e = V::template exp2<5>(V::mul(size, V::set1(-2.0f * kLog2e)));
  V::F large = V::div(V::sub(V::set1(1.0f), e), V::add(V::set1(1.0f), e));
  V::F y = V::mul(x, x);  // Taylor series up to x^11; below 0.25 its rest is under 1e-9
  V::F p = V::fma(V::set1(-1382.0f / 155925.0f), y, V::set1(62.0f / 2835.0f));
  p = V::fma(p, y, V::set1(-17.0f / 315.0f));
  p = V::fma(p, y, V::set1(2.0f / 15.0f));
  p = V::fma(p, y, V::set1(-1.0f / 3.0f));
  p = V::fma(V::mul(p, y), x, x);
  V::F signed_large = V::less(x, V::zero(), V::sub(V::zero(), large), large);
  return V::mul(V::set1(cap), V::less(size, V::set1(0.25f), p, signed_large));
}

// Everything that a row's scores depend on besides the products.
struct Adjust {
  bool plain;  // a product with `scale` is all there is
  float scale;  // scales of the keys included
  float cap;    // 0: none
  const float *k_columns;  // scale of each key of the tile, or null
  const float *v_columns;
};

// Scores of a row become logits.
static inline void adjust_row(const Adjust &a, float *s, int64_t from, int64_t to, float slope,
                              float distance, const float *bias, int64_t bias_keys) {
  for (int64_t j = from; j < to; j += V::W) {
    V::F x = V::mul(V::load(s + j), V::set1(a.scale));
    if (a.k_columns) x = V::mul(x, V::load(a.k_columns + j));
    if (a.cap > 0) x = soft_cap(x, a.cap);
    if (slope != 0) {
      V::F away = V::abs(V::sub(V::set1(distance - float(j)), V::lanes()));
      x = V::sub(x, V::mul(V::set1(slope), away));
    }
    if (bias) x = V::add(x, V::template get_part<F32>(bias + j, bias_keys - j));
    V::store(s + j, x);
  }
}

// Makes a row's maximum at least `highest`; where that makes it larger, scales its sum, one part per
// lane, and its values, by scale_values(factor).
template <class Scale>
static inline void raise_to(float highest, float *most, float *sum, Scale scale_values) {
  if (highest <= *most) return;  // but not where it is no number, which is to be seen
  if (*most != -kInf) {
    V::F less = V::template exp2<5>(V::set1((*most - highest) * kLog2e));
    V::store(sum, V::mul(V::load(sum), less));
    scale_values(less);
  }
  *most = highest;
}

// Joins keys [from, to) of a tile to a row: its maximum goes on, and where that grows, its sum (one
// part per lane) and its values so far are scaled down. `scale` times the scores are logits;
// `bits` says which keys are seen (null: all), and the scores of others become -inf. False when
// the row has seen nothing yet.
static inline bool raise_maximum(float *s, int64_t from, int64_t to, const uint64_t *bits,
                                 float scale, float *most, float *sum, float *values,
                                 int64_t v_size) {
  V::F top = V::set1(-kInf), other = top;
  if (bits) {
    V::F hidden = top;
    for (int64_t j = from; j < to; j += V::W) {
      V::F x = V::select(bits[j / 64] >> (j % 64), V::load(s + j), hidden);
      V::store(s + j, x);
      top = V::max(top, x);
    }
  } else {
    // Two by two: a chain of maxima takes longer than the maxima.
    int64_t j = from;
    for (; j + V::W < to; j += 2 * V::W) {
      top = V::max(top, V::load(s + j));
      other = V::max(other, V::load(s + j + V::W));
    }
    if (j < to) top = V::max(top, V::load(s + j));
    top = V::max(top, other);
  }
  raise_to(V::hmax(top) * scale, most, sum, [&](V::F less) {
    for (int64_t d = 0; d < v_size; d += V::W)
      V::store(values + d, V::mul(V::load(values + d), less));
  });
  if (*most != -kInf) return true;
  // Nothing seen so far, or what was seen is no number, which a maximum can lose.
  V::F odd = V::zero();
  for (int64_t j = from; j < to; j += V::W)
    odd = V::add(odd, V::less(V::load(s + j), V::set1(kInf), V::zero(), V::set1(1.0f)));
  if (V::hsum(odd) == 0) return false;
  *most = __builtin_nanf("");
  return true;
}

// Weights from scores: exp(scale * score - most).
template <int Degree>
struct Weigher {
  V::F scale, most, factor, offset;
  bool fused;

  static float factor_of(float scale) { return scale * kLog2e; }
  static float offset_of(float most) { return -most * kLog2e; }
  static bool fuses(float most) { return most < kFused && most > -kFused; }

  Weigher(float scale_, float most_) {
    fused = fuses(most_);
    scale = V::set1(scale_);
    most = V::set1(most_);
    factor = V::set1(factor_of(scale_));
    offset = V::set1(offset_of(most_));
  }
  V::F quickly(V::F s) const { return V::template exp2<Degree>(V::fma(s, factor, offset)); }
  V::F carefully(V::F s) const {
    V::F x = V::sub(V::mul(s, scale), most);
    return V::template exp2<Degree>(V::mul(x, V::set1(kLog2e)));
  }
};
