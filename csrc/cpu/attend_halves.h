// The kernels of an instruction set with bfloat16 products, and for what these do not take those of
// `rest`, another's.

static inline void decode_tile(Work &w) {
  int64_t rest = w.plan->head_size, split = splits_rows(w.plan) ? kSplitSize : 0;
  for (int64_t n = w.from; n < w.to; n++) {
    if (w.k_at[n] == w.zeros) continue;
    Half *to = reinterpret_cast<Half *>(w.decoded) + n * w.k_pad;
    V::F low = V::zero();
    decode_latent(w.plan->kv_encoding, reinterpret_cast<const uint8_t *>(w.k_at[n]),
                  w.scales_at[n], [=, &low](int64_t d, V::F x) {
                    if (d % 32 == 0) {
                      low = x;
                      return;
                    }
                    Half *own = to + d - 16;
                    H::store(own, H::pack(low, x));
                    if (d >= split) return;
                    V::F y = V::sub(low, V::template get<BF16>(reinterpret_cast<char *>(own)));
                    V::F z = V::sub(x, V::template get<BF16>(reinterpret_cast<char *>(own + 16)));
                    H::store(own + rest, H::pack(y, z));
                  });
    w.k_at[n] = w.v_at[n] = reinterpret_cast<const char *>(to);
  }
}

template <class E>
static inline void attend_as(Work &w, const Buffers &b) {
  attend_pieces(w, [&] { attend_tile<E>(w, b); }, [&] { return settle_tiles(w, b); });
}

static void attend_task(const attnplat_cpu_plan *plan, const attnplat_cpu_tensors *tensors,
                        const Task *task, void *scratch) {
  Work w;
  Buffers b;
  Arena arena{static_cast<char *>(scratch), 0};
  w.tensors = tensors;
  measure_tiles(w, plan, task);
  place(w, arena);
  place_buffers(w, arena, b);
  begin_task(w);
  read_queries(w, b);
  read_topk(w);
  read_adjust(w);
  switch (plan->kv_encoding) {
    case ATTNPLAT_BF16: return attend_as<BF16>(w, b);
    case ATTNPLAT_E4M3FN: return attend_as<E4M3>(w, b);
    case ATTNPLAT_E5M2: return attend_as<E5M2>(w, b);
    case ATTNPLAT_INT8: return attend_as<INT8>(w, b);
    default: return attend_as<BF16>(w, b);  // latent rows
  }
}

static int64_t scratch_of(const attnplat_cpu_plan *plan, const Task *task) {
  Work w;
  Buffers b;
  Arena arena{nullptr, 0};
  measure_tiles(w, plan, task);
  place(w, arena);
  place_buffers(w, arena, b);
  return arena.used;
}

static int32_t any_block_rows(const attnplat_cpu_plan *plan, int64_t rows) {
  return takes(plan) ? block_rows(plan, rows) : rest.block_rows(plan, rows);
}

static int32_t any_few_rows(const attnplat_cpu_plan *plan) {
  return takes(plan) ? few_rows_of(plan) : rest.few_rows(plan);
}

static int64_t any_scratch(const attnplat_cpu_plan *plan, const Task *task) {
  return takes(plan) ? scratch_of(plan, task) : rest.scratch_bytes(plan, task);
}

static void any_attend(const attnplat_cpu_plan *plan, const attnplat_cpu_tensors *tensors,
                       const Task *task, void *scratch) {
  (takes(plan) ? attend_task : rest.attend)(plan, tensors, task, scratch);
}

static void any_fold(const attnplat_cpu_plan *plan, const attnplat_cpu_tensors *tensors,
                     const Task *task, void *scratch) {
  (takes(plan) ? fold_partials : rest.fold)(plan, tensors, task, scratch);
}

static uint64_t any_read(const void *data, int64_t bytes) { return rest.read(data, bytes); }
