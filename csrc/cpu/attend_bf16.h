// Attention of one task with dot products of pairs of bfloat16: AVX-512-BF16.
//
// As products.h has it for float32: with few rows keys are read in place and lanes run over the
// head size; with many the tile is turned once. Values take pairs of keys side by side.

constexpr int64_t kBlockRows = 96;
constexpr int64_t kFewRows = 8;
constexpr int kManyRows = 12;

static inline void place_buffers(const Work &w, Arena &arena, Buffers &b) {
  bool few = w.task->few;
  b.q = arena.take<Half>(w.rows * w.k_pad);
  b.keys = arena.take<Half>(few ? 0 : w.tile_keys * w.k_pad);
  b.groups = arena.take<Half>(few ? 0 : 16 * w.k_pad);
  b.values = arena.take<Half>(few ? 0 : w.tile_keys * w.v_pad);
  b.scores = arena.take<float>(kManyRows * w.tile_keys);
  b.weights = arena.take<Half>(kManyRows * w.tile_keys);
}

static inline void read_queries(Work &w, const Buffers &b) {
  for (int64_t r = 0; r < w.rows; r++)
    for (int64_t d = 0; d < w.k_pad; d += 32)
      H::store(b.q + r * w.k_pad + d, take_query(w, query_row(w, r), d));
}

template <class E, int Rows>
static inline void few_scores(const Work &w, const Buffers &b, int64_t first) {
  const Half *q = b.q + first * w.k_pad;
  for (int64_t j = w.from; j < w.to; j += 4) {
    V::F sums[4][4];
    for (int r = 0; r < 4; r++)
      for (int n = 0; n < 4; n++) sums[r][n] = V::zero();
    for (int64_t n = j + 16; n < lesser(j + 20, w.to); n++)
      prefetch_row(w.k_at[n], w.k_size * E::bytes);
    if (!w.plan->values_in_keys)
      for (int64_t n = j; n < j + 4; n++) prefetch_row(w.v_at[n], w.v_size * E::bytes);
    for (int64_t d = 0; d < w.k_pad; d += 32) {
      H::X k[4];
      for (int n = 0; n < 4; n++) k[n] = take_halves<E>(w.k_at[j + n], d, w.k_size);
      for (int r = 0; r < Rows; r++) {
        H::X x = H::load(q + r * w.k_pad + d);
        for (int n = 0; n < 4; n++) sums[r][n] = H::dot(sums[r][n], x, k[n]);
      }
    }
    for (int n = 0; n < 4; n++) {
      float four[4];
      V::hsum4(sums[0][n], sums[1][n], sums[2][n], sums[3][n], four);
      for (int r = 0; r < Rows; r++) b.scores[r * w.tile_keys + j + n] = four[r];
    }
  }
}

template <class E, int Rows>
static inline void few_values(Work &w, const Buffers &b, int64_t first) {
  for (int64_t d = 0; d < w.v_pad; d += 32) {
    V::F sums[Rows][2];
    float *to = w.values + first * w.v_pad + d;
    for (int r = 0; r < Rows; r++)
      for (int n = 0; n < 2; n++) sums[r][n] = V::load(to + r * w.v_pad + n * V::W);
    for (int64_t j = w.from; j < w.to; j += 2) {
      H::X x = take_halves<E>(w.v_at[j], d, w.v_size);
      H::X y = take_halves<E>(w.v_at[j + 1], d, w.v_size);
      H::X low = H::mix_low(x, y), high = H::mix_high(x, y);
      for (int r = 0; r < Rows; r++) {
        H::X p = H::pair(b.weights + r * w.tile_keys + j);
        sums[r][0] = H::dot(sums[r][0], p, low);
        sums[r][1] = H::dot(sums[r][1], p, high);
      }
    }
    for (int r = 0; r < Rows; r++)
      for (int n = 0; n < 2; n++) V::store(to + r * w.v_pad + n * V::W, sums[r][n]);
  }
}

template <int Rows>
static inline void many_scores(const Work &w, const Buffers &b, int64_t first) {
  const Half *q = b.q + first * w.k_pad;
  for (int64_t j = w.from; j < w.to; j += 32) {
    const Half *block = b.keys + j * w.k_pad;
    V::F sums[Rows][2];
    for (int r = 0; r < Rows; r++) sums[r][0] = sums[r][1] = V::zero();
    for (int64_t d = 0; d < w.k_pad; d += 2) {
      H::X x = H::load(block + d * 16), y = H::load(block + 16 * w.k_pad + d * 16);
      for (int r = 0; r < Rows; r++) {
        H::X a = H::pair(q + r * w.k_pad + d);
        sums[r][0] = H::dot(sums[r][0], a, x);
        sums[r][1] = H::dot(sums[r][1], a, y);
      }
    }
    for (int r = 0; r < Rows; r++)
      for (int n = 0; n < 2; n++)
        V::store(b.scores + r * w.tile_keys + j + n * V::W, sums[r][n]);
  }
}

template <int Rows>
static inline void many_values(Work &w, const Buffers &b, int64_t first) {
  for (int64_t d = 0; d < w.v_pad; d += 32) {
    const Half *block = b.values + d * w.tile_keys;
    float *to = w.values + first * w.v_pad + d;
    V::F sums[Rows][2];
    for (int r = 0; r < Rows; r++)
      for (int n = 0; n < 2; n++) sums[r][n] = V::load(to + r * w.v_pad + n * V::W);
    for (int64_t j = w.from; j < w.to; j += 2) {
      const Half *at = block + j / 32 * 1024 + j % 32 * 16;
      H::X low = H::load(at), high = H::load(at + 512);
      for (int r = 0; r < Rows; r++) {
        H::X p = H::pair(b.weights + r * w.tile_keys + j);
        sums[r][0] = H::dot(sums[r][0], p, low);
        sums[r][1] = H::dot(sums[r][1], p, high);
      }
    }
    for (int r = 0; r < Rows; r++)
      for (int n = 0; n < 2; n++) V::store(to + r * w.v_pad + n * V::W, sums[r][n]);
  }
}

static inline void weigh_rows(Work &w, const Buffers &b, int64_t first, int64_t count) {
  for (int64_t n = 0; n < count; n++)
    weigh_row(w, b.scores + n * w.tile_keys, b.weights + n * w.tile_keys, first + n);
}

template <class E, int Rows>
static inline void few_rows(Work &w, const Buffers &b, int64_t first) {
  few_scores<E, Rows>(w, b, first);
  weigh_rows(w, b, first, Rows);
  few_values<E, Rows>(w, b, first);
}

template <int Rows>
static inline int64_t many_rows(Work &w, const Buffers &b, int64_t first) {
  for (; first + Rows <= w.rows; first += Rows) {
    many_scores<Rows>(w, b, first);
    weigh_rows(w, b, first, Rows);
    many_values<Rows>(w, b, first);
  }
  if constexpr (Rows > 1) first = many_rows<Rows / 2>(w, b, first);
  return first;
}

template <class E>
static inline void attend_tile(Work &w, const Buffers &b) {
  if (!w.task->few) {
    turn_tile<E>(w, b);
    pair_values<E>(w, b);
    many_rows<kManyRows>(w, b, 0);
    return;
  }
  for (int64_t first = 0; first < w.rows; first += 4) switch (w.rows - first) {
      case 1: few_rows<E, 1>(w, b, first); break;
      case 2: few_rows<E, 2>(w, b, first); break;
      case 3: few_rows<E, 3>(w, b, first); break;
      default: few_rows<E, 4>(w, b, first);
    }
}

static inline bool settle_tiles(Work &w, const Buffers &) {
  settle(w);
  return true;
}

static inline void measure_tiles(Work &w, const attnplat_cpu_plan *plan, const Task *task) {
  measure_halves(w, plan, task);
}

static int32_t block_rows(const attnplat_cpu_plan *, int64_t) { return kBlockRows; }
static int32_t few_rows_of(const attnplat_cpu_plan *) { return kFewRows; }

static int64_t multiply(int64_t rounds) {
  alignas(64) static const Half data[64 * 32] = {0};
  V::F sums[12];
  for (int i = 0; i < 12; i++) sums[i] = V::zero();
  for (int64_t n = 0; n < rounds; n++)
    for (int j = 0; j < 64; j++) {
      H::X x = H::load(data + 32 * j);
      for (int i = 0; i < 12; i++) sums[i] = H::dot(sums[i], x, x);
    }
  volatile float keep = 0;
  for (int i = 0; i < 12; i++) keep = keep + V::hsum(sums[i]);
  return rounds * 64 * 12 * 32 * 2;
}
