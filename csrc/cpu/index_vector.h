// An indexer's scores with float32 vectors: lanes run over keys, which are turned once for all
// rows and heads of a task. A score is added up in one order, whatever it is computed with.

constexpr int kIndexHeads = V::W == 8 ? 6 : V::W == 16 ? 12 : 8;
constexpr int64_t kIndexKeys = 2 * V::W;

struct IndexBuffers {
  float *q;       // [rows, heads, head_size], where q is not float32
  float *keys;    // [kIndexKeys, pad]
  float *turned;  // [head_size, kIndexKeys]
  int64_t pad;
};

static inline IndexBuffers place_index(const attnplat_cpu_index *x, Arena &arena) {
  IndexBuffers b;
  int64_t row = int64_t(x->num_heads) * x->head_size;
  b.pad = round_up(x->head_size, V::W);
  b.q = arena.take<float>(x->dtype == ATTNPLAT_F32 ? 0 : kIndexRows * row);
  b.keys = arena.take<float>(kIndexKeys * b.pad);
  b.turned = arena.take<float>(kIndexKeys * b.pad);
  return b;
}

static int64_t index_scratch(const attnplat_cpu_index *x) {
  Arena arena{nullptr, 0};
  place_index(x, arena);
  return arena.used;
}

// Queries of the task's rows as float32.
static inline const float *index_queries(const attnplat_cpu_index *x, const IndexTask *task,
                                         const IndexBuffers &b) {
  int64_t row = int64_t(x->num_heads) * x->head_size;
  if (x->dtype == ATTNPLAT_F32) return static_cast<const float *>(x->q) + task->first_row * row;
  const char *from = static_cast<const char *>(x->q) + 2 * task->first_row * row;
  int64_t count = (task->last_row - task->first_row) * row, n = 0;
  for (; n + V::W <= count; n += V::W)
    V::store(b.q + n, V::template get<BF16>(from + 2 * n));
  for (; n < count; n++) {
    uint16_t half;
    __builtin_memcpy(&half, from + 2 * n, 2);
    uint32_t bits = uint32_t(half) << 16;
    __builtin_memcpy(b.q + n, &bits, 4);
  }
  return b.q;
}

// Keys first .. first + count as [head_size][kIndexKeys], and what multiplies their scores.
template <class K>
static inline void turn_index_keys(const attnplat_cpu_index *x, const IndexTask *task,
                                   int64_t first, int64_t count, const IndexBuffers &b,
                                   float *whole) {
  for (int64_t n = 0; n < kIndexKeys; n++) {
    float *to = b.keys + n * b.pad;
    if (n < count) {
      K::widen(x, place_of(x, task->request, first + n), to, b.pad, whole + n);
    } else {
      for (int64_t d = 0; d < b.pad; d += V::W) V::store(to + d, V::zero());
      whole[n] = 0;
    }
  }
  for (int64_t n = 0; n < kIndexKeys; n += V::W)
    for (int64_t d = 0; d < b.pad; d += V::W) {
      V::F block[V::W];
      for (int i = 0; i < V::W; i++) block[i] = V::load(b.keys + (n + i) * b.pad + d);
      V::transpose(block);
      for (int i = 0; i < V::W; i++) V::store(b.turned + (d + i) * kIndexKeys + n, block[i]);
    }
}

// Adds the weighted scores of `Heads` heads to the sums of all.
template <int Heads>
static inline void add_heads(const float *q, int64_t size, const float *turned,
                             const float *weights, V::F *sums) {
  V::F dots[Heads][2];
  for (int h = 0; h < Heads; h++) dots[h][0] = dots[h][1] = V::zero();
  for (int64_t d = 0; d < size; d++) {
    V::F k0 = V::load(turned + d * kIndexKeys), k1 = V::load(turned + d * kIndexKeys + V::W);
    for (int h = 0; h < Heads; h++) {
      V::F a = V::set1(q[h * size + d]);
      dots[h][0] = V::fma(a, k0, dots[h][0]);
      dots[h][1] = V::fma(a, k1, dots[h][1]);
    }
  }
  for (int h = 0; h < Heads; h++)
    for (int n = 0; n < 2; n++)
      sums[n] = V::fma(V::max(V::zero(), dots[h][n]), V::set1(weights[h]), sums[n]);
}

// Heads that are left go in halves: no function for each count.
template <int Heads>
static inline int64_t add_all_heads(const float *q, int64_t size, const float *turned,
                                    const float *weights, int64_t first, int64_t last,
                                    V::F *sums) {
  for (; first + Heads <= last; first += Heads)
    add_heads<Heads>(q + first * size, size, turned, weights + first, sums);
  if constexpr (Heads > 1)
    first = add_all_heads<Heads / 2>(q, size, turned, weights, first, last, sums);
  return first;
}

template <class K>
static inline void index_keys_of(const attnplat_cpu_index *x, const IndexTask *task,
                                 float *scores, int64_t stride, const IndexBuffers &b) {
  const float *q = index_queries(x, task, b);
  int64_t row_size = int64_t(x->num_heads) * x->head_size;
  alignas(64) float whole[kIndexKeys], found[kIndexKeys];
  for (int64_t j = task->begin; j < task->end; j += kIndexKeys) {
    int64_t count = lesser(kIndexKeys, task->end - j);
    turn_index_keys<K>(x, task, j, count, b, whole);
    for (int64_t row = task->first_row; row < task->last_row; row++) {
      int64_t seen = keys_seen(x, task->request, row);
      if (seen <= j) continue;
      int64_t n = row - task->first_row;
      V::F sums[2] = {V::zero(), V::zero()};
      add_all_heads<kIndexHeads>(q + n * row_size, x->head_size, b.turned,
                                 x->weights + row * x->num_heads, 0, x->num_heads, sums);
      for (int i = 0; i < 2; i++)
        V::store(found + i * V::W,
                 K::scaled ? V::mul(sums[i], V::load(whole + i * V::W)) : sums[i]);
      put_scores(scores + n * stride, j - task->begin, seen - task->begin, found, count);
    }
  }
}

static void index_task(const attnplat_cpu_index *x, const IndexTask *task, float *scores,
                       int64_t stride, void *scratch) {
  Arena arena{static_cast<char *>(scratch), 0};
  IndexBuffers b = place_index(x, arena);
  switch (x->encoding) {
    case ATTNPLAT_INDEX_BF16: return index_keys_of<KeyBf16>(x, task, scores, stride, b);
    case ATTNPLAT_INDEX_FP8: return index_keys_of<KeyFp8>(x, task, scores, stride, b);
    case ATTNPLAT_INDEX_FP8_E8M0: return index_keys_of<KeyFp8Parts>(x, task, scores, stride, b);
    default: return index_keys_of<KeyMxfp4>(x, task, scores, stride, b);
  }
}
