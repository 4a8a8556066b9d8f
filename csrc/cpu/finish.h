// What becomes of a task's rows: the output, or a piece that is folded with others later.

template <class E>
static inline void put_row(const Work &w, int64_t token, int64_t head, const float *values) {
  char *to = static_cast<char *>(w.tensors->out) +
             (token * w.tensors->out_token + head * w.tensors->out_head) * E::bytes;
  for (int64_t d = 0; d < w.v_size; d += V::W) {
    V::F x = V::load(values + d);
    if (d + V::W <= w.v_size) {
      V::template put<E>(to + d * E::bytes, x);
    } else {
      alignas(64) char copy[V::W * 4];
      V::template put<E>(copy, x);
      __builtin_memcpy(to + d * E::bytes, copy, size_t(w.v_size - d) * E::bytes);
    }
  }
}

static inline float exponential(float x) { return __builtin_exp2f(x * kLog2e); }

// Output and lse of row r from its maximum, its sum, and its values, which are divided in place.
// The sink joins the sum only.
static inline void write_row(const Work &w, int64_t r, float most, float sum, float *values) {
  const attnplat_cpu_tensors *t = w.tensors;
  int64_t token = w.plan->query_start[w.task->request] + w.first_token + w.token_of(r);
  int64_t head = w.head_of(r);
  float times = t->v_scale ? t->v_scale[w.task->kv_head * t->v_scale_head] : 1.0f;
  if (t->sinks && t->sinks[head] != -kInf) {
    float sink = t->sinks[head];
    if (sink > most) {
      float less = most == -kInf ? 0.0f : exponential(most - sink);
      times *= less;
      sum = sum * less + 1.0f;
      most = sink;
    } else {
      sum += exponential(sink - most);
    }
  }
  bool seen = most != -kInf;
  times = seen ? times / sum : 0.0f;
  V::F x = V::set1(times);
  for (int64_t d = 0; d < w.v_pad; d += V::W)
    V::store(values + d, seen ? V::mul(V::load(values + d), x) : V::zero());
  switch (w.plan->dtype) {
    case ATTNPLAT_F32: put_row<F32>(w, token, head, values); break;
    case ATTNPLAT_BF16: put_row<BF16>(w, token, head, values); break;
    default: put_row<F16>(w, token, head, values);
  }
  if (t->lse)
    t->lse[token * t->lse_token + head * t->lse_head] =
        seen ? most + __builtin_logf(sum) : -kInf;
}

// What a row has come to: its maximum, its sum and its values, [v_pad].
struct Folded {
  float most, sum;
  float *values;
};

// Joins a piece's row to the pieces before it.
static inline void fold_row(Folded &to, float most, float sum, const float *values,
                            int64_t v_size) {
  if (most == -kInf) return;
  float high = most <= to.most ? to.most : most;
  float a = to.most == -kInf ? 0.0f : exponential(to.most - high);
  float b = exponential(most - high);
  to.sum = to.sum * a + sum * b;
  to.most = high;
  V::F old = V::set1(a), add = V::set1(b);
  for (int64_t d = 0; d < v_size; d += V::W) {
    V::F x = V::template get_part<F32>(values + d, v_size - d);
    V::store(to.values + d, V::fma(x, add, V::mul(V::load(to.values + d), old)));
  }
}

static inline void begin_fold(Folded &to, int64_t v_pad) {
  to.most = -kInf;
  to.sum = 0;
  for (int64_t d = 0; d < v_pad; d += V::W) V::store(to.values + d, V::zero());
}

// Rows of the piece at hand join those before it in the same task.
static inline void fold_piece(Work &w) {
  for (int64_t r = 0; r < w.rows; r++) {
    Folded to{w.folded_most[r], w.folded_sum[r], w.folded + r * w.v_pad};
    fold_row(to, w.most[r], V::hsum(V::load(w.sum + r * V::W)), w.values + r * w.v_pad, w.v_size);
    w.folded_most[r] = to.most;
    w.folded_sum[r] = to.sum;
  }
}

static inline float *partial_of(const Work &w, int64_t slot) {
  return w.tensors->partials + w.task->partial + slot * partial_slot(w.rows, w.v_size);
}

static inline void put_partial(float *to, float most, float sum, const float *values,
                               int64_t v_size) {
  to[0] = most;
  to[1] = sum;
  __builtin_memcpy(to + 2, values, size_t(v_size) * sizeof(float));
}

// The piece at hand as a partial.
static inline void store_piece(const Work &w, int64_t slot) {
  float *to = partial_of(w, slot);
  for (int64_t r = 0; r < w.rows; r++)
    put_partial(to + r * partial_row(w.v_size), w.most[r], V::hsum(V::load(w.sum + r * V::W)),
                w.values + r * w.v_pad, w.v_size);
}

// What the task folded, as a partial or as the result.
static inline void store_folded(const Work &w) {
  for (int64_t r = 0; r < w.rows; r++) {
    float *values = w.folded + r * w.v_pad;
    if (w.task->parts == 1)
      write_row(w, r, w.folded_most[r], w.folded_sum[r], values);
    else
      put_partial(partial_of(w, 0) + r * partial_row(w.v_size), w.folded_most[r], w.folded_sum[r],
                  values, w.v_size);
  }
}

// The piece at hand, as a result of its own.
static inline void write_piece(const Work &w) {
  for (int64_t r = 0; r < w.rows; r++)
    write_row(w, r, w.most[r], V::hsum(V::load(w.sum + r * V::W)), w.values + r * w.v_pad);
}

// Calls sweep(begin, end), which attends to the keys of a piece, for each piece of the task's keys,
// and takes what it found to where it belongs. `settle()` is called once the values of a piece are
// complete; false when it is to be computed again.
template <class Sweep, class Settle>
static inline void sweep_pieces(Work &w, Sweep sweep, Settle settle) {
  const Task *task = w.task;
  int64_t slot = task->slot;
  for (int64_t at = task->begin; at < task->end || at == task->begin;) {
    int64_t end = lesser((at / task->piece_keys + 1) * task->piece_keys, task->end);
    do {
      begin_rows(w);
      sweep(at, end);
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

// Folds a result's partials, first to last.
static void fold_partials(const attnplat_cpu_plan *plan, const attnplat_cpu_tensors *tensors,
                          const Task *task, void *scratch) {
  Work w;
  w.tensors = tensors;
  measure(w, plan, task);
  for (int64_t r = 0; r < w.rows; r++) {
    Folded to{0, 0, static_cast<float *>(scratch)};
    begin_fold(to, w.v_pad);
    for (int64_t slot = 0; slot < task->slots; slot++) {
      const float *row = partial_of(w, slot) + r * partial_row(w.v_size);
      fold_row(to, row[0], row[1], row + 2, w.v_size);
    }
    write_row(w, r, to.most, to.sum, to.values);
  }
}
