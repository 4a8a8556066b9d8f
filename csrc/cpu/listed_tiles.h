// A task whose keys are a list: entries [begin, end) of it instead of positions. Each task is of one
// query token. Rows are found one by one, so that no tile holds a key that is not wanted.

// Where entries [first, first + count) are; zeros behind them.
static inline void locate_listed(Work &w, int64_t first, int64_t count) {
  const attnplat_cpu_plan *p = w.plan;
  const attnplat_cpu_tensors *t = w.tensors;
  int64_t request = w.task->request, head = w.task->kv_head, size = bytes_of(p->kv_encoding);
  int64_t start = p->block_table ? 0 : p->kv_start[request];
  int64_t first_block = p->block_table && p->first_block ? p->first_block[request] : 0;
  const int32_t *table =
      p->block_table ? p->block_table + request * p->table_stride - first_block : nullptr;
  for (int64_t n = 0; n < w.tile_keys; n++) {
    if (n >= count) {
      w.k_at[n] = w.v_at[n] = w.zeros;
      w.k_columns[n] = w.v_columns[n] = 0;
      continue;
    }
    int64_t key = w.list[first + n], offset = table ? key % p->block_size : 0;
    int64_t block = table ? table[key / p->block_size] : start + key;
    w.k_at[n] = static_cast<const char *>(t->k) +
                (block * t->k_block + head * t->k_head + offset * t->k_token) * size;
    w.v_at[n] = static_cast<const char *>(t->v) +
                (block * t->v_block + head * t->v_head + offset * t->v_token) * size;
    if (t->k_scale_at) __builtin_memcpy(w.k_columns + n, w.k_at[n] + t->k_scale_at, 4);
    if (t->v_scale_at) __builtin_memcpy(w.v_columns + n, w.v_at[n] + t->v_scale_at, 4);
    if (t->row_scales)
      w.scales_at[n] = t->row_scales + block * t->row_scales_block + offset * t->row_scales_token;
  }
  if (is_latent(p->kv_encoding)) decode_tile(w);
}

// Makes entries [first, first + count) of the list the tile at hand.
static inline void open_listed(Work &w, int64_t first, int64_t count) {
  w.first_key = first;
  w.low = w.from = 0;
  w.high = count;
  w.to = round_up(count, kStep);
  w.full = count == w.to;
  for (int64_t n = 0; n < w.tile_keys / 64; n++)
    w.seen[n] = w.bits[n] = Masks::span_bits(64 * n, 0, count);
  locate_listed(w, first, count);
}

// As attend_pieces, over the entries of the list.
template <class Attend, class Settle>
static inline void attend_listed(Work &w, Attend attend, Settle settle) {
  sweep_pieces(
      w,
      [&](int64_t begin, int64_t end) {
        end = lesser(end, w.listed);
        for (int64_t first = begin; first < end; first += w.tile_keys) {
          open_listed(w, first, lesser(end - first, w.tile_keys));
          attend();
        }
      },
      settle);
}
