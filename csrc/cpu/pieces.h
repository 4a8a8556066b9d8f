// A task's keys, tile by tile and piece by piece.

// Calls attend(), which computes the tile at hand, for each tile of [begin, end) that some row
// sees a key of.
template <class Attend>
static inline void attend_tiles(Work &w, const Masks &masks, const Reach &reach, int64_t begin,
                                int64_t end, Attend attend) {
  end = lesser(end, greater(reach.head, reach.high));
  for (int64_t key = begin; key < end; key += w.tile_keys) {
    if (key >= reach.head && key + w.tile_keys <= reach.low) {
      key = reach.low / w.tile_keys * w.tile_keys;
      if (key >= end) return;
    }
    if (open_tile(w, masks, reach, key)) attend();
  }
}

// `settle()` is called once the values of a piece are complete; false when it is to be computed
// again.
template <class Attend, class Settle>
static inline void attend_pieces(Work &w, Attend attend, Settle settle) {
  if (w.plan->topk > 0) return attend_listed(w, attend, settle);
  const Task *task = w.task;
  Masks masks(w.plan, task->request);
  Reach reach(masks, w.first_token, w.last_token);
  int64_t slot = task->slot;
  for (int64_t at = task->begin; at < task->end || at == task->begin;) {
    int64_t end = lesser((at / task->piece_keys + 1) * task->piece_keys, task->end);
    do {
      begin_rows(w);
      attend_tiles(w, masks, reach, at, end, attend);
    } while (!settle());
    if (w.folds)
      fold_piece(w);
    else if (task->parts > 1)
      store_piece(w, slot++);
    else
      write_piece(w);
    if (end <= at) break;  // no key at all
    at = end;
  }
  if (w.folds) store_folded(w);
}
