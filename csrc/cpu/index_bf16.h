// An indexer's scores with dot products of pairs of bfloat16: lanes run over keys, which are
// turned once for all rows and heads of a task.

constexpr int kIndexHeads = 12;
constexpr int64_t kIndexKeys = 32;

struct IndexBuffers {
  Half *q;       // [rows, heads, pad]
  Half *keys;    // [kIndexKeys, pad]
  Half *turned;  // [2, pad / 2, 16, 2]
  int64_t pad;
};

static inline IndexBuffers place_index(const attnplat_cpu_index *x, Arena &arena) {
  IndexBuffers b;
  b.pad = round_up(x->head_size, 32);
  b.q = arena.take<Half>(kIndexRows * x->num_heads * b.pad);
  b.keys = arena.take<Half>(kIndexKeys * b.pad);
  b.turned = arena.take<Half>(kIndexKeys * b.pad);
  return b;
}

static inline void read_index_queries(const attnplat_cpu_index *x, const IndexTask *task,
                                      const IndexBuffers &b) {
  Half *to = b.q;
  for (int64_t row = task->first_row; row < task->last_row; row++)
    for (int64_t h = 0; h < x->num_heads; h++, to += b.pad)
      for (int64_t d = 0; d < b.pad; d += 32)
        H::store(to + d, take_halves<BF16>(index_query(x, row, h), d, x->head_size));
}

// Adds the weighted scores of `Heads` heads to the sums of all.
template <int Heads>
static inline void add_heads(const Half *q, int64_t pad, const Half *turned, const float *weights,
                             V::F *sums) {
  V::F dots[Heads][2];
  for (int h = 0; h < Heads; h++) dots[h][0] = dots[h][1] = V::zero();
  for (int64_t d = 0; d < pad; d += 2) {
    H::X k0 = H::load(turned + d * 16), k1 = H::load(turned + 16 * pad + d * 16);
    for (int h = 0; h < Heads; h++) {
      H::X a = H::pair(q + h * pad + d);
      dots[h][0] = H::dot(dots[h][0], a, k0);
      dots[h][1] = H::dot(dots[h][1], a, k1);
    }
  }
  for (int h = 0; h < Heads; h++)
    for (int n = 0; n < 2; n++)
      sums[n] = V::fma(V::max(V::zero(), dots[h][n]), V::set1(weights[h]), sums[n]);
}

// Heads that are left go in halves: no function for each count.
template <int Heads>
static inline int64_t add_all_heads(const Half *q, int64_t pad, const Half *turned,
                                    const float *weights, int64_t first, int64_t last,
                                    V::F *sums) {
  for (; first + Heads <= last; first += Heads)
    add_heads<Heads>(q + first * pad, pad, turned, weights + first, sums);
  if constexpr (Heads > 1)
    first = add_all_heads<Heads / 2>(q, pad, turned, weights, first, last, sums);
  return first;
}

template <class K>
static inline void index_keys_of(const attnplat_cpu_index *x, const IndexTask *task,
                                 float *scores, int64_t stride, const IndexBuffers &b) {
  read_index_queries(x, task, b);
  alignas(64) float whole[kIndexKeys], found[kIndexKeys];
  for (int64_t j = task->begin; j < task->end; j += kIndexKeys) {
    int64_t count = lesser(kIndexKeys, task->end - j);
    narrow_keys<K>(x, task, j, count, kIndexKeys, b.keys, b.pad, whole);
    const Half *rows[kIndexKeys];
    for (int64_t n = 0; n < kIndexKeys; n++) rows[n] = b.keys + n * b.pad;
    for (int64_t d = 0; d < b.pad; d += 32)
      for (int64_t n = 0; n < kIndexKeys; n += 16)
        turn_halves(rows + n, d, b.turned + n * b.pad + 16 * d);
    for (int64_t row = task->first_row; row < task->last_row; row++) {
      int64_t seen = keys_seen(x, task->request, row), n = row - task->first_row;
      if (seen <= j) continue;
      V::F sums[2] = {V::zero(), V::zero()};
      add_all_heads<kIndexHeads>(b.q + n * x->num_heads * b.pad, b.pad, b.turned,
                                 x->weights + row * x->num_heads, 0, x->num_heads, sums);
      for (int i = 0; i < 2; i++)
        V::store(found + 16 * i, K::scaled ? V::mul(sums[i], V::load(whole + 16 * i)) : sums[i]);
      put_scores(scores + n * stride, j - task->begin, seen - task->begin, found, count);
    }
  }
}
