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

// Floats between the scores of 32 keys and of the next 32.
constexpr int64_t kScoreChunk = 32 * 32;

// Rows of scores are turned back 16 by 16, those of keys too; the fewer of them are.
static inline bool turns_queries(const Work &w) {
  return round_up(w.rows, 16) / 16 <= w.k_pad / 32;
}

static inline void place_buffers(const Work &w, Arena &arena, Buffers &b) {
  int64_t rows = round_up(w.rows, 32);
  bool queries = turns_queries(w);
  b.q = arena.take<Half>(rows * w.k_pad);
  b.keys = arena.take<Half>(queries ? 0 : w.tile_keys * w.k_pad);
  b.groups = arena.take<Half>(4 * 16 * greater(w.k_pad, w.v_pad));
  b.values = arena.take<Half>(w.tile_keys * w.v_pad);
  b.scores = arena.take<float>((queries ? rows : 64) * w.tile_keys);
  b.block = arena.take<float>(greater(16 * greater(w.tile_keys, 128), 16 * w.v_pad));
  b.weights = arena.take<Half>(w.rows <= kFewTileRows ? 32 * w.tile_keys : 0);
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
        H::store(block[n], from[n] ? take_query(w, from[n], d) : H::load(none));
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

// One step of four products, A of 16 rows above and below, B of 16 columns left and right; without
// `Two` only of those above. All loads come first: where a processor's other thread leaves few
// tile registers to rename, a load behind a product would wait for it.
template <bool Two>
static inline void step_by_rows(const Half *a0, const Half *a1, int64_t stride, const Half *b0,
                                const Half *b1) {
  Tiles::load<4>(a0, stride);
  Tiles::load<6>(b0, 64);
  Tiles::load<7>(b1, 64);
  if (Two) Tiles::load<5>(a1, stride);
  Tiles::multiply<0, 4, 6>();
  Tiles::multiply<1, 4, 7>();
  if (Two) Tiles::multiply<2, 5, 6>();
  if (Two) Tiles::multiply<3, 5, 7>();
}

// The same where A's rows are keys, 16 in each of two places, and B the rows of queries.
template <bool Two>
static inline void step_by_keys(const Keys &k, int64_t d, const Half *q0, const Half *q1) {
  Tiles::load<4>(k.k0.at + d, 2 * k.k0.stride);
  Tiles::load<6>(q0, 64);
  Tiles::load<5>(k.k1.at + d, 2 * k.k1.stride);
  if (Two) Tiles::load<7>(q1, 64);
  Tiles::multiply<0, 4, 6>();
  Tiles::multiply<1, 5, 6>();
  if (Two) Tiles::multiply<2, 4, 7>();
  if (Two) Tiles::multiply<3, 5, 7>();
}

static inline void clear_sums() {
  Tiles::zero<0>();
  Tiles::zero<1>();
  Tiles::zero<2>();
  Tiles::zero<3>();
}

// Scores of 16 keys by 16 rows, turned: from `block` to rows 128 bytes apart.
static inline void turn_scores(const float *block, float *to) {
  V::F x[16];
  for (int i = 0; i < 16; i++) x[i] = V::load(block + 16 * i);
  V::transpose(x);
  for (int i = 0; i < 16; i++) V::store(to + 32 * i, x[i]);
}

// Four tiles of scores that were stored for `to`, turned.
struct Unturned {
  float *block, *to;
  bool two;

  void turn() const {
    if (!to) return;
    turn_scores(block, to);
    turn_scores(block + 256, to + 16);
    if (!two) return;
    turn_scores(block + 512, to + 512);
    turn_scores(block + 768, to + 528);
  }
};

template <bool Two>
static inline void score_keys(const Work &w, const Buffers &b, int64_t r, const Keys &k,
                              float *block) {
  const Half *q0 = b.q + r * w.k_pad, *q1 = q0 + 16 * w.k_pad;
  clear_sums();
  for (int64_t d = 0; d < w.k_pad; d += 32)
    step_by_keys<Two>(k, d, q0 + 16 * d, q1 + 16 * d);
  Tiles::store<0>(block, 64);
  Tiles::store<1>(block + 256, 64);
  if (Two) {
    Tiles::store<2>(block + 512, 64);
    Tiles::store<3>(block + 768, 64);
  }
}

// Scores of all rows, queries turned.
template <class E>
static inline void score_by_keys(Work &w, const Buffers &b) {
  // A load waits long for what a tile register has just written: scores are turned one block late.
  Unturned late{}, next{};
  next.block = b.block;
  for (int64_t j = w.from; j < w.to; j += 32) {
    Keys keys = key_groups<E>(w, j, b.groups);
    // The keys after next, and the values that will be wanted with these.
    for (int64_t n = j + 64; n < lesser(j + 96, w.to); n++)
      prefetch_row(w.k_at[n], w.k_size * E::bytes);
    if (!w.plan->values_in_keys)
      for (int64_t n = j; n < j + 32; n++) prefetch_row(w.v_at[n], w.v_size * E::bytes);
    for (int64_t r = 0; r < w.rows; r += 32) {
      if (j < b.spans[r / 32].from || j >= b.spans[r / 32].to) continue;
      next.to = b.scores + r * w.tile_keys + j / 32 * kScoreChunk;
      next.two = r + 16 < w.rows;
      if (next.two)
        score_keys<true>(w, b, r, keys, next.block);
      else
        score_keys<false>(w, b, r, keys, next.block);
      late.turn();
      late = next;
      next.block = b.block + (next.block == b.block ? 1024 : 0);
    }
  }
  late.turn();
}

// Thirty-two rows of the task, or as many as are left, at the tile at hand.
//
// Vectors weigh the rows of one block while tile registers multiply for another: both take long,
// and a processor looks ahead too short a way to find that by itself. So `advance` is called
// after every four products, and does of a block's rows its share: `pace` sixteenths of a unit.
struct Block {
  float *scores;  // [tile / 32, 32, 32], and later weights
  int64_t first, rows;
  Span span;
  int64_t pace, credit, raised, weighed;
  bool any;  // row has seen something
};

// A row's weights, bfloat16, in place of the first or of the second half of its scores, by turns:
// so they are spread over all of the cache's sets.
static inline Half *weights_at(float *scores, int64_t j) {
  return reinterpret_cast<Half *>(scores + j / 32 * kScoreChunk + j / 32 % 2 * 16);
}

// The maxima of two rows, or the weights of one.
static inline void do_unit(Work &w, Block &k) {
  if (k.raised < k.rows) {
    float *s = k.scores + 32 * k.raised;
    int64_t r = k.first + k.raised;
    if (k.raised + 2 <= k.rows)
      raise_rows<2>(w, s, kScoreChunk, r, k.span);
    else
      raise_rows<1>(w, s, kScoreChunk, r, k.span);
    k.raised += 2;
  } else if (k.weighed < k.rows) {
    float *s = k.scores + 32 * k.weighed;
    auto put = [&](int64_t j, V::F x, V::F y) { H::store(weights_at(s, j), H::pack(x, y)); };
    k.any |= weigh_row(w, s, kScoreChunk, k.first + k.weighed, k.span, put);
    k.weighed++;
  }
}

static inline void advance(Work &w, Block *k) {
  if (!k) return;
  for (k->credit += k->pace; k->credit >= 16; k->credit -= 16) do_unit(w, *k);
}

static inline void finish(Work &w, Block &k) {
  while (k.weighed < k.rows) do_unit(w, k);
}

// Scores of a block's rows, keys turned; the rows of the block before are weighed meanwhile.
template <bool Two>
static inline void score_by_rows(Work &w, const Buffers &b, const Block &k, Block *before) {
  const Half *q0 = b.q + k.first * w.k_pad, *q1 = q0 + 16 * w.k_pad;
  for (int64_t j = k.span.from; j < k.span.to; j += 32) {
    const Half *k0 = b.keys + j * w.k_pad, *k1 = k0 + 16 * w.k_pad;
    float *to = k.scores + j / 32 * kScoreChunk;
    clear_sums();
    for (int64_t d = 0; d < w.k_pad; d += 32) {
      step_by_rows<Two>(q0 + d, q1 + d, 2 * w.k_pad, k0 + 16 * d, k1 + 16 * d);
      advance(w, before);
    }
    Tiles::store<0>(to, 128);
    Tiles::store<1>(to + 16, 128);
    if (Two) {
      Tiles::store<2>(to + 512, 128);
      Tiles::store<3>(to + 528, 128);
    }
  }
}

// Adds the tile's weighted values to a block's rows; the next block's rows are weighed meanwhile.
template <bool Two>
static inline void add_values(Work &w, const Buffers &b, const Block &k, Block *next) {
  int64_t steps = w.tile_keys / 32;
  for (int64_t d = 0; d < w.v_pad; d += 32) {
    float *o0 = w.values + k.first * w.v_pad + 16 * d, *o1 = o0 + 16 * w.v_pad;
    const Half *v = b.values + d / 32 * steps * 1024;
    Tiles::load<0>(o0, 64);
    Tiles::load<1>(o0 + 256, 64);
    if (Two) {
      Tiles::load<2>(o1, 64);
      Tiles::load<3>(o1 + 256, 64);
    }
    for (int64_t j = k.span.from; j < k.span.to; j += 32) {
      const Half *p = weights_at(k.scores, j);
      step_by_rows<Two>(p, p + 1024, 128, v + j * 32, v + j * 32 + 512);
      advance(w, next);
    }
    Tiles::store<0>(o0, 64);
    Tiles::store<1>(o0 + 256, 64);
    if (Two) {
      Tiles::store<2>(o1, 64);
      Tiles::store<3>(o1 + 256, 64);
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

static inline Block block_of(const Work &w, const Buffers &b, int64_t r, int64_t nth,
                             bool queries) {
  Block k{};
  // Two buffers by turns, where keys are turned: one is weighed while the other is filled.
  k.scores = b.scores + (queries ? r : nth % 2 * 32) * w.tile_keys;
  k.first = r;
  k.rows = lesser(w.rows - r, 32);
  k.span = b.spans[r / 32];
  // Units of the block over products while which they can be done, four by four.
  int64_t steps = w.v_pad / 32 + (queries ? 0 : w.k_pad / 32);
  steps *= (k.span.to - k.span.from) / 32;
  // What tile registers have just written had better not be read at once.
  k.credit = -32;
  k.pace = (16 * (k.rows + k.rows / 2 + 1) + steps - 1) / greater(steps, 1);
  return k;
}

static inline void score_block(Work &w, const Buffers &b, const Block &k, Block *before) {
  if (k.rows > 16)
    score_by_rows<true>(w, b, k, before);
  else
    score_by_rows<false>(w, b, k, before);
}

static inline void add_block(Work &w, const Buffers &b, Block &k, Block *next) {
  finish(w, k);
  if (!k.any) return;
  if (k.rows > 16)
    add_values<true>(w, b, k, next);
  else
    add_values<false>(w, b, k, next);
}

template <class E>
static inline void attend_tile(Work &w, const Buffers &b) {
  if (takes_few(w)) return few_tile<E>(w, b);
  bool queries = turns_queries(w);
  find_spans(w, b);
  if (queries)
    score_by_keys<E>(w, b);
  else
    turn_tile<E>(w, b);
  pair_values<E>(w, b);
  Block now{}, next;
  for (int64_t r = 0, nth = 0; r < w.rows; r += 32) {
    next = block_of(w, b, r, nth, queries);
    if (next.span.from >= next.span.to) continue;
    nth++;
    Block *before = now.rows > 0 ? &now : nullptr;
    if (!queries) score_block(w, b, next, before);
    if (before) add_block(w, b, now, &next);
    now = next;
  }
  if (now.rows > 0) add_block(w, b, now, nullptr);
}

// The values' sums as rows, in the order of their elements.
static inline void settle_rows(Work &w, const Buffers &b) {
  for (int64_t first = 0; first < w.rows; first += 16) {
    float *to = w.values + first * w.v_pad;
    __builtin_memcpy(b.block, to, size_t(16 * w.v_pad) * sizeof(float));
    for (int64_t r = 0; r < 16 && first + r < w.rows; r++, to += w.v_pad) {
      const float *from = b.block + 16 * r;
      for (int64_t d = 0; d < w.v_pad; d += 32)
        H::fours(V::load(from + 16 * d), V::load(from + 16 * d + 256), to + d);
    }
  }
}

// After the last tile of a piece; false when it is to be computed again.
static inline bool settle_tiles(Work &w, const Buffers &b) {
  bool good = true;
  if (takes_few(w))
    good = settle_few(w, b);
  else
    settle_rows(w, b);
  w.careful = !good;
  return good;
}

static inline void measure_tiles(Work &w, const attnplat_cpu_plan *plan, const Task *task) {
  measure_halves(w, plan, task);
  // Long tiles fit the second-level cache where values are narrow, or inside keys.
  bool inside = plan->values_in_keys && plan->topk == 0 && !is_latent(plan->kv_encoding);
  w.tile_keys = w.v_size <= 128 || inside ? kTile : kTile / 2;
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
    clear_sums();
    for (int64_t k = 0; k < 4; k++)
      step_by_rows<true>(data + 512 * k, data + 512 * (k ^ 3), 64, data + 512 * (k + 4),
                         data + 512 * ((k ^ 1) + 4));
    Tiles::store<0>(sums, 64);
  }
  return rounds * 16 * 16 * 16 * 32 * 2;
}
