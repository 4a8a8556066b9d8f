// Keys that a query token names itself: its topk, in order, each once, those that its mask shows.
//
// Plain integers; the scalar kernels share it. Included inside an instruction set's namespace,
// after masks.h.

// Whether the token sees a key by everything but its topk.
static inline bool sees_key(const Masks &masks, const Sight &s, int64_t token, int64_t key) {
  if (key < 0 || key >= masks.seq_len) return false;
  if (!masks.plan->tree_mask && masks.num_ranges == 0)
    return (key >= s.low && key < s.high) || key < s.head;
  return masks.bits(s, token, key / 64 * 64) >> (key % 64) & 1;
}

// Sorts by eleven bits at a time; `work` has room for as many.
static inline void sort_keys(int32_t *keys, int64_t count, int32_t *work) {
  for (int shift = 0; shift < 33; shift += 11) {
    int32_t places[2048] = {0};
    int32_t place = 0;
    for (int64_t n = 0; n < count; n++) places[keys[n] >> shift & 2047]++;
    for (int digit = 0; digit < 2048; digit++) {
      int32_t have = places[digit];
      places[digit] = place;
      place += have;
    }
    for (int64_t n = 0; n < count; n++) work[places[keys[n] >> shift & 2047]++] = keys[n];
    int32_t *sorted = work;
    work = keys;
    keys = sorted;
  }
}

// The keys of a row of indices into `list`, room for twice as many; how many there are.
static inline int64_t list_keys(const Masks &masks, int64_t token, const int32_t *indices,
                                int64_t count, int32_t *list) {
  Sight s = masks.sight(token);
  int64_t kept = 0;
  bool sorted = true;
  for (int64_t n = 0; n < count; n++) {
    if (!sees_key(masks, s, token, indices[n])) continue;
    sorted = sorted && (kept == 0 || list[kept - 1] < indices[n]);
    list[kept++] = indices[n];
  }
  if (sorted) return kept;
  // Three passes: the sorted keys are in the second half.
  int32_t *from = list + count;
  sort_keys(list, kept, from);
  int64_t distinct = 0;
  for (int64_t n = 0; n < kept; n++)
    if (n == 0 || from[n] != from[n - 1]) list[distinct++] = from[n];
  return distinct;
}
