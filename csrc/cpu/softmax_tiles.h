// The online softmax of rows whose scores come from tile registers.
//
// Scores lie as [tile / 32, rows, 32]: a tile register is stored in one piece, where rows as long
// as the tile would send its sixteen rows to the same few places of the cache. `chunk` is how many
// floats after each other the thirty-twos of a row are.

// Sums of values lie as tiles do, too: [rows / 16, v_pad / 16, 16, 16], or those of few rows as
// [v_pad / 32, 8, 2, 16]. Scales those of row r.
static inline void scale_values(Work &w, int64_t r, V::F by) {
  bool few = takes_few(w);
  float *at = w.values + (few ? 32 * r : r / 16 * 16 * w.v_pad + r % 16 * 16);
  for (int64_t d = 0; d < w.v_pad; d += few ? 32 : 16, at += 256) {
    V::store(at, V::mul(V::load(at), by));
    if (few) V::store(at + 16, V::mul(V::load(at + 16), by));
  }
}

static inline void adjust_chunks(Work &w, float *s, int64_t chunk, int64_t r, Span span) {
  int64_t from = w.from, to = w.to, low = w.low, high = w.high;
  for (int64_t j = span.from; j < span.to; j += 32) {
    w.from = j;
    w.to = j + 32;
    w.low = greater(low, j);
    w.high = lesser(high, j + 32);
    adjust_scores(w, s + j / 32 * chunk - j, r);
  }
  w.from = from;
  w.to = to;
  w.low = low;
  w.high = high;
}

// The largest scores of N rows, from s on; those that a row does not see become -inf.
template <int N>
static inline void find_tops(const Work &w, float *s, int64_t chunk, int64_t r, Span span,
                             float *tops) {
  V::F left[N], right[N], hidden = V::set1(-kInf);
  const uint64_t *bits[N];
  for (int n = 0; n < N; n++) {
    left[n] = right[n] = hidden;
    bits[n] = w.bits + w.token_of(r + n) * kWords;
  }
  bool full = w.full;
  for (int64_t j = span.from; j < span.to; j += 32) {
    float *at = s + j / 32 * chunk;
    for (int n = 0; n < N; n++, at += 32) {
      V::F x = V::load(at), y = V::load(at + 16);
      if (!full) {
        uint64_t seen = bits[n][j / 64] >> (j % 64);
        x = V::select(seen, x, hidden);
        y = V::select(seen >> 16, y, hidden);
        V::store(at, x);
        V::store(at + 16, y);
      }
      left[n] = V::max(left[n], x);
      right[n] = V::max(right[n], y);
    }
  }
  for (int n = 0; n < N; n++) left[n] = V::max(left[n], right[n]);
  if constexpr (N == 4)
    V::hmax4(left[0], left[1], left[2], left[3], tops);
  else
    for (int n = 0; n < N; n++) tops[n] = V::hmax(left[n]);
}

// Whether there is no number among a row's scores, which a maximum can lose.
static inline bool has_odd(const float *s, int64_t chunk, Span span) {
  V::F odd = V::zero(), one = V::set1(1.0f), limit = V::set1(kInf);
  for (int64_t j = span.from; j < span.to; j += 16) {
    V::F x = V::load(s + j / 32 * chunk + j % 32);
    odd = V::add(odd, V::less(x, limit, V::zero(), one));
  }
  return V::hsum(odd) != 0;
}

// Maxima of rows r .. r + N go on to those of their scores, from s on.
template <int N>
static inline void raise_rows(Work &w, float *s, int64_t chunk, int64_t r, Span span) {
  const Adjust &a = w.adjust;
  float tops[N], scale = a.plain ? a.scale : 1.0f;
  for (int n = 0; n < N && !a.plain; n++) adjust_chunks(w, s + 32 * n, chunk, r + n, span);
  find_tops<N>(w, s, chunk, r, span, tops);
  for (int n = 0; n < N; n++) {
    float *most = w.most + r + n;
    raise_to(tops[n] * scale, most, w.sum + (r + n) * V::W,
             [&](V::F less) { scale_values(w, r + n, less); });
    if (*most == -kInf && has_odd(s + 32 * n, chunk, span)) *most = __builtin_nanf("");
  }
}

template <bool Quick, class Put>
static inline void weigh_chunks(Work &w, const float *s, int64_t chunk, int64_t r, Span span,
                                Put put) {
  const Adjust &a = w.adjust;
  // Weights are rounded to 2^-9 of themselves: a polynomial exact to 9e-5 is enough.
  Weigher<3> weigh(a.plain ? a.scale : 1.0f, w.most[r]);
  V::F sum = V::load(w.sum + r * V::W);
  const float *columns = a.v_columns;
  for (int64_t j = span.from; j < span.to; j += 32) {
    const float *at = s + j / 32 * chunk;
    V::F x = V::load(at), y = V::load(at + 16);
    x = Quick ? weigh.quickly(x) : weigh.carefully(x);
    y = Quick ? weigh.quickly(y) : weigh.carefully(y);
    sum = V::add(sum, V::add(x, y));
    if (columns) {
      x = V::mul(x, V::load(columns + j));
      y = V::mul(y, V::load(columns + j + 16));
    }
    put(j, x, y);
  }
  V::store(w.sum + r * V::W, sum);
}

// Hands the weights of row r, whose scores are s, to put(j, V::F, V::F), thirty-two at a time;
// false when it has seen nothing yet.
template <class Put>
static inline bool weigh_row(Work &w, const float *s, int64_t chunk, int64_t r, Span span,
                             Put put) {
  float most = w.most[r];
  if (most == -kInf) {
    for (int64_t j = span.from; j < span.to; j += 32) put(j, V::zero(), V::zero());
    return false;
  }
  if (Weigher<3>::fuses(most))
    weigh_chunks<true>(w, s, chunk, r, span, put);
  else
    weigh_chunks<false>(w, s, chunk, r, span, put);
  return true;
}
