// Attention of one task with float32 vectors: the kernels of AVX2, AVX-512 and NEON.

// Rows computed together where lanes run over keys: as many as fit the registers.
constexpr int kManyRows = V::W == 8 ? 6 : V::W == 16 ? 12 : 8;
constexpr int64_t kBlockRows = 96;
constexpr int64_t kFewRows = 8;

static void nothing() {}
static bool settled() { return true; }

struct Buffers {
  float *scores;  // [kManyRows, kTile]
  float *keys;    // [kTile, k_size] turned; only for many rows
  float *wide;    // [kTile, v_pad]
};

static inline void place_buffers(Work &w, Arena &arena, Buffers &b) {
  w.q = arena.take<float>(w.rows * w.k_pad);
  b.scores = arena.take<float>(kManyRows * kTile);
  b.keys = arena.take<float>(w.task->few ? 0 : kTile * w.k_size);
  b.wide = arena.take<float>(w.task->few ? 0 : kTile * w.v_pad);
}

template <class E, int Degree, int Rows>
static inline void few_rows(Work &w, const Buffers &b, int64_t first) {
  few_scores<E, Rows>(w, w.q + first * w.k_pad, b.scores);
  softmax_rows<Degree>(w, b.scores, first, Rows);
  few_values<E, Rows>(w, b.scores, w.values + first * w.v_pad);
}

template <int Degree, int Rows>
static inline void many_rows(Work &w, const Buffers &b, int64_t first) {
  many_scores<Rows>(w, w.q + first * w.k_pad, b.keys, b.scores);
  softmax_rows<Degree>(w, b.scores, first, Rows);
  many_values<Rows>(w, b.scores, b.wide, w.values + first * w.v_pad);
}

template <class E, int Degree>
static inline void few_tile(Work &w, const Buffers &b) {
  for (int64_t first = 0; first < w.rows; first += 4) switch (w.rows - first) {
      case 1: few_rows<E, Degree, 1>(w, b, first); break;
      case 2: few_rows<E, Degree, 2>(w, b, first); break;
      case 3: few_rows<E, Degree, 3>(w, b, first); break;
      default: few_rows<E, Degree, 4>(w, b, first);
    }
}

// Rows left over at the end go in halves: no kernel for each count.
template <int Degree, int Rows>
static inline int64_t many_left(Work &w, const Buffers &b, int64_t first) {
  for (; first + Rows <= w.rows; first += Rows) many_rows<Degree, Rows>(w, b, first);
  if constexpr (Rows > 1) first = many_left<Degree, Rows / 2>(w, b, first);
  return first;
}

template <class E, int Degree>
static inline void many_tile(Work &w, const Buffers &b) {
  turn_keys<E>(w, b.keys);
  widen_values<E>(w, b.wide);
  many_left<Degree, kManyRows>(w, b, 0);
}

template <class E, int Degree>
static inline void attend_tile(Work &w, const Buffers &b) {
  if (w.task->few)
    few_tile<E, Degree>(w, b);
  else
    many_tile<E, Degree>(w, b);
}

static inline void decode_tile(Work &w) {
  for (int64_t n = w.from; n < w.to; n++) {
    if (w.k_at[n] == w.zeros) continue;
    float *to = reinterpret_cast<float *>(w.decoded) + n * w.k_pad;
    decode_latent(w.plan->kv_encoding, reinterpret_cast<const uint8_t *>(w.k_at[n]),
                  w.scales_at[n], [to](int64_t d, V::F x) { V::store(to + d, x); });
    w.k_at[n] = w.v_at[n] = reinterpret_cast<const char *>(to);
  }
}

template <class E>
static inline void attend_as(Work &w, const Buffers &b) {
  if (w.plan->dtype == ATTNPLAT_F32)
    attend_pieces(w, [&] { attend_tile<E, 5>(w, b); }, settled);
  else
    attend_pieces(w, [&] { attend_tile<E, 4>(w, b); }, settled);
}

static void attend_task(const attnplat_cpu_plan *plan, const attnplat_cpu_tensors *tensors,
                        const Task *task, void *scratch) {
  Work w;
  Buffers b;
  Arena arena{static_cast<char *>(scratch), 0};
  w.tensors = tensors;
  measure(w, plan, task);
  place(w, arena);
  place_buffers(w, arena, b);
  begin_task(w);
  read_q(w);
  read_topk(w);
  read_adjust(w);
  switch (plan->kv_encoding) {
    case ATTNPLAT_F32: return attend_as<F32>(w, b);
    case ATTNPLAT_BF16: return attend_as<BF16>(w, b);
    case ATTNPLAT_F16: return attend_as<F16>(w, b);
    case ATTNPLAT_E4M3FN: return attend_as<E4M3>(w, b);
    case ATTNPLAT_E5M2: return attend_as<E5M2>(w, b);
    case ATTNPLAT_INT8: return attend_as<INT8>(w, b);
    default: return attend_as<F32>(w, b);  // latent rows
  }
}

static int64_t scratch_of(const attnplat_cpu_plan *plan, const Task *task) {
  Work w;
  Buffers b;
  Arena arena{nullptr, 0};
  measure(w, plan, task);
  place(w, arena);
  place_buffers(w, arena, b);
  return arena.used;
}

static int32_t block_rows(const attnplat_cpu_plan *, int64_t) { return kBlockRows; }
static int32_t few_rows_of(const attnplat_cpu_plan *) { return kFewRows; }

static uint64_t read_memory(const void *data, int64_t bytes) {
  typedef uint64_t Words __attribute__((vector_size(4 * V::W)));
  const char *at = static_cast<const char *>(data);
  constexpr int64_t kStride = int64_t(8 * sizeof(Words));
  Words sums[8] = {};
  for (int64_t n = 0; n + kStride <= bytes; n += kStride)
    for (int i = 0; i < 8; i++) {
      Words x;
      __builtin_memcpy(&x, at + n + i * int64_t(sizeof(x)), sizeof(x));
      sums[i] += x;
    }
  uint64_t sum = 0;
  for (int i = 0; i < 8; i++)
    for (size_t n = 0; n < sizeof(Words) / 8; n++) sum += sums[i][n];
  return sum;
}

// Fused multiplications and additions from L1: `rounds` times 64 of them by 6 sums.
static int64_t multiply(int64_t rounds) {
  alignas(64) static const float data[64 * V::W] = {0};
  V::F sums[12];
  for (int i = 0; i < 12; i++) sums[i] = V::zero();
  for (int64_t n = 0; n < rounds; n++)
    for (int j = 0; j < 64; j++) {
      V::F x = V::load(data + j * V::W);
      for (int i = 0; i < 12; i++) sums[i] = V::fma(x, sums[i], x);
    }
  volatile float keep = 0;
  for (int i = 0; i < 12; i++) keep = keep + V::hsum(sums[i]);
  return rounds * 64 * 12 * V::W * 2;
}
