// One task in progress: its rows, its place in scratch, and the tile of keys at hand.

// Tiles begin at multiples of their size, so that a row's sums do not depend on which rows it is
// computed with. kTile keys are the most of one tile, kStep of them are computed at once, and rows
// are padded to kPadRows in scratch; who includes this says how many.
constexpr int64_t kWords = kTile / 64;

static inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Scratch handed out front to back; without memory behind it, it only counts.
struct Arena {
  char *base;
  int64_t used;

  template <class T>
  T *take(int64_t count) {
    T *p = reinterpret_cast<T *>(uintptr_t(base) + uintptr_t(used));
    used = round_up(used + count * int64_t(sizeof(T)), 64);
    return p;
  }
};

struct Work {
  const attnplat_cpu_plan *plan;
  const attnplat_cpu_tensors *tensors;
  const Task *task;
  int64_t rows, group, k_size, v_size;
  int64_t k_pad, v_pad;  // sizes of a row of q and of values in scratch, in floats
  int64_t first_token, last_token;

  float *q;       // [rows, k_pad]; of those kernels that want them wide
  float *values;  // [rows, v_pad]
  float *most;    // [rows]
  float *sum;     // [rows, V::W]
  // The pieces before the one at hand, of a task that has several: [rows, v_pad], [rows], [rows].
  float *folded, *folded_most, *folded_sum;
  bool folds;
  uint64_t *named;  // [first_token .. last_token][words of the task's keys]
  int64_t named_words;
  char *zeros;  // stands for a key or value that nobody sees

  // The tile.
  int64_t tile_keys;
  int64_t first_key;
  int64_t from, to;    // keys of it that are computed with, multiples of kStep
  int64_t low, high;   // those that somebody sees are in between
  bool full;           // all rows see all its keys
  uint64_t seen[kWords];  // keys that somebody sees
  uint64_t *bits;      // [tokens, kWords] where not full
  const char **k_at;   // [kTile]
  const char **v_at;
  float *k_columns, *v_columns;  // [kTile]
  Adjust adjust;

  int64_t tokens() const { return last_token - first_token; }
  int64_t token_of(int64_t row) const { return (task->first_row + row) / group - first_token; }
  int64_t head_of(int64_t row) const {
    return task->kv_head * group + (task->first_row + row) % group;
  }
};

static inline void measure(Work &w, const attnplat_cpu_plan *plan, const Task *task) {
  w.plan = plan;
  w.task = task;
  w.rows = task->last_row - task->first_row;
  w.group = plan->num_heads / plan->num_kv_heads;
  w.k_size = plan->head_size;
  w.v_size = plan->v_head_size;
  w.k_pad = round_up(w.k_size, 2 * V::W);
  w.v_pad = round_up(w.v_size, 2 * V::W);
  w.tile_keys = kTile;
  w.first_token = task->first_row / w.group;
  w.last_token = w.rows > 0 ? (task->last_row - 1) / w.group + 1 : w.first_token;
}

static inline void place(Work &w, Arena &arena) {
  w.values = arena.take<float>(round_up(w.rows, kPadRows) * w.v_pad);
  w.most = arena.take<float>(w.rows);
  w.sum = arena.take<float>(w.rows * V::W);
  w.folds = w.task->slot == 0 && w.task->end - w.task->begin / w.task->piece_keys *
                                                   w.task->piece_keys > w.task->piece_keys;
  w.folded = arena.take<float>(w.folds ? w.rows * w.v_pad : 0);
  w.folded_most = arena.take<float>(w.folds ? w.rows : 0);
  w.folded_sum = arena.take<float>(w.folds ? w.rows : 0);
  w.named_words = w.plan->topk > 0 ? round_up(w.task->end - w.task->begin, 64) / 64 : 0;
  w.named = arena.take<uint64_t>(w.tokens() * w.named_words);
  w.zeros = arena.take<char>(4 * greater(w.k_pad, w.v_pad));
  w.bits = arena.take<uint64_t>(w.tokens() * kWords);
  w.k_at = arena.take<const char *>(kTile);
  w.v_at = arena.take<const char *>(kTile);
  w.k_columns = arena.take<float>(kTile);
  w.v_columns = arena.take<float>(kTile);
}

template <class E>
static inline void widen_rows(Work &w) {
  const attnplat_cpu_tensors *t = w.tensors;
  int64_t start = w.plan->query_start[w.task->request];
  for (int64_t r = 0; r < w.rows; r++) {
    int64_t token = start + w.first_token + w.token_of(r);
    const char *from = static_cast<const char *>(t->q) +
                       (token * t->q_token + w.head_of(r) * t->q_head) * E::bytes;
    for (int64_t d = 0; d < w.k_pad; d += V::W)
      V::store(w.q + r * w.k_pad + d,
               V::template get_part<E>(from + d * E::bytes, w.k_size - d));
  }
}

static inline void read_q(Work &w) {
  switch (w.plan->dtype) {
    case ATTNPLAT_F32: widen_rows<F32>(w); break;
    case ATTNPLAT_BF16: widen_rows<BF16>(w); break;
    default: widen_rows<F16>(w);
  }
}

// Rows before their first key of a piece.
static inline void begin_rows(Work &w) {
  for (int64_t r = 0; r < w.rows; r++) {
    w.most[r] = -kInf;
    V::store(w.sum + r * V::W, V::zero());
  }
  for (int64_t n = 0; n < w.rows * w.v_pad; n += V::W) V::store(w.values + n, V::zero());
}

static inline void begin_task(Work &w) {
  for (int64_t r = 0; r < w.rows && w.folds; r++) {
    w.folded_most[r] = -kInf;
    w.folded_sum[r] = 0;
  }
  for (int64_t n = 0; n < w.rows * w.v_pad && w.folds; n += V::W)
    V::store(w.folded + n, V::zero());
  for (int64_t n = 0; n < greater(w.k_pad, w.v_pad); n += V::W)
    V::store(reinterpret_cast<float *>(w.zeros) + n, V::zero());
}

// The topk of each query token as bitmaps of the task's keys.
static inline void read_topk(Work &w) {
  int64_t begin = w.task->begin, end = w.task->end;
  int64_t start = w.plan->query_start[w.task->request];
  for (int64_t n = 0; n < w.tokens() * w.named_words; n++) w.named[n] = 0;
  for (int64_t token = 0; token < w.tokens() && w.plan->topk > 0; token++) {
    uint64_t *named = w.named + token * w.named_words;
    const int32_t *row =
        w.tensors->topk_indices + (start + w.first_token + token) * w.tensors->topk_stride;
    for (int64_t n = 0; n < w.tensors->topk_count; n++)
      if (row[n] >= begin && row[n] < end)
        named[(row[n] - begin) / 64] |= uint64_t(1) << ((row[n] - begin) % 64);
  }
}

static inline void read_adjust(Work &w) {
  const attnplat_cpu_tensors *t = w.tensors;
  Adjust &a = w.adjust;
  float k_scale = t->k_scale ? t->k_scale[w.task->kv_head * t->k_scale_head] : 1.0f;
  a.scale = t->scale * k_scale;
  a.cap = t->logits_soft_cap;
  a.k_columns = t->k_scale_at ? w.k_columns : nullptr;
  a.v_columns = t->v_scale_at ? w.v_columns : nullptr;
  // A negative scale would make the largest product the smallest logit.
  a.plain = a.cap == 0 && !t->alibi_slopes && !t->position_bias && !a.k_columns && a.scale > 0;
}

// A row, into the second-level cache.
static inline void prefetch_row(const char *row, int64_t bytes) {
  for (int64_t n = 0; n < bytes; n += 64) __builtin_prefetch(row + n, 0, 2);
}

// Where the tile's keys and values are; those that no row sees are zeros and not read.
static inline void locate(Work &w) {
  const attnplat_cpu_plan *p = w.plan;
  const attnplat_cpu_tensors *t = w.tensors;
  int64_t request = w.task->request, head = w.task->kv_head;
  int64_t size = bytes_of(p->kv_encoding);
  const int32_t *table = nullptr;
  int64_t block_size = 1, first = 0;
  if (p->block_table) {
    first = p->first_block ? p->first_block[request] : 0;
    table = p->block_table + request * p->table_stride - first;
    block_size = p->block_size;
  } else {
    first = p->kv_start[request];
  }
  int64_t at = w.first_key / block_size, offset = w.first_key % block_size;
  const char *k_block = nullptr, *v_block = nullptr;
  int64_t block = -1;
  bool known = false;
  for (int64_t n = 0; n < w.tile_keys; n++) {
    if (!(w.seen[n / 64] >> (n % 64) & 1)) {
      w.k_at[n] = w.v_at[n] = w.zeros;
      w.k_columns[n] = w.v_columns[n] = 0;
    } else {
      if (!known) {
        block = table ? table[at] : first + at;
        k_block = static_cast<const char *>(t->k) + (block * t->k_block + head * t->k_head) * size;
        v_block = static_cast<const char *>(t->v) + (block * t->v_block + head * t->v_head) * size;
        known = true;
      }
      w.k_at[n] = k_block + offset * t->k_token * size;
      w.v_at[n] = v_block + offset * t->v_token * size;
      if (t->k_scale_at) __builtin_memcpy(w.k_columns + n, w.k_at[n] + t->k_scale_at, 4);
      if (t->v_scale_at) __builtin_memcpy(w.v_columns + n, w.v_at[n] + t->v_scale_at, 4);
    }
    if (++offset == block_size) {
      offset = 0;
      at++;
      known = false;
    }
  }
}

// Makes the tile at `first_key` the one at hand; false when no row sees any of its keys.
static inline bool open_tile(Work &w, const Masks &masks, const Reach &reach, int64_t first_key) {
  w.first_key = first_key;
  w.full = reach.full_low <= first_key && first_key + w.tile_keys <= reach.full_high;
  int64_t words = w.tile_keys / 64;
  for (int64_t n = 0; n < words; n++) w.seen[n] = w.full ? ~uint64_t(0) : 0;
  for (int64_t n = 0; n < w.tokens() && !w.full; n++) {
    Sight s = masks.sight(w.first_token + n);
    for (int64_t word = 0; word < words; word++) {
      int64_t key = first_key + 64 * word;
      const uint64_t *named = nullptr;
      int64_t at = (key - w.task->begin) / 64;
      // The last tile may reach past the keys of the task.
      uint64_t outside = 0;
      if (w.named_words) named = at < w.named_words ? w.named + n * w.named_words + at : &outside;
      uint64_t bits = masks.bits(s, w.first_token + n, key, named);
      w.bits[n * kWords + word] = bits;
      w.seen[word] |= bits;
    }
  }
  w.low = kTile;
  w.high = 0;
  for (int64_t n = 0; n < words; n++) {
    if (w.seen[n] == 0) continue;
    w.low = lesser(w.low, 64 * n + __builtin_ctzll(w.seen[n]));
    w.high = 64 * n + 64 - __builtin_clzll(w.seen[n]);
  }
  if (w.high == 0) return false;
  w.from = w.low / kStep * kStep;
  w.to = round_up(w.high, kStep);
  locate(w);
  return true;
}

// Logits in place of the scores s of row r, where there is more to them than the products.
static inline void adjust_scores(Work &w, float *s, int64_t r) {
  const attnplat_cpu_tensors *t = w.tensors;
  int64_t head = w.head_of(r), query = w.first_token + w.token_of(r);
  int64_t seq_len = w.plan->seq_lens[w.task->request];
  int64_t start = w.plan->query_start[w.task->request];
  int64_t context = seq_len - (w.plan->query_start[w.task->request + 1] - start);
  const float *bias = nullptr;
  if (t->position_bias)
    bias = t->position_bias + w.task->request * t->bias_request + head * t->bias_head +
           query * t->bias_query + w.first_key;
  adjust_row(w.adjust, s, w.from, w.to, t->alibi_slopes ? t->alibi_slopes[head] : 0.0f,
             float(context + query - w.first_key), bias, seq_len - w.first_key);
}

// Makes row r's maximum that of this tile, too; false when the row sees nothing of it yet.
static inline bool raise_row(Work &w, float *s, int64_t r) {
  if (!w.adjust.plain) adjust_scores(w, s, r);
  return raise_maximum(s, w.from, w.to, w.full ? nullptr : w.bits + w.token_of(r) * kWords,
                       w.adjust.plain ? w.adjust.scale : 1.0f, w.most + r, w.sum + r * V::W,
                       w.values + r * w.v_pad, w.v_pad);
}

// Weights in place of the scores s [count, kTile] of rows first .. first + count.
template <int Degree>
static inline void softmax_rows(Work &w, float *s, int64_t first, int64_t count) {
  const Adjust &a = w.adjust;
  for (int64_t r = first; r < first + count; r++, s += kTile) {
    if (!raise_row(w, s, r)) {
      for (int64_t j = w.from; j < w.to; j += V::W) V::store(s + j, V::zero());
      continue;
    }
    float *sum = w.sum + r * V::W;
    V::F total = V::load(sum);
    Weigher<Degree> weigh(a.plain ? a.scale : 1.0f, w.most[r]);
    if (weigh.fused)
      for (int64_t j = w.from; j < w.to; j += V::W) {
        V::F p = weigh.quickly(V::load(s + j));
        total = V::add(total, p);
        V::store(s + j, p);
      }
    else
      for (int64_t j = w.from; j < w.to; j += V::W) {
        V::F p = weigh.carefully(V::load(s + j));
        total = V::add(total, p);
        V::store(s + j, p);
      }
    V::store(sum, total);
    if (a.v_columns)
      for (int64_t j = w.from; j < w.to; j += V::W)
        V::store(s + j, V::mul(V::load(s + j), V::load(a.v_columns + j)));
  }
}
