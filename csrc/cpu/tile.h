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
  bool careful;  // the piece is computed again, in a way that spoils no other element
  int32_t *list;   // [2, topk]: keys of the task's only token, where it names them
  int64_t listed;  // how many they are
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
  const uint8_t **scales_at;  // those of latent rows that keep them apart
  char *decoded;              // [tile, 4 * k_pad]: latent rows
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
  w.careful = false;
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
  w.list = arena.take<int32_t>(2 * int64_t(w.plan->topk));
  w.zeros = arena.take<char>(4 * greater(w.k_pad, w.v_pad));
  w.bits = arena.take<uint64_t>(w.tokens() * kWords);
  w.k_at = arena.take<const char *>(kTile);
  w.v_at = arena.take<const char *>(kTile);
  bool latent = is_latent(w.plan->kv_encoding);
  w.scales_at = arena.take<const uint8_t *>(latent ? kTile : 0);
  w.decoded = arena.take<char>(latent ? 4 * w.tile_keys * w.k_pad : 0);
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
  int64_t size = round_up(w.rows, kPadRows) * w.v_pad;
  for (int64_t n = 0; n < size; n += V::W) V::store(w.values + n, V::zero());
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

// The keys that the task's token names, where tokens do.
static inline void read_topk(Work &w) {
  w.listed = 0;
  if (w.plan->topk == 0) return;
  const attnplat_cpu_tensors *t = w.tensors;
  int64_t row = w.plan->query_start[w.task->request] + w.first_token;
  w.listed = list_keys(Masks(w.plan, w.task->request), w.first_token,
                       t->topk_indices + row * t->topk_stride, t->topk_count, w.list);
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

// Latent rows of the tile become rows of what the unit's kernels read.
static inline void decode_tile(Work &w);

// Whether a row sees one of so many keys of the tile.
static inline bool any_seen(const Work &w, int64_t from, int64_t count) {
  for (int64_t n = from / 64; n <= (from + count - 1) / 64; n++)
    if (w.seen[n] & Masks::span_bits(64 * n, from, from + count)) return true;
  return false;
}

// Keys n .. n + count of the tile are those of a block from `offset` on; packed rows are one block.
static inline void locate_block(Work &w, int64_t n, int64_t count, int64_t block, int64_t offset) {
  const attnplat_cpu_tensors *t = w.tensors;
  int64_t head = w.task->kv_head, size = bytes_of(w.plan->kv_encoding);
  bool packed = !w.plan->block_table;
  int64_t k_step = size * (packed ? t->k_block : t->k_token);
  int64_t v_step = size * (packed ? t->v_block : t->v_token);
  const char *k = static_cast<const char *>(t->k) + offset * k_step;
  const char *v = static_cast<const char *>(t->v) + offset * v_step;
  k += size * (block * t->k_block + head * t->k_head);
  v += size * (block * t->v_block + head * t->v_head);
  for (int64_t i = 0; i < count; i++) w.k_at[n + i] = k + i * k_step;
  for (int64_t i = 0; i < count; i++) w.v_at[n + i] = v + i * v_step;
  if (!t->row_scales) return;
  const uint8_t *scales = t->row_scales + block * t->row_scales_block;
  for (int64_t i = 0; i < count; i++)
    w.scales_at[n + i] = scales + (offset + i) * t->row_scales_token;
}

// Keys that no row sees are zeros; those that are seen may have scales.
static inline void locate_columns(Work &w) {
  const attnplat_cpu_tensors *t = w.tensors;
  bool scaled = t->k_scale_at || t->v_scale_at;
  for (int64_t n = w.from; n < w.to; n++) {
    if (n % 64 == 0 && w.seen[n / 64] == ~uint64_t(0) && !scaled) {
      n += 63;
      continue;
    }
    bool seen = w.seen[n / 64] >> (n % 64) & 1;
    if (!seen) w.k_at[n] = w.v_at[n] = w.zeros;
    w.k_columns[n] = w.v_columns[n] = 0;
    if (seen && t->k_scale_at) __builtin_memcpy(w.k_columns + n, w.k_at[n] + t->k_scale_at, 4);
    if (seen && t->v_scale_at) __builtin_memcpy(w.v_columns + n, w.v_at[n] + t->v_scale_at, 4);
  }
}

// Where the tile's keys and values are; those that no row sees are zeros and not read, nor is a
// block's id of which no key is seen.
static inline void locate(Work &w) {
  const attnplat_cpu_plan *p = w.plan;
  int64_t request = w.task->request, block_size = p->block_size;
  int64_t first = p->first_block ? p->first_block[request] : 0;
  if (!p->block_table) {
    locate_block(w, 0, w.tile_keys, p->kv_start[request], w.first_key);
  } else {
    const int32_t *table = p->block_table + request * p->table_stride - first;
    int64_t at = w.first_key / block_size, offset = w.first_key % block_size;
    for (int64_t n = 0, count; n < w.tile_keys; n += count, offset = 0, at++) {
      count = lesser(block_size - offset, w.tile_keys - n);
      if (any_seen(w, n, count)) locate_block(w, n, count, table[at], offset);
    }
  }
  locate_columns(w);
  if (is_latent(p->kv_encoding)) decode_tile(w);
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
      uint64_t bits = masks.bits(s, w.first_token + n, key);
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

// The same where the tile's keys are of a list: positions are not in a row.
static inline void adjust_listed(Work &w, float *s, int64_t head, int64_t query, int64_t context) {
  const attnplat_cpu_tensors *t = w.tensors;
  adjust_row(w.adjust, s, w.from, w.to, 0, 0, nullptr, 0);
  const int32_t *keys = w.list + w.first_key;
  for (int64_t j = w.low; j < w.high && t->alibi_slopes; j++) {
    int64_t away = context + query - keys[j];
    s[j] -= t->alibi_slopes[head] * float(away < 0 ? -away : away);
  }
  const float *bias = t->position_bias + w.task->request * t->bias_request +
                      head * t->bias_head + query * t->bias_query;
  for (int64_t j = w.low; j < w.high && t->position_bias; j++) s[j] += bias[keys[j]];
}

// Logits in place of the scores s of row r, where there is more to them than the products.
static inline void adjust_scores(Work &w, float *s, int64_t r) {
  const attnplat_cpu_tensors *t = w.tensors;
  int64_t head = w.head_of(r), query = w.first_token + w.token_of(r);
  int64_t seq_len = w.plan->seq_lens[w.task->request];
  int64_t start = w.plan->query_start[w.task->request];
  int64_t context = seq_len - (w.plan->query_start[w.task->request + 1] - start);
  if (w.plan->topk > 0) return adjust_listed(w, s, head, query, context);
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
