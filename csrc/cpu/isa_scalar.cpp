// Plain C++, one row and one key at a time, sums in float64: runs anywhere, and is the yardstick
// of the other instruction sets' kernels. It shares the mask algebra with them and nothing else.

#include <stddef.h>

#include "kernels.h"

namespace attnplat_cpu {
namespace scalar {
#include "encodings.h"
#include "masks.h"
#include "listed.h"

constexpr double kInf = __builtin_inf();

static float from_bits(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

static uint32_t to_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}

static float from_half(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 31, rest = h & 1023;
  if (exponent == 31) return from_bits(sign | 0x7f800000 | rest << 13);
  if (exponent == 0) return from_bits(sign) + (sign ? -1.0f : 1.0f) * float(rest) / 16777216.0f;
  return from_bits(sign | (exponent + 112) << 23 | rest << 13);
}

// Nearest, ties to even.
static uint16_t to_half(float x) {
  uint32_t bits = to_bits(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (size >= 0x47800000) return uint16_t(sign | 0x7c00);
  if (size < 0x38800000)  // subnormal: adding 0.5 leaves units of 2^-24 in the last bits
    return uint16_t(sign | (to_bits(from_bits(size) + 0.5f) - 0x3f000000));
  return uint16_t(sign | ((size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13));
}

static uint16_t to_bfloat(float x) {
  uint32_t bits = to_bits(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static double e2m1(int code) {
  const double sizes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return code & 8 ? -sizes[code & 7] : sizes[code & 7];
}

// 2^(byte - 127).
static double power_of_two(uint8_t byte) {
  return byte == 255 ? __builtin_nan("") : __builtin_ldexp(1.0, byte - 127);
}

static double get(const void *at, int64_t n, int32_t encoding) {
  switch (encoding) {
    case ATTNPLAT_F32: return static_cast<const float *>(at)[n];
    case ATTNPLAT_BF16: return from_bits(uint32_t(static_cast<const uint16_t *>(at)[n]) << 16);
    case ATTNPLAT_F16: return from_half(static_cast<const uint16_t *>(at)[n]);
    case ATTNPLAT_INT8: return static_cast<const int8_t *>(at)[n];
    default: break;
  }
  uint8_t code = static_cast<const uint8_t *>(at)[n];
  if (encoding == ATTNPLAT_E5M2) return from_half(uint16_t(code << 8));
  int exponent = code >> 3 & 15, rest = code & 7;
  double size = exponent == 0 ? rest / 512.0 : (8 + rest) / 1024.0 * double(1 << exponent);
  if ((code & 0x7f) == 0x7f) size = __builtin_nan("");
  return code & 0x80 ? -size : size;
}

// Element d of a latent row; `scales` are those that a page keeps apart.
static double get_latent(const uint8_t *row, const uint8_t *scales, int64_t d, int32_t encoding) {
  switch (encoding) {
    case ATTNPLAT_MLA_FP8_656:
      if (d >= 512) return get(row + 528, d - 512, ATTNPLAT_BF16);
      float scale;
      __builtin_memcpy(&scale, row + 512 + d / 128 * 4, 4);
      return get(row, d, ATTNPLAT_E4M3FN) * scale;
    case ATTNPLAT_MLA_FP8_584:
      if (d >= 448) return get(row + 448, d - 448, ATTNPLAT_BF16);
      return get(row, d, ATTNPLAT_E4M3FN) * power_of_two(scales[d / 64]);
    case ATTNPLAT_MLA_FP8_528:
      return get(row, d, ATTNPLAT_E4M3FN) * power_of_two(row[512 + d / 32]);
    default:
      if (d >= 512) return get(row + 256, d - 512, ATTNPLAT_E4M3FN);
      return e2m1(row[d / 2] >> (d % 2 * 4) & 15) *
             get(row + 320, d / 16 % 4 * 8 + d / 64, ATTNPLAT_E4M3FN);
  }
}

// The scale inside a row of codes that begins at the n-th byte.
static float row_scale(const void *at, int64_t n, int64_t offset) {
  float x;
  __builtin_memcpy(&x, static_cast<const char *>(at) + n + offset, 4);
  return x;
}

static void put(void *at, int64_t n, float x, int32_t encoding) {
  if (encoding == ATTNPLAT_F32)
    static_cast<float *>(at)[n] = x;
  else
    static_cast<uint16_t *>(at)[n] = encoding == ATTNPLAT_BF16 ? to_bfloat(x) : to_half(x);
}

// A row of a task.
struct Row {
  const attnplat_cpu_plan *plan;
  const attnplat_cpu_tensors *t;
  const Task *task;
  int64_t token, head, at;  // token of the request, query head, row of q and out

  Row(const attnplat_cpu_plan *plan_, const attnplat_cpu_tensors *t_, const Task *task_,
      int64_t row)
      : plan(plan_), t(t_), task(task_) {
    int64_t group = plan->num_heads / plan->num_kv_heads;
    token = row / group;
    head = task->kv_head * group + row % group;
    at = plan->query_start[task->request] + token;
  }

  // Block and offset of a key.
  void find(int64_t key, int64_t *block, int64_t *offset) const {
    if (!plan->block_table) {
      *block = plan->kv_start[task->request] + key;
      *offset = 0;
      return;
    }
    int64_t first = plan->first_block ? plan->first_block[task->request] : 0;
    *block = plan->block_table[task->request * plan->table_stride + key / plan->block_size - first];
    *offset = key % plan->block_size;
  }

  // Element d of the key or value that begins at the n-th element of a plane.
  double element(const void *plane, int64_t n, int64_t d, int64_t block, int64_t offset) const {
    if (plan->kv_encoding < ATTNPLAT_MLA_FP8_656) return get(plane, n + d, plan->kv_encoding);
    const uint8_t *scales = nullptr;
    if (t->row_scales)
      scales = t->row_scales + block * t->row_scales_block + offset * t->row_scales_token;
    return get_latent(static_cast<const uint8_t *>(plane) + n, scales, d, plan->kv_encoding);
  }

  double logit(int64_t key, int64_t position) const {
    int64_t block, offset;
    find(key, &block, &offset);
    int64_t q = at * t->q_token + head * t->q_head;
    int64_t k = block * t->k_block + task->kv_head * t->k_head + offset * t->k_token;
    double s = 0;
    for (int64_t d = 0; d < plan->head_size; d++)
      s += get(t->q, q + d, plan->dtype) * element(t->k, k, d, block, offset);
    s *= t->scale;
    if (t->k_scale) s *= t->k_scale[task->kv_head * t->k_scale_head];
    if (t->k_scale_at) s *= row_scale(t->k, k, t->k_scale_at);
    if (t->logits_soft_cap > 0)
      s = t->logits_soft_cap * __builtin_tanh(s / t->logits_soft_cap);
    if (t->alibi_slopes)
      s -= t->alibi_slopes[head] * double(position > key ? position - key : key - position);
    if (t->position_bias)
      s += t->position_bias[task->request * t->bias_request + head * t->bias_head +
                            token * t->bias_query + key];
    return s;
  }

  void add_value(int64_t key, double weight, double *sums) const {
    int64_t block, offset;
    find(key, &block, &offset);
    int64_t v = block * t->v_block + task->kv_head * t->v_head + offset * t->v_token;
    if (t->v_scale_at) weight *= row_scale(t->v, v, t->v_scale_at);
    for (int64_t d = 0; d < plan->v_head_size; d++)
      sums[d] += weight * element(t->v, v, d, block, offset);
  }

  // Output and lse from what was summed; the sink joins the sum only.
  void write(double most, double sum, const double *values) const {
    double times = t->v_scale ? t->v_scale[task->kv_head * t->v_scale_head] : 1;
    double sink = t->sinks ? t->sinks[head] : -kInf;
    if (sink != -kInf) {
      double high = sink > most ? sink : most;
      double less = most == -kInf ? 0 : __builtin_exp(most - high);
      times *= less;
      sum = sum * less + __builtin_exp(sink - high);
      most = high;
    }
    bool seen = most != -kInf;
    for (int64_t d = 0; d < plan->v_head_size; d++)
      put(t->out, at * t->out_token + head * t->out_head + d,
          seen ? float(values[d] * times / sum) : 0.0f, plan->dtype);
    if (t->lse)
      t->lse[at * t->lse_token + head * t->lse_head] =
          seen ? float(most + __builtin_log(sum)) : float(-kInf);
  }

  // The keys that the row's token names, into `list`; how many they are.
  int64_t read_list(const Masks &masks, int32_t *list) const {
    if (plan->topk == 0) return 0;
    return list_keys(masks, token, t->topk_indices + at * t->topk_stride, t->topk_count, list);
  }

  // Maximum, sum and values over keys [begin, end), or over those entries of the list.
  void attend(const Masks &masks, int64_t begin, int64_t end, const int32_t *list, int64_t listed,
              double *logits, double *most, double *sum, double *values) const {
    Sight sight = masks.sight(token);
    *most = -kInf;
    *sum = 0;
    if (plan->topk > 0) end = lesser(end, listed);
    for (int64_t n = begin; n < end; n++) {
      int64_t key = plan->topk > 0 ? list[n] : n;
      bool sees = masks.bits(sight, token, key / 64 * 64) >> (key % 64) & 1;
      double s = sees ? logit(key, sight.position) : -kInf;
      logits[n - begin] = s;
      if (!(s <= *most)) *most = s;
    }
    for (int64_t d = 0; d < plan->v_head_size; d++) values[d] = 0;
    for (int64_t n = begin; n < end && *most != -kInf; n++) {
      if (logits[n - begin] == -kInf) continue;
      double weight = __builtin_exp(logits[n - begin] - *most);
      *sum += weight;
      add_value(plan->topk > 0 ? list[n] : n, weight, values);
    }
  }
};

// A row's partial is float32 throughout, kept as such or not: the bits are the same.
static void put_partial(float *to, double most, double sum, const double *values, int64_t size) {
  to[0] = float(most);
  double times = most == -kInf ? 0 : __builtin_exp(most - to[0]);
  to[1] = float(sum * times);
  for (int64_t d = 0; d < size; d++) to[2 + d] = float(values[d] * times);
}

static void fold_row(float *to, const float *piece, int64_t size) {
  if (piece[0] == float(-kInf)) return;
  float high = piece[0] <= to[0] ? to[0] : piece[0];
  double a = to[0] == float(-kInf) ? 0 : __builtin_exp(double(to[0]) - high);
  double b = __builtin_exp(double(piece[0]) - high);
  to[0] = high;
  for (int64_t d = 1; d < size + 2; d++) to[d] = float(to[d] * a + piece[d] * b);
}

static void write_partial(const Row &row, const float *partial, double *values) {
  for (int64_t d = 0; d < row.plan->v_head_size; d++) values[d] = partial[2 + d];
  row.write(partial[0], partial[1], values);
}

struct Scratch {
  double *values, *logits;
  float *piece, *folded;
  int32_t *list;

  Scratch(const attnplat_cpu_plan *plan, const Task *task, void *memory) {
    int64_t size = plan->v_head_size;
    values = static_cast<double *>(memory);
    logits = values + size;
    piece = reinterpret_cast<float *>(logits + keys(task));
    folded = piece + partial_row(size);
    list = reinterpret_cast<int32_t *>(folded + partial_row(size));
  }

  static int64_t keys(const Task *task) {
    return lesser(task->end - task->begin, task->piece_keys);
  }

  static int64_t bytes(const attnplat_cpu_plan *plan, const Task *task) {
    return 8 * (plan->v_head_size + keys(task)) + 8 * partial_row(plan->v_head_size) +
           8 * int64_t(plan->topk);
  }
};

static void attend_row(const Row &row, const Masks &masks, const Scratch &s) {
  const Task *task = row.task;
  int64_t size = row.plan->v_head_size, rows = task->last_row - task->first_row;
  int64_t group = row.plan->num_heads / row.plan->num_kv_heads;
  int64_t nth = row.token * group + row.head % group - task->first_row;
  float *to = task->parts > 1 ? row.t->partials + task->partial + nth * partial_row(size) : nullptr;
  bool several = task->end - task->begin > task->piece_keys;
  s.folded[0] = float(-kInf);
  for (int64_t d = 1; d < size + 2; d++) s.folded[d] = 0;
  double most = -kInf, sum = 0;
  int64_t listed = row.read_list(masks, s.list);
  int64_t slot = task->slot;
  for (int64_t at = task->begin; at < task->end || at == task->begin;) {
    int64_t end = lesser((at / task->piece_keys + 1) * task->piece_keys, task->end);
    row.attend(masks, at, end, s.list, listed, s.logits, &most, &sum, s.values);
    put_partial(s.piece, most, sum, s.values, size);
    if (task->parts > 1 && slot > 0)
      __builtin_memcpy(to + slot++ * partial_slot(rows, size), s.piece,
                       size_t(partial_row(size)) * sizeof(float));
    else
      fold_row(s.folded, s.piece, size);
    if (end <= at) break;
    at = end;
  }
  if (task->parts == 1 && !several)
    row.write(most, sum, s.values);
  else if (task->parts == 1)
    write_partial(row, s.folded, s.values);
  else if (task->slot == 0)
    __builtin_memcpy(to, s.folded, size_t(partial_row(size)) * sizeof(float));
}

static void attend_task(const attnplat_cpu_plan *plan, const attnplat_cpu_tensors *tensors,
                        const Task *task, void *scratch) {
  Masks masks(plan, task->request);
  Scratch s(plan, task, scratch);
  for (int64_t row = task->first_row; row < task->last_row; row++)
    attend_row(Row(plan, tensors, task, row), masks, s);
}

static void fold_partials(const attnplat_cpu_plan *plan, const attnplat_cpu_tensors *tensors,
                          const Task *task, void *scratch) {
  Scratch s(plan, task, scratch);
  int64_t rows = task->last_row - task->first_row, size = plan->v_head_size;
  for (int64_t row = 0; row < rows; row++) {
    const float *partials = tensors->partials + task->partial + row * partial_row(size);
    s.folded[0] = float(-kInf);
    for (int64_t d = 1; d < size + 2; d++) s.folded[d] = 0;
    for (int64_t n = 0; n < task->slots; n++)
      fold_row(s.folded, partials + n * partial_slot(rows, size), size);
    write_partial(Row(plan, tensors, task, task->first_row + row), s.folded, s.values);
  }
}

static int32_t block_rows(const attnplat_cpu_plan *, int64_t) { return 64; }
static int32_t few_rows(const attnplat_cpu_plan *) { return 0; }
static int64_t scratch_bytes(const attnplat_cpu_plan *plan, const Task *task) {
  return Scratch::bytes(plan, task);
}
static void nothing() {}

static uint64_t read_memory(const void *data, int64_t bytes) {
  const uint64_t *words = static_cast<const uint64_t *>(data);
  uint64_t sum = 0;
  for (int64_t n = 0; n < bytes / 8; n++) sum += words[n];
  return sum;
}

static int64_t multiply(int64_t rounds) {
  double sums[4] = {0};
  volatile double x = 1.0;
  for (int64_t n = 0; n < rounds * 64; n++)
    for (int i = 0; i < 4; i++) sums[i] = sums[i] * x + x;
  x = sums[0] + sums[1] + sums[2] + sums[3];
  return rounds * 64 * 8;
}

#include "index_scalar.h"

const Kernels kKernels = {"scalar", block_rows,  few_rows,    scratch_bytes, nothing,
                          nothing,  attend_task, fold_partials, read_memory,
                          multiply,  index_scratch, index_task};
}  // namespace scalar
}  // namespace attnplat_cpu
