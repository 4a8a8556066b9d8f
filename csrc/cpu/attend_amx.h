// Attention of one task with AMX: bfloat16 queries; keys and values bfloat16, or codes that
// bfloat16 holds exactly.
//
// A tile register holds 16 rows of 64 bytes, and a product C += A * B wants pairs of B's rows side
// by side. Scores come in one of two ways, which give the same bits:
//
//   turned queries: pages are A where they lie, 16 keys by 32 elements, and q, turned once, is B.
//     Scores come as keys by rows and are turned back. Right where rows are few beside the head
//     size, for then keys are read once and never copied.
//   turned keys: q is A, and the tile's keys are turned once for all rows.
//
// Values are B as they lie but for pairs of keys side by side: two shuffles per 64 elements, into
// a buffer in which those of keys that nobody sees are 0. The shuffles work on eight elements at a
// time, so the values' sums come out in an order of their own, which `settle` undoes.

// Rows of scores are turned back 16 by 16, those of keys too; the fewer of them are.
static inline bool turns_queries(const Work &w) {
  return round_up(w.rows, 16) / 16 <= w.k_pad / 32;
}

static inline void place_buffers(const Work &w, Arena &arena, Buffers &b) {
  int64_t rows = round_up(w.rows, 32);
  bool queries = turns_queries(w);
  b.q = arena.take<Half>(rows * w.k_pad);
  b.keys = arena.take<Half>(queries ? 0 : w.tile_keys * w.k_pad);
  b.groups = arena.take<Half>(2 * 16 * w.k_pad);
  b.values = arena.take<Half>(w.tile_keys * w.v_pad);
  b.scores = arena.take<float>((queries ? rows : 32) * w.tile_keys);
  b.block = arena.take<float>(4 * 256);
  b.weights = arena.take<Half>(32 * w.tile_keys);
  b.spans = arena.take<Span>(rows / 32);
}

static inline void read_queries(Work &w, const Buffers &b) {
  int64_t rows = round_up(w.rows, 32);
  alignas(64) Half none[32] = {0};
  for (int64_t first = 0; first < rows; first += 16) {
    const char *from[16];
    for (int64_t n = 0; n < 16; n++)
      from[n] = first + n < w.rows ? query_row(w, first + n) : nullptr;
    for (int64_t d = 0; d < w.k_pad; d += 32) {
      alignas(64) Half block[16][32];
      const Half *at[16];
      for (int64_t n = 0; n < 16; n++) {
        H::store(block[n], from[n] ? take_halves<BF16>(from[n], d, w.k_size) : H::load(none));
        at[n] = block[n];
      }
      if (turns_queries(w)) {
        turn_halves(at, 0, b.q + first * w.k_pad + d * 16);
      } else {
        for (int64_t n = 0; n < 16; n++)
          H::store(b.q + (first + n) * w.k_pad + d, H::load(block[n]));
      }
    }
  }
}

// Sixteen keys from the j-th of the tile on, as rows of bfloat16 `stride` elements apart.
template <class E>
static inline const Half *key_group(const Work &w, int64_t j, Half *copy, int64_t *stride) {
  if (E::bytes == 2 && w.k_size % 32 == 0) {
    int64_t step = w.k_at[j + 1] - w.k_at[j];
    bool even = true;
    for (int64_t n = 1; n < 16; n++) even &= w.k_at[j + n] - w.k_at[j] == n * step;
    if (even && step % 2 == 0) {
      *stride = step / 2;
      return reinterpret_cast<const Half *>(w.k_at[j]);
    }
  }
  for (int64_t n = 0; n < 16; n++)
    for (int64_t d = 0; d < w.k_pad; d += 32)
      H::store(copy + n * w.k_pad + d, take_halves<E>(w.k_at[j + n], d, w.k_size));
  *stride = w.k_pad;
  return copy;
}

// Scores of all rows, queries turned.
template <class E>
static inline void score_by_keys(Work &w, const Buffers &b) {
  int64_t steps = w.k_pad / 32, tile = w.tile_keys;
  for (int64_t j = w.from; j < w.to; j += 32) {
    int64_t s0, s1;
    const Half *k0 = key_group<E>(w, j, b.groups, &s0);
    const Half *k1 = key_group<E>(w, j + 16, b.groups + 16 * w.k_pad, &s1);
    // The keys after next, and the values that will be wanted with these.
    for (int64_t n = j + 64; n < lesser(j + 96, w.to); n++)
      prefetch_row(w.k_at[n], w.k_size * E::bytes);
    if (!w.plan->values_in_keys)
      for (int64_t n = j; n < j + 32; n++) prefetch_row(w.v_at[n], w.v_size * E::bytes);
    for (int64_t r = 0; r < w.rows; r += 32) {
      if (j < b.spans[r / 32].from || j >= b.spans[r / 32].to) continue;
      bool two = r + 16 < w.rows;
      const Half *q0 = b.q + r * w.k_pad, *q1 = q0 + 16 * w.k_pad;
      Tiles::zero<0>();
      Tiles::zero<1>();
      Tiles::zero<2>();
      Tiles::zero<3>();
      for (int64_t n = 0; n < steps; n++) {
        Tiles::load<4>(k0 + 32 * n, 2 * s0);
        Tiles::load<6>(q0 + 512 * n, 64);
        Tiles::multiply<0, 4, 6>();
        Tiles::load<5>(k1 + 32 * n, 2 * s1);
        Tiles::multiply<1, 5, 6>();
        if (two) {
          Tiles::load<7>(q1 + 512 * n, 64);
          Tiles::multiply<2, 4, 7>();
          Tiles::multiply<3, 5, 7>();
        }
      }
      Tiles::store<0>(b.block, 64);
      Tiles::store<1>(b.block + 256, 64);
      if (two) {
        Tiles::store<2>(b.block + 512, 64);
        Tiles::store<3>(b.block + 768, 64);
      }
      for (int64_t n = 0; n < (two ? 4 : 2); n++) {
        V::F x[16];
        for (int i = 0; i < 16; i++) x[i] = V::load(b.block + 256 * n + 16 * i);
        V::transpose(x);
        int64_t first = r + n / 2 * 16;
        float *to = b.scores + first * tile + j + n % 2 * 16;
        for (int i = 0; i < 16 && first + i < w.rows; i++) V::store(to + i * tile, x[i]);
      }
    }
  }
}

// Scores of rows r .. r + 32, keys turned.
static inline void score_by_rows(Work &w, const Buffers &b, int64_t r) {
  int64_t steps = w.k_pad / 32, tile = w.tile_keys, stride = 2 * w.k_pad;
  bool two = r + 16 < w.rows;
  const Half *q0 = b.q + r * w.k_pad, *q1 = q0 + 16 * w.k_pad;
  for (int64_t j = w.from; j < w.to; j += 32) {
    const Half *k0 = b.keys + j * w.k_pad, *k1 = k0 + 16 * w.k_pad;
    Tiles::zero<0>();
    Tiles::zero<1>();
    Tiles::zero<2>();
    Tiles::zero<3>();
    for (int64_t n = 0; n < steps; n++) {
      Tiles::load<4>(q0 + 32 * n, stride);
      Tiles::load<6>(k0 + 512 * n, 64);
      Tiles::multiply<0, 4, 6>();
      Tiles::load<7>(k1 + 512 * n, 64);
      Tiles::multiply<1, 4, 7>();
      if (two) {
        Tiles::load<5>(q1 + 32 * n, stride);
        Tiles::multiply<2, 5, 6>();
        Tiles::multiply<3, 5, 7>();
      }
    }
    Tiles::store<0>(b.scores + j, 4 * tile);
    Tiles::store<1>(b.scores + j + 16, 4 * tile);
    if (two) {
      Tiles::store<2>(b.scores + 16 * tile + j, 4 * tile);
      Tiles::store<3>(b.scores + 16 * tile + j + 16, 4 * tile);
    }
  }
}

// Adds the tile's weighted values to rows r .. r + 32.
static inline void add_values(Work &w, const Buffers &b, int64_t r) {
  int64_t steps = w.tile_keys / 32, stride = 4 * w.v_pad, tile = 2 * w.tile_keys;
  bool two = r + 16 < w.rows;
  const Half *p0 = b.weights, *p1 = p0 + 16 * w.tile_keys;
  for (int64_t d = 0; d < w.v_pad; d += 32) {
    float *o0 = w.values + r * w.v_pad + d, *o1 = o0 + 16 * w.v_pad;
    const Half *v = b.values + d / 32 * steps * 1024;
    Tiles::load<0>(o0, stride);
    Tiles::load<1>(o0 + 16, stride);
    if (two) {
      Tiles::load<2>(o1, stride);
      Tiles::load<3>(o1 + 16, stride);
    }
    for (int64_t j = w.from; j < w.to; j += 32) {
      Tiles::load<4>(p0 + j, tile);
      Tiles::load<6>(v + j * 32, 64);
      Tiles::multiply<0, 4, 6>();
      Tiles::load<7>(v + j * 32 + 512, 64);
      Tiles::multiply<1, 4, 7>();
      if (two) {
        Tiles::load<5>(p1 + j, tile);
        Tiles::multiply<2, 5, 6>();
        Tiles::multiply<3, 5, 7>();
      }
    }
    Tiles::store<0>(o0, stride);
    Tiles::store<1>(o0 + 16, stride);
    if (two) {
      Tiles::store<2>(o1, stride);
      Tiles::store<3>(o1 + 16, stride);
    }
  }
}

// Which keys of the tile the rows of each block of 32 see: under a causal mask, not all that the
// last block sees.
static inline void find_spans(const Work &w, const Buffers &b) {
  for (int64_t r = 0; r < w.rows; r += 32) {
    Span &span = b.spans[r / 32];
    span = {w.from, w.to};
    if (w.full) continue;
    int64_t low = w.to, high = w.from;
    int64_t last = w.token_of(lesser(r + 32, w.rows) - 1);
    for (int64_t token = w.token_of(r); token <= last; token++)
      for (int64_t n = 0; n < w.tile_keys / 64; n++) {
        uint64_t bits = w.bits[token * kWords + n];
        if (bits == 0) continue;
        low = lesser(low, 64 * n + __builtin_ctzll(bits));
        high = greater(high, 64 * n + 64 - __builtin_clzll(bits));
      }
    span = {low / kStep * kStep, round_up(high, kStep)};
  }
}

template <class E>
static inline void attend_tile(Work &w, const Buffers &b) {
  bool queries = turns_queries(w);
  find_spans(w, b);
  if (queries)
    score_by_keys<E>(w, b);
  else
    turn_tile<E>(w, b);
  pair_values<E>(w, b);
  Span whole = {w.from, w.to};
  for (int64_t r = 0; r < w.rows; r += 32) {
    w.from = b.spans[r / 32].from;
    w.to = b.spans[r / 32].to;
    if (w.from >= w.to) continue;
    if (!queries) score_by_rows(w, b, r);
    float *scores = b.scores + (queries ? r * w.tile_keys : 0);
    bool any = false;
    for (int64_t n = 0; n < 32 && r + n < w.rows; n++)
      any |= weigh_row(w, scores + n * w.tile_keys, b.weights + n * w.tile_keys, r + n);
    if (any) add_values(w, b, r);
  }
  w.from = whole.from;
  w.to = whole.to;
}

static inline void measure_tiles(Work &w, const attnplat_cpu_plan *plan, const Task *task) {
  measure(w, plan, task);
  w.tile_keys = w.v_size <= 128 ? kTile : kTile / 2;
}

static int32_t few_rows_of(const attnplat_cpu_plan *) { return 0; }

// Long prompts share what is turned and paired among more rows.
static int32_t block_rows(const attnplat_cpu_plan *plan, int64_t rows) {
  if (plan->v_head_size > 128) return 128;
  return rows >= 8192 ? 512 : 256;
}

// Products of tiles from L1, two by two as the kernels take them.
static int64_t multiply(int64_t rounds) {
  alignas(64) static const Half data[8 * 512] = {0};
  alignas(64) float sums[256];
  for (int64_t n = 0; n < rounds; n++) {
    Tiles::zero<0>();
    Tiles::zero<1>();
    Tiles::zero<2>();
    Tiles::zero<3>();
    for (int64_t k = 0; k < 4; k++) {
      Tiles::load<4>(data + 512 * k, 64);
      Tiles::load<6>(data + 512 * (k + 4), 64);
      Tiles::multiply<0, 4, 6>();
      Tiles::load<7>(data + 512 * (k ^ 1), 64);
      Tiles::multiply<1, 4, 7>();
      Tiles::load<5>(data + 512 * (k ^ 3), 64);
      Tiles::multiply<2, 5, 6>();
      Tiles::multiply<3, 5, 7>();
    }
    Tiles::store<0>(sums, 64);
  }
  return rounds * 16 * 16 * 16 * 32 * 2;
}
