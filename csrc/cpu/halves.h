// What the kernels of AMX and of AVX-512-BF16 share: bfloat16 queries and weights; keys and values
// bfloat16, or codes that bfloat16 holds exactly.

using Half = uint16_t;

struct Span {
  int64_t from, to;
};

struct Buffers {
  Half *q;        // [rows, k_pad], or turned: [rows / 16, k_pad / 32, 512]
  Half *keys;     // turned: [tile / 16, k_pad / 32, 512]
  Half *groups;   // [2, 16, k_pad]: keys that cannot be read where they lie
  Half *values;   // [v_pad / 32, tile / 32, 2, 512]
  float *scores;  // [rows, tile]; with AMX [rows / 32 or 1, tile / 32, 32, 32]
  float *block;   // what tile registers held, on its way
  Half *weights;  // [rows, tile]; with AMX those of few rows: [tile / 16, 16, 32]
  Span *spans;    // [rows / 32]: keys that rows see
};

// Thirty-two elements from the d-th of a row of `size` on, 0 beyond its end.
template <class E>
static inline H::X take_halves(const char *row, int64_t d, int64_t size) {
  if constexpr (E::bytes == 2) {
    if (d + 32 <= size) return H::load(row + 2 * d);
    return H::load_part(row + 2 * d, size - d);
  } else {
    if (d + 32 <= size) return H::template narrow<E>(row + d);
    return H::pack(V::template get_part<E>(row + d, size - d),
                   V::template get_part<E>(row + d + V::W, size - d - V::W));
  }
}

// A row as bfloat16, 0 from `size` up to `pad`.
template <class E>
static inline void copy_halves(const char *row, int64_t size, int64_t pad, Half *to) {
  int64_t d = 0;
  if constexpr (H::looks_up<E>())
    for (; d + 64 <= size; d += 64) H::template look_up<E>(row + d, to + d);
  for (; d < pad; d += 32) H::store(to + d, take_halves<E>(row, d, size));
}

// Sixteen rows of 32 elements, as pairs of elements by rows: B from A.
static inline void turn_halves(const Half *const *rows, int64_t d, Half *to) {
  V::F x[16];
  for (int i = 0; i < 16; i++) {
    H::X row = H::load(rows[i] + d);
    __builtin_memcpy(&x[i], &row, sizeof(row));
  }
  V::transpose(x);
  for (int i = 0; i < 16; i++) V::store(reinterpret_cast<float *>(to + 32 * i), x[i]);
}

// Codes times a scale that is no power of two are no bfloat16 numbers. Rounded, they would put the
// LSE of a few keys off by 1e-3. So a row in scratch has what rounding took behind it, and a query
// row its front once more: a product of both is that of what the codes mean, to 2^-17 of it.
constexpr int64_t kSplitSize = 512;

static inline bool splits_rows(const attnplat_cpu_plan *plan) {
  return plan->kv_encoding == ATTNPLAT_MLA_FP8_656;
}

static inline void measure_halves(Work &w, const attnplat_cpu_plan *plan, const Task *task) {
  measure(w, plan, task);
  if (splits_rows(plan)) w.k_size = w.k_pad = plan->head_size + kSplitSize;
}

static inline const char *query_row(const Work &w, int64_t r) {
  const attnplat_cpu_tensors *t = w.tensors;
  int64_t token = w.plan->query_start[w.task->request] + w.first_token + w.token_of(r);
  return static_cast<const char *>(t->q) + 2 * (token * t->q_token + w.head_of(r) * t->q_head);
}

// Thirty-two elements of a query row for those of a key's row in scratch from the d-th on.
static inline H::X take_query(const Work &w, const char *row, int64_t d) {
  int64_t size = w.plan->head_size;
  return take_halves<BF16>(row, d < size ? d : d - size, size);
}

// The tile's keys as pairs of elements by keys, 16 keys and 32 elements at a time.
template <class E>
static inline void turn_tile(Work &w, const Buffers &b) {
  for (int64_t j = w.from; j < w.to; j += 16) {
    const Half *rows[16];
    for (int64_t n = 0; n < 16; n++) {
      rows[n] = reinterpret_cast<const Half *>(w.k_at[j + n]);
      if (E::bytes == 2 && w.k_size % 32 == 0) continue;
      copy_halves<E>(w.k_at[j + n], w.k_size, w.k_pad, b.groups + n * w.k_pad);
      rows[n] = b.groups + n * w.k_pad;
    }
    for (int64_t d = 0; d < w.k_pad; d += 32) turn_halves(rows, d, b.keys + j * w.k_pad + 16 * d);
  }
}

// Weights of row r from its scores; false when they are all 0.
static inline bool weigh_row(Work &w, float *s, Half *weights, int64_t r) {
  const Adjust &a = w.adjust;
  if (!raise_row(w, s, r)) {
    H::X none = H::pack(V::zero(), V::zero());
    for (int64_t j = w.from; j < w.to; j += 32) H::store(weights + j, none);
    return false;
  }
  float *sum = w.sum + r * V::W;
  V::F total = V::load(sum);
  // Weights are rounded to 2^-9 of themselves: a polynomial exact to 9e-5 is enough.
  Weigher<3> weigh(a.plain ? a.scale : 1.0f, w.most[r]);
  for (int64_t j = w.from; j < w.to; j += 32) {
    V::F x = V::load(s + j), y = V::load(s + j + 16);
    x = weigh.fused ? weigh.quickly(x) : weigh.carefully(x);
    y = weigh.fused ? weigh.quickly(y) : weigh.carefully(y);
    total = V::add(V::add(total, x), y);
    if (a.v_columns) {
      x = V::mul(x, V::load(a.v_columns + j));
      y = V::mul(y, V::load(a.v_columns + j + 16));
    }
    H::store(weights + j, H::pack(x, y));
  }
  V::store(sum, total);
  return true;
}

// Keys that come next, into the second-level cache. Where their block is of no use, nothing is
// lost: a prefetch of any address is harmless.
static inline void prefetch_keys(const Work &w, int64_t key, int64_t count, int64_t size) {
  const attnplat_cpu_plan *p = w.plan;
  const attnplat_cpu_tensors *t = w.tensors;
  if (key + count > w.task->end || !p->block_table || p->block_size % 16 != 0) return;
  if (p->topk > 0 || is_latent(p->kv_encoding)) return;
  int64_t first = p->first_block ? p->first_block[w.task->request] : 0;
  for (int64_t n = 0; n < count; n += 16) {
    int64_t column = (key + n) / p->block_size - first;
    if (column < 0 || column >= p->table_width) return;
    int64_t block = p->block_table[w.task->request * p->table_stride + column];
    uintptr_t at = uintptr_t(t->k) + uintptr_t(size * (block * t->k_block +
                                                       w.task->kv_head * t->k_head +
                                                       (key + n) % p->block_size * t->k_token));
    for (int64_t i = 0; i < 16; i++)
      prefetch_row(reinterpret_cast<const char *>(at + uintptr_t(i * size * t->k_token)),
                   w.k_size * size);
  }
}

// Pairs of keys side by side.
template <class E>
static inline void pair_values(Work &w, const Buffers &b) {
  int64_t steps = w.tile_keys / 32;
  for (int64_t j = w.from; j < w.to; j += 2) {
    if (j % 32 == 0) prefetch_keys(w, w.first_key + w.tile_keys + j, 32, E::bytes);
    const char *v0 = w.v_at[j], *v1 = w.v_at[j + 1];
    Half *to = b.values + j / 32 * 1024 + j % 32 * 16;
    for (int64_t d = 0; d < w.v_pad; d += 32, to += steps * 1024) {
      H::X x = take_halves<E>(v0, d, w.v_size), y = take_halves<E>(v1, d, w.v_size);
      H::store(to, H::mix_low(x, y));
      H::store(to + 512, H::mix_high(x, y));
    }
  }
}

// The values' sums in the order of their elements: of each 32, the first halves of four eights
// came before the second halves.
static inline void settle(Work &w) {
  for (int64_t r = 0; r < w.rows; r++)
    for (int64_t d = 0; d < w.v_pad; d += 32) {
      float *at = w.values + r * w.v_pad + d, copy[32];
      __builtin_memcpy(copy, at, sizeof(copy));
      for (int n = 0; n < 4; n++) {
        __builtin_memcpy(at + 8 * n, copy + 4 * n, 16);
        __builtin_memcpy(at + 8 * n + 4, copy + 16 + 4 * n, 16);
      }
    }
}

static bool takes(const attnplat_cpu_plan *plan) {
  return plan->dtype == ATTNPLAT_BF16 && plan->kv_encoding != ATTNPLAT_F32 &&
         plan->kv_encoding != ATTNPLAT_F16;
}

