// Scores and weighted values of one tile in float32, by plain vector instructions.
//
// Two ways to compute scores. With few rows: keys are read in place, lanes run over the head
// size. With many: the tile is turned once, so that lanes run over keys, and shared by all rows.
// Each element is added up in one order, whatever rows and keys it is computed with.

// Scores of Rows <= 4 rows of q against the tile's keys; s [Rows, kTile].
template <class E, int Rows>
static inline void few_scores(const Work &w, const float *q, float *s) {
  constexpr int Keys = V::W >= 16 ? 4 : 2;
  int64_t whole = w.k_size / V::W * V::W;
  for (int64_t j = w.from; j < w.to; j += Keys) {
    V::F sums[4][Keys];
    const char *k[Keys];
    for (int n = 0; n < Keys; n++) {
      k[n] = w.k_at[j + n];
      for (int r = 0; r < 4; r++) sums[r][n] = V::zero();
    }
    for (int n = 0; n < Keys; n++) {
      if (j + 16 + n < w.to) prefetch_row(w.k_at[j + 16 + n], w.k_size * E::bytes);
      if (!w.plan->values_in_keys) prefetch_row(w.v_at[j + n], w.v_size * E::bytes);
    }
    int64_t d = 0;
    for (; d < whole; d += V::W) {
      V::F x[Keys];
      for (int n = 0; n < Keys; n++) x[n] = V::template get<E>(k[n] + d * E::bytes);
      for (int r = 0; r < Rows; r++) {
        V::F y = V::load(q + r * w.k_pad + d);
        for (int n = 0; n < Keys; n++) sums[r][n] = V::fma(x[n], y, sums[r][n]);
      }
    }
    if (d < w.k_size)
      for (int n = 0; n < Keys; n++) {
        V::F x = V::template get_part<E>(k[n] + d * E::bytes, w.k_size - d);
        for (int r = 0; r < Rows; r++)
          sums[r][n] = V::fma(x, V::load(q + r * w.k_pad + d), sums[r][n]);
      }
    for (int n = 0; n < Keys; n++) {
      float four[4];
      V::hsum4(sums[0][n], sums[1][n], sums[2][n], sums[3][n], four);
      for (int r = 0; r < Rows; r++) s[r * kTile + j + n] = four[r];
    }
  }
}

// Adds weights s [Rows, kTile] times the tile's values, read in place, to rows of `values`.
template <class E, int Rows>
static inline void few_values(const Work &w, const float *s, float *values) {
  for (int64_t d = 0; d < w.v_size; d += 2 * V::W) {
    V::F sums[Rows][2];
    for (int r = 0; r < Rows; r++)
      for (int n = 0; n < 2; n++) sums[r][n] = V::load(values + r * w.v_pad + d + n * V::W);
    if (d + 2 * V::W <= w.v_size) {
      for (int64_t j = w.low; j < w.high; j++) {
        const char *v = w.v_at[j] + d * E::bytes;
        V::F x = V::template get<E>(v), y = V::template get<E>(v + V::W * E::bytes);
        for (int r = 0; r < Rows; r++) {
          V::F p = V::set1(s[r * kTile + j]);
          sums[r][0] = V::fma(p, x, sums[r][0]);
          sums[r][1] = V::fma(p, y, sums[r][1]);
        }
      }
    } else {
      int64_t left = w.v_size - d;
      for (int64_t j = w.low; j < w.high; j++) {
        const char *v = w.v_at[j] + d * E::bytes;
        V::F x = V::template get_part<E>(v, left);
        V::F y = V::template get_part<E>(v + V::W * E::bytes, left - V::W);
        for (int r = 0; r < Rows; r++) {
          V::F p = V::set1(s[r * kTile + j]);
          sums[r][0] = V::fma(p, x, sums[r][0]);
          sums[r][1] = V::fma(p, y, sums[r][1]);
        }
      }
    }
    for (int r = 0; r < Rows; r++)
      for (int n = 0; n < 2; n++) V::store(values + r * w.v_pad + d + n * V::W, sums[r][n]);
  }
}

// The tile's keys as [kTile / 2W][k_size][2W] float32.
template <class E>
static inline void turn_keys(const Work &w, float *turned) {
  constexpr int W = V::W;
  for (int64_t j = w.from; j < w.to; j += W) {
    float *block = turned + j / (2 * W) * (2 * W) * w.k_size + j % (2 * W);
    for (int64_t d = 0; d < w.k_size; d += W) {
      V::F x[W];
      for (int n = 0; n < W; n++)
        x[n] = V::template get_part<E>(w.k_at[j + n] + d * E::bytes, w.k_size - d);
      V::transpose(x);
      for (int n = 0; n < W && d + n < w.k_size; n++) V::store(block + (d + n) * 2 * W, x[n]);
    }
  }
}

// The tile's values as [v_pad / 2W][kTile][2W] float32.
template <class E>
static inline void widen_values(const Work &w, float *wide) {
  constexpr int W = V::W;
  for (int64_t j = w.low; j < w.high; j++)
    for (int64_t d = 0; d < w.v_pad; d += W)
      V::store(wide + (d / (2 * W) * kTile + j) * 2 * W + d % (2 * W),
               V::template get_part<E>(w.v_at[j] + d * E::bytes, w.v_size - d));
}

template <int Rows>
static inline void many_scores(const Work &w, const float *q, const float *turned, float *s) {
  constexpr int W = V::W;
  for (int64_t j = w.from / (2 * W) * (2 * W); j < w.to; j += 2 * W) {
    const float *block = turned + j * w.k_size;
    V::F sums[Rows][2];
    for (int r = 0; r < Rows; r++) sums[r][0] = sums[r][1] = V::zero();
    for (int64_t d = 0; d < w.k_size; d++) {
      V::F x = V::load(block + d * 2 * W), y = V::load(block + d * 2 * W + W);
      for (int r = 0; r < Rows; r++) {
        V::F a = V::set1(q[r * w.k_pad + d]);
        sums[r][0] = V::fma(a, x, sums[r][0]);
        sums[r][1] = V::fma(a, y, sums[r][1]);
      }
    }
    for (int r = 0; r < Rows; r++)
      for (int n = 0; n < 2; n++) V::store(s + r * kTile + j + n * W, sums[r][n]);
  }
}

template <int Rows>
static inline void many_values(const Work &w, const float *s, const float *wide, float *values) {
  constexpr int W = V::W;
  for (int64_t d = 0; d < w.v_pad; d += 2 * W) {
    const float *block = wide + d * kTile;
    V::F sums[Rows][2];
    for (int r = 0; r < Rows; r++)
      for (int n = 0; n < 2; n++) sums[r][n] = V::load(values + r * w.v_pad + d + n * W);
    for (int64_t j = w.low; j < w.high; j++) {
      V::F x = V::load(block + j * 2 * W), y = V::load(block + j * 2 * W + W);
      for (int r = 0; r < Rows; r++) {
        V::F p = V::set1(s[r * kTile + j]);
        sums[r][0] = V::fma(p, x, sums[r][0]);
        sums[r][1] = V::fma(p, y, sums[r][1]);
      }
    }
    for (int r = 0; r < Rows; r++)
      for (int n = 0; n < 2; n++) V::store(values + r * w.v_pad + d + n * W, sums[r][n]);
  }
}
