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

// Calls attend(), which computes the tile at hand, for every tile of the task.
template <class Attend, class Settle>
static inline void attend_pieces(Work &w, Attend attend, Settle settle) {
  if (w.plan->topk > 0) return attend_listed(w, attend, settle);
  Masks masks(w.plan, w.task->request);
  Reach reach(masks, w.first_token, w.last_token);
  sweep_pieces(
      w,
      [&](int64_t begin, int64_t end) { attend_tiles(w, masks, reach, begin, end, attend); },
      settle);
}
