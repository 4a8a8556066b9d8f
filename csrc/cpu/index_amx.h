// An indexer's scores with AMX: sixteen keys by 32 elements are A, the heads of a row of q, turned
// once a task, are B. Keys of plain bfloat16 are read where they lie.
//
// Products come as keys by heads; each key's are weighted and added up over lanes, and at the end
// the lanes of sixteen keys together.

constexpr int64_t kIndexKeys = 32;

struct IndexBuffers {
  Half *q;         // [rows, heads / 16, pad / 32, 512]
  float *weights;  // [rows, heads padded to 16]
  Half *keys;      // [kIndexKeys, pad]
  float *dots;     // [2, heads / 16, 16, 16]
  int64_t pad, heads;
};

static inline IndexBuffers place_index(const attnplat_cpu_index *x, Arena &arena) {
  IndexBuffers b;
  b.pad = round_up(x->head_size, 32);
  b.heads = round_up(x->num_heads, 32);
  b.q = arena.take<Half>(kIndexRows * b.heads * b.pad);
  b.weights = arena.take<float>(kIndexRows * b.heads);
  b.keys = arena.take<Half>(kIndexKeys * b.pad);
  b.dots = arena.take<float>(kIndexKeys * b.heads);
  return b;
}

static inline void read_index_queries(const attnplat_cpu_index *x, const IndexTask *task,
                                      const IndexBuffers &b) {
  alignas(64) Half none[32] = {0};
  for (int64_t row = task->first_row; row < task->last_row; row++) {
    int64_t n = row - task->first_row;
    for (int64_t h = 0; h < b.heads; h++)
      b.weights[n * b.heads + h] =
          h < x->num_heads ? x->weights[row * x->num_heads + h] : 0.0f;
    for (int64_t h = 0; h < b.heads; h += 16)
      for (int64_t d = 0; d < b.pad; d += 32) {
        alignas(64) Half block[16][32];
        const Half *at[16];
        for (int64_t i = 0; i < 16; i++) {
          at[i] = block[i];
          H::store(block[i], h + i < x->num_heads
                                 ? take_halves<BF16>(index_query(x, row, h + i), d, x->head_size)
                                 : H::load(none));
        }
        turn_halves(at, 0, b.q + (n * b.heads + h) * b.pad + d * 16);
      }
  }
}

// Sixteen keys from position `first` on as rows of bfloat16, `stride` elements apart.
template <class K>
static inline const Half *index_key_group(const attnplat_cpu_index *x, const IndexTask *task,
                                          int64_t first, Half *copy, int64_t pad, float *whole,
                                          int64_t *stride) {
  int64_t count = lesser(16, task->end - first);
  bool plain = x->encoding == ATTNPLAT_INDEX_BF16 && x->head_size % 32 == 0;
  if (plain && count == 16 && first % x->block_size + 16 <= x->block_size) {
    KeyPlace key = place_of(x, task->request, first);
    int64_t ahead = first + 4 * kIndexKeys;
    if (ahead + 16 <= task->end)
      for (int64_t n = 0; n < 16; n++) prefetch_key(x, place_of(x, task->request, ahead + n));
    *stride = x->head_size;
    return reinterpret_cast<const Half *>(codes_of(x, key));
  }
  narrow_keys<K>(x, task, first, greater(count, 0), 16, copy, pad, whole);
  *stride = pad;
  return copy;
}

// Products of 32 keys with all heads of a row, 32 heads at a time.
static inline void index_dots(const Half *const *keys, const int64_t *strides, const Half *q,
                              const IndexBuffers &b) {
  for (int64_t h = 0; h < b.heads; h += 32) {
    const Half *q0 = q + h * b.pad, *q1 = q0 + 16 * b.pad;
    Tiles::zero<0>();
    Tiles::zero<1>();
    Tiles::zero<2>();
    Tiles::zero<3>();
    for (int64_t d = 0; d < b.pad; d += 32) {
      Tiles::load<4>(keys[0] + d, 2 * strides[0]);
      Tiles::load<6>(q0 + 16 * d, 64);
      Tiles::multiply<0, 4, 6>();
      Tiles::load<5>(keys[1] + d, 2 * strides[1]);
      Tiles::multiply<1, 5, 6>();
      Tiles::load<7>(q1 + 16 * d, 64);
      Tiles::multiply<2, 4, 7>();
      Tiles::multiply<3, 5, 7>();
    }
    float *to = b.dots + 16 * h;
    Tiles::store<0>(to, 64);
    Tiles::store<2>(to + 256, 64);
    Tiles::store<1>(to + 16 * b.heads, 64);
    Tiles::store<3>(to + 16 * b.heads + 256, 64);
  }
}

// Scores of sixteen keys from their products with all heads.
static inline V::F add_index_heads(const float *dots, const float *weights, int64_t heads) {
  V::F x[16];
  for (int i = 0; i < 16; i++) x[i] = V::zero();
  for (int64_t h = 0; h < heads; h += 16) {
    V::F w = V::load(weights + h);
    // Of the lanes behind the last head, an infinite key would make NaN.
    uint64_t live = heads - h >= 16 ? 0xffff : (uint64_t(1) << (heads - h)) - 1;
    for (int i = 0; i < 16; i++) {
      V::F dot = V::max(V::zero(), V::load(dots + 16 * h + 16 * i));
      if (live != 0xffff) dot = V::select(live, dot, V::zero());
      x[i] = V::fma(dot, w, x[i]);
    }
  }
  V::transpose(x);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; i++) x[i] = V::add(x[i], x[i + half]);
  return x[0];
}

template <class K>
static inline void index_keys_of(const attnplat_cpu_index *x, const IndexTask *task,
                                 float *scores, int64_t stride, const IndexBuffers &b) {
  read_index_queries(x, task, b);
  alignas(64) float whole[kIndexKeys], found[kIndexKeys];
  for (int64_t j = task->begin; j < task->end; j += kIndexKeys) {
    const Half *keys[2];
    int64_t strides[2];
    for (int64_t n = 0; n < 2; n++)
      keys[n] = index_key_group<K>(x, task, j + 16 * n, b.keys + 16 * n * b.pad, b.pad,
                                   whole + 16 * n, strides + n);
    for (int64_t row = task->first_row; row < task->last_row; row++) {
      int64_t seen = keys_seen(x, task->request, row), n = row - task->first_row;
      if (seen <= j) continue;
      index_dots(keys, strides, b.q + n * b.heads * b.pad, b);
      for (int i = 0; i < 2; i++) {
        V::F sum = add_index_heads(b.dots + 16 * b.heads * i, b.weights + n * b.heads,
                                   x->num_heads);
        V::store(found + 16 * i, K::scaled ? V::mul(sum, V::load(whole + 16 * i)) : sum);
      }
      put_scores(scores + n * stride, j - task->begin, seen - task->begin, found,
                 lesser(kIndexKeys, task->end - j));
    }
  }
}
