// Few rows, as in decoding, with AMX: keys and values are both read where they lie.
//
// Keys are A and turned queries B, as score_by_keys has it. Values are B without being paired: what
// lies side by side are then elements of one key, not of two. So each row of weights stands in A
// twice, as p beside 0 and as 0 beside p, and the row's sums come out as those of even elements
// and, one row below, those of odd ones; `settle_few` puts them side by side. That multiplies an
// element by the 0 of its neighbour, so a value that is no finite number would spoil another:
// where a sum is none, the piece is computed again with pairs.

// Keys ahead of which keys and values are asked for.
constexpr int64_t kAhead = 64;

constexpr int64_t kFewChunk = 32 * kFewTileRows;

// Sixteen rows, evenly spaced.
struct Group {
  const Half *at;
  int64_t stride;  // in elements
};

// Sixteen rows from at[0] on: where they lie if they are evenly spaced, else a copy.
template <class E>
static inline Group row_group(const char *const *at, int64_t size, int64_t pad, Half *copy) {
  if (E::bytes == 2 && size % 32 == 0) {
    int64_t step = at[1] - at[0], odd = step & 1;
    for (int64_t n = 2; n < 16; n++) odd |= (at[n] - at[n - 1]) ^ step;
    if (odd == 0) return {reinterpret_cast<const Half *>(at[0]), step / 2};
  }
  for (int64_t n = 0; n < 16; n++) copy_halves<E>(at[n], size, pad, copy + n * pad);
  return {copy, pad};
}

// Two of them, keys from the j-th on.
struct Keys {
  Group k0, k1;
};

template <class E>
static inline Keys key_groups(const Work &w, int64_t j, Half *copy) {
  return {row_group<E>(w.k_at + j, w.k_size, w.k_pad, copy),
          row_group<E>(w.k_at + j + 16, w.k_size, w.k_pad, copy + 16 * w.k_pad)};
}

// One step of the head size for two groups of keys, with the N-th tile of queries at hand.
template <int N>
static inline void score_step(const Keys &k, int64_t d) {
  Tiles::load<6>(k.k0.at + d, 2 * k.k0.stride);
  Tiles::load<7>(k.k1.at + d, 2 * k.k1.stride);
  Tiles::multiply<0, 6, 2 + N>();
  Tiles::multiply<1, 7, 2 + N>();
}

static inline void score_steps(const Half *q, int64_t k_pad, const Keys &k) {
  Tiles::zero<0>();
  Tiles::zero<1>();
  if (k_pad > 128) {
    for (int64_t d = 0; d < k_pad; d += 32) {
      Tiles::load<2>(q + 16 * d, 64);
      score_step<0>(k, d);
    }
    return;
  }
  score_step<0>(k, 0);
  if (k_pad > 32) score_step<1>(k, 32);
  if (k_pad > 64) score_step<2>(k, 64);
  if (k_pad > 96) score_step<3>(k, 96);
}

// Asks for the keys that come after the j-th and the 31 behind it, or for the first values.
template <class E>
static inline void ask_ahead(const Work &w, int64_t j) {
  for (int64_t n = j + kAhead; n < j + kAhead + 32; n++)
    if (n < w.to)
      prefetch_row(w.k_at[n], w.k_size * E::bytes);
    else if (!w.plan->values_in_keys && n - w.to + w.from < w.to)
      prefetch_row(w.v_at[n - w.to + w.from], w.v_size * E::bytes);
}

// The same for values, or for the first keys of the next tile.
template <class E>
static inline void ask_values(const Work &w, int64_t j) {
  int64_t ahead = j + kAhead;
  if (ahead >= w.to)
    prefetch_keys(w, w.first_key + w.tile_keys + ahead - w.to, 16, E::bytes);
  else
    for (int64_t n = ahead; n < ahead + 16; n++) prefetch_row(w.v_at[n], w.v_size * E::bytes);
}

// Scores of all rows.
template <class E>
static inline void score_few(Work &w, const Buffers &b) {
  if (w.k_pad <= 128) {
    Tiles::load<2>(b.q, 64);
    if (w.k_pad > 32) Tiles::load<3>(b.q + 512, 64);
    if (w.k_pad > 64) Tiles::load<4>(b.q + 1024, 64);
    if (w.k_pad > 96) Tiles::load<5>(b.q + 1536, 64);
  }
  Keys now = key_groups<E>(w, w.from, b.groups), next = now;
  for (int64_t j = w.from; j < w.to; j += 32) {
    // Copies are made one step early: a tile register waits long for what was just written.
    if (j + 32 < w.to)
      next = key_groups<E>(w, j + 32, b.groups + (j + 32 - w.from) / 32 % 2 * 32 * w.k_pad);
    ask_ahead<E>(w, j);
    score_steps(b.q, w.k_pad, now);
    Tiles::store<0>(b.block + 16 * j, 64);
    Tiles::store<1>(b.block + 16 * j + 256, 64);
    now = next;
  }
  // For the same reason not before all are stored.
  for (int64_t j = w.from; j < w.to; j += 16)
    for (int64_t r = 0; r < w.rows; r += 4) {
      V::F x[4];
      V::columns(b.block + 16 * j + r, x);
      float *to = b.scores + j / 32 * kFewChunk + 32 * r + j % 32;
      for (int64_t n = 0; n < 4; n++) V::store(to + 32 * n, x[n]);
    }
}

// Weights of all rows, each twice, at [tile / 16, 16, 32]: group of keys, row of A, pairs.
static inline void weigh_few(Work &w, const Buffers &b) {
  Span span = {w.from, w.to};
  int64_t r = 0;
  for (; r + 4 <= w.rows; r += 4) raise_rows<4>(w, b.scores + 32 * r, kFewChunk, r, span);
  for (; r < w.rows; r++) raise_rows<1>(w, b.scores + 32 * r, kFewChunk, r, span);
  for (r = 0; r < w.rows; r++)
    weigh_row(w, b.scores + 32 * r, kFewChunk, r, span, [&](int64_t j, V::F x, V::F y) {
      Half *even = b.weights + 32 * j + 64 * r, *odd = even + 32;
      H::apart(x, even, odd);
      H::apart(y, even + 512, odd + 512);
    });
}

// Adds weighted values of `width` elements from the d-th on, 128 at most.
template <class E>
static inline void add_few(Work &w, const Buffers &b, int64_t d, int64_t width) {
  float *to = w.values + 8 * d;
  Tiles::load<0>(to, 64);
  if (width > 32) Tiles::load<1>(to + 256, 64);
  if (width > 64) Tiles::load<2>(to + 512, 64);
  if (width > 96) Tiles::load<3>(to + 768, 64);
  Group now = row_group<E>(w.v_at + w.from, w.v_size, w.v_pad, b.groups), next = now;
  for (int64_t j = w.from; j < w.to; j += 16, now = next) {
    if (j + 16 < w.to)
      next = row_group<E>(w.v_at + j + 16, w.v_size, w.v_pad,
                          b.groups + (j + 16 - w.from) / 16 % 2 * 16 * w.v_pad);
    if (d == 0) ask_values<E>(w, j);
    const Half *v = now.at + d;
    int64_t s = now.stride;
    Tiles::load<4>(b.weights + 32 * j, 64);
    Tiles::load<6>(v, 2 * s);
    if (width > 32) Tiles::load<7>(v + 32, 2 * s);
    Tiles::multiply<0, 4, 6>();
    if (width > 32) Tiles::multiply<1, 4, 7>();
    if (width <= 64) continue;
    Tiles::load<6>(v + 64, 2 * s);
    if (width > 96) Tiles::load<7>(v + 96, 2 * s);
    Tiles::multiply<2, 4, 6>();
    if (width > 96) Tiles::multiply<3, 4, 7>();
  }
  Tiles::store<0>(to, 64);
  if (width > 32) Tiles::store<1>(to + 256, 64);
  if (width > 64) Tiles::store<2>(to + 512, 64);
  if (width > 96) Tiles::store<3>(to + 768, 64);
}

template <class E>
static inline void few_tile(Work &w, const Buffers &b) {
  score_few<E>(w, b);
  weigh_few(w, b);
  for (int64_t d = 0; d < w.v_pad; d += 128) add_few<E>(w, b, d, lesser(w.v_pad - d, 128));
}

// The values' sums as rows, in the order of their elements; false when one is not a finite number.
static inline bool settle_few(Work &w, const Buffers &b) {
  V::F none = V::zero();
  __builtin_memcpy(b.block, w.values, size_t(kFewTileRows * w.v_pad) * sizeof(float));
  for (int64_t r = 0; r < w.rows; r++)
    for (int64_t d = 0; d < w.v_pad; d += 32) {
      const float *from = b.block + 8 * d + 32 * r;
      V::F even = V::load(from), odd = V::load(from + 16);
      none = V::add(none, V::add(V::sub(even, even), V::sub(odd, odd)));
      H::ones(even, odd, w.values + r * w.v_pad + d);
    }
  return V::hsum(none) == 0;
}
