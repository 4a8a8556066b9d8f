// Random layers and batches through every instruction set that runs here, each held against the
// scalar kernels: for machines, emulators and sanitizers that Python does not reach.
//
//   compare_isas [first seed] [last seed]

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <random>
#include <string>
#include <vector>

#include "../attnplat_cpu.h"
#include "compare_index.h"

namespace {

float from_bf16(uint16_t h) {
  uint32_t bits = uint32_t(h) << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Halves of which every bit pattern used is a number between -4 and 4.
uint16_t small_half(std::mt19937 &random) {
  return uint16_t((random() & 0x8000) | (0x2c00 + random() % 0x1400));
}

struct Case {
  std::mt19937 random;
  attnplat_cpu_plan plan = {};
  attnplat_cpu_tensors tensors = {};
  std::vector<int32_t> starts, lens, table, prefix, ranges, range_starts, topk;
  std::vector<uint8_t> causal, tree;
  std::vector<char> q, k, v;
  std::vector<uint8_t> row_scales;
  std::vector<float> sinks, slopes, bias;
  int64_t rows = 0, longest = 0, blocks = 0;

  explicit Case(uint32_t seed) : random(seed) {
    layer();
    batch();
    masks();
    contents();
  }

  int64_t pick(std::initializer_list<int64_t> from) {
    return *(from.begin() + random() % from.size());
  }
  bool chance(int percent) { return int(random() % 100) < percent; }
  float normal() { return std::normal_distribution<float>()(random); }

  void layer() {
    plan.size = sizeof(plan);
    plan.version = ATTNPLAT_CPU_ABI;
    plan.num_kv_heads = int32_t(pick({1, 2, 3}));
    plan.num_heads = plan.num_kv_heads * int32_t(pick({1, 2, 4, 5, 8, 17}));
    plan.head_size = int32_t(pick({16, 32, 36, 64, 72, 80, 128, 192}));
    plan.v_head_size = chance(70) ? plan.head_size : int32_t(pick({16, 24, 64}));
    plan.dtype = int32_t(random() % 3);
    plan.kv_encoding = chance(60) ? plan.dtype : int32_t(random() % 6);
    plan.causal = chance(80);
    plan.window_left = chance(30) ? pick({0, 3, 63, 64, 200}) : -1;
    plan.window_right = chance(15) ? pick({0, 5}) : -1;
    plan.chunk_size = chance(10) ? pick({16, 50, 100}) : 0;
    plan.static_sink_tokens = chance(10) ? pick({1, 70}) : 0;
    plan.topk = chance(10) ? 9 : 0;
    tensors.size = sizeof(tensors);
    tensors.version = ATTNPLAT_CPU_ABI;
    tensors.scale = chance(5) ? 0.0f : chance(10) ? -0.2f : 1.0f / sqrtf(float(plan.head_size));
    tensors.logits_soft_cap = chance(15) ? float(pick({1, 30})) : 0.0f;
    if (chance(12)) latent();
  }

  bool is_latent() const { return plan.kv_encoding >= ATTNPLAT_MLA_FP8_656; }

  // Rows of codes and scales, whose front the values are.
  void latent() {
    plan.kv_encoding = int32_t(pick({ATTNPLAT_MLA_FP8_656, ATTNPLAT_MLA_FP8_584,
                                     ATTNPLAT_MLA_FP8_528, ATTNPLAT_MLA_NVFP4_352}));
    plan.num_heads = int32_t(pick({1, 5, 20}));
    plan.num_kv_heads = 1;
    plan.values_in_keys = 1;
    plan.head_size = plan.kv_encoding == ATTNPLAT_MLA_FP8_656 ||
                             plan.kv_encoding == ATTNPLAT_MLA_NVFP4_352
                         ? 576
                         : 512;
    plan.v_head_size = 512;
    plan.topk = chance(60) ? 9 : 0;
    tensors.scale = 0.02f;
  }

  // Codes of e4m3 between 1/8 and 4.
  uint8_t code() {
    uint8_t byte = uint8_t(random());
    return uint8_t((byte & 0x80) | (0x20 + byte % 0x28));
  }

  void fill_latent_row(uint8_t *row) {
    auto codes = [&](int64_t from, int64_t count) {
      for (int64_t n = 0; n < count; n++) row[from + n] = code();
    };
    auto halves = [&](int64_t from) {
      for (int64_t n = 0; n < 64; n++) {
        uint16_t half = to_bf16(normal());
        memcpy(row + from + 2 * n, &half, 2);
      }
    };
    switch (plan.kv_encoding) {
      case ATTNPLAT_MLA_FP8_656:
        codes(0, 512);
        for (int64_t n = 0; n < 4; n++) {
          float scale = 0.5f + fabsf(normal());
          memcpy(row + 512 + 4 * n, &scale, 4);
        }
        return halves(528);
      case ATTNPLAT_MLA_FP8_584: codes(0, 448); return halves(448);
      case ATTNPLAT_MLA_FP8_528:
        codes(0, 512);
        for (int64_t n = 0; n < 16; n++) row[512 + n] = uint8_t(125 + random() % 4);
        return;
      default:
        for (int64_t n = 0; n < 256; n++) row[n] = uint8_t(random());
        codes(256, 64);
        for (int64_t n = 0; n < 32; n++) row[320 + n] = code() & 0x7f;
    }
  }

  void latent_plane() {
    attnplat_cpu_tensors &t = tensors;
    const int64_t sizes[] = {656, 576, 528, 352};
    int64_t size = sizes[plan.kv_encoding - ATTNPLAT_MLA_FP8_656];
    k.resize(size_t(blocks * plan.block_size * size));
    for (int64_t n = 0; n < blocks * plan.block_size; n++)
      fill_latent_row(reinterpret_cast<uint8_t *>(k.data()) + n * size);
    t.k_block = t.v_block = t.k_head = t.v_head = plan.block_size * size;
    t.k_token = t.v_token = size;
    t.k = t.v = k.data();
    if (plan.kv_encoding != ATTNPLAT_MLA_FP8_584) return;
    for (int64_t n = 0; n < 8 * blocks * plan.block_size; n++)
      row_scales.push_back(uint8_t(125 + random() % 4));
    row_scales.push_back(0);
    t.row_scales = row_scales.data();
    t.row_scales_block = 8 * plan.block_size;
    t.row_scales_token = 8;
  }

  void batch() {
    plan.num_reqs = int32_t(pick({1, 2, 4}));
    starts.push_back(0);
    plan.block_size = pick({1, 8, 16, 24, 64, 128});
    int64_t width = 0;
    for (int32_t r = 0; r < plan.num_reqs; r++) {
      int64_t query = pick({0, 1, 1, 1, 2, 7, 40, 90});
      int64_t keys = query + pick({0, 1, 15, 64, 130, 513, 700});
      starts.push_back(starts.back() + int32_t(query));
      lens.push_back(int32_t(keys));
      width = std::max(width, (keys + plan.block_size - 1) / plan.block_size);
      longest = std::max(longest, keys);
    }
    rows = plan.num_tokens = starts.back();
    plan.query_start = starts.data();
    plan.seq_lens = lens.data();
    plan.table_stride = plan.table_width = width;
    table.assign(size_t(plan.num_reqs * width + 1), -1);
    for (int32_t r = 0; r < plan.num_reqs; r++)
      for (int64_t n = 0; n < (lens[r] + plan.block_size - 1) / plan.block_size; n++)
        table[r * width + n] = int32_t(blocks++);
    for (auto &block : table)  // every other block the other way round
      if (block >= 0 && block % 2 == 0 && block + 1 < blocks) block = int32_t(blocks - 1 - block);
    std::vector<bool> used(blocks + 1);
    for (auto &block : table) {
      if (block < 0) continue;
      while (used[block]) block = int32_t((block + 1) % blocks);
      used[block] = true;
    }
    plan.block_table = table.data();
  }

  void masks() {
    if (chance(10)) {
      for (int32_t r = 0; r < plan.num_reqs; r++) causal.push_back(r % 2);
      plan.causal_of = causal.data();
    }
    if (chance(10)) {
      for (int32_t r = 0; r < plan.num_reqs; r++) prefix.push_back(int32_t(random() % 90));
      plan.prefix_lens = prefix.data();
    }
    if (chance(15)) {
      range_starts.push_back(0);
      for (int32_t r = 0; r < plan.num_reqs; r++) {
        for (int n = 0; n < 2; n++) {
          int32_t begin = int32_t(random() % (longest + 1));
          ranges.insert(ranges.end(), {r, begin, begin + int32_t(random() % 80)});
        }
        range_starts.push_back(2 * (r + 1));
      }
      plan.ranges = ranges.data();
      plan.range_starts = range_starts.data();
    }
    if (chance(15)) {
      plan.tree_bytes = plan.tree_stride = 12;
      tree.resize(size_t(rows * 12 + 1));
      for (auto &byte : tree) byte = uint8_t(random() | random());
      plan.tree_mask = tree.data();
    }
  }

  void fill(std::vector<char> &to, int64_t count, int32_t encoding) {
    int64_t size = encoding == ATTNPLAT_F32 ? 4 : encoding <= ATTNPLAT_F16 ? 2 : 1;
    to.resize(size_t(count * size));
    for (int64_t n = 0; n < count; n++) {
      float x = normal();
      uint16_t half = encoding == ATTNPLAT_BF16 ? to_bf16(x) : small_half(random);
      uint8_t code = uint8_t(random());
      if (encoding == ATTNPLAT_E4M3FN) code &= 0xbf;
      if (encoding == ATTNPLAT_E5M2) code = uint8_t((code & 0x80) | (code & 0x7f) % 0x44);
      const void *from = size == 4 ? static_cast<void *>(&x)
                                   : size == 2 ? static_cast<void *>(&half) : &code;
      memcpy(to.data() + n * size, from, size_t(size));
    }
  }

  void contents() {
    attnplat_cpu_tensors &t = tensors;
    int64_t heads = plan.num_heads, kv = plan.num_kv_heads, size = plan.head_size;
    fill(q, rows * heads * size, plan.dtype);
    t.q_token = heads * size;
    t.q_head = size;
    bool tokens_first = chance(50);
    auto plane = [&](std::vector<char> &to, int64_t of, int64_t *block, int64_t *head,
                     int64_t *token) {
      fill(to, blocks * kv * plan.block_size * of, plan.kv_encoding);
      *block = kv * plan.block_size * of;
      *head = tokens_first ? of : plan.block_size * of;
      *token = tokens_first ? kv * of : of;
    };
    t.q = q.data();
    if (is_latent()) {
      latent_plane();
    } else {
      plane(k, size, &t.k_block, &t.k_head, &t.k_token);
      plane(v, plan.v_head_size, &t.v_block, &t.v_head, &t.v_token);
      t.k = k.data();
      t.v = v.data();
    }
    for (int64_t h = 0; h < heads; h++) {
      sinks.push_back(normal());
      slopes.push_back(fabsf(normal()) / 8);
    }
    if (chance(20)) t.sinks = sinks.data();
    if (chance(10)) t.alibi_slopes = slopes.data();
    if (chance(10)) {
      for (int64_t n = 0; n < heads * 90 * longest; n++) bias.push_back(normal());
      t.position_bias = bias.data();
      t.bias_query = longest;
      t.bias_head = 90 * longest;
    }
    if (plan.topk) {
      for (int64_t n = 0; n < rows * 9; n++) topk.push_back(int32_t(random() % (longest + 3)) - 2);
      t.topk_indices = topk.data();
      t.topk_stride = t.topk_count = 9;
    }
    if (plan.kv_encoding == ATTNPLAT_INT8) t.scale /= 64;
  }
};

struct Result {
  std::vector<float> out, lse;
};

Result run(const Case &c, int32_t isa, attnplat_cpu_parallel_for parallel_for) {
  attnplat_cpu_plan plan = c.plan;
  attnplat_cpu_tensors tensors = c.tensors;
  plan.isa = isa;
  attnplat_cpu_summary summary;
  std::vector<char> tasks(size_t(attnplat_cpu_task_bytes()) * 4096);
  int32_t status = attnplat_cpu_schedule(&plan, tasks.data(), 4096, &summary);
  int64_t heads = plan.num_heads, size = plan.v_head_size;
  int64_t item = plan.dtype == ATTNPLAT_F32 ? 4 : 2;
  std::vector<char> out(size_t(c.rows * heads * size * item));
  Result result;
  result.lse.resize(size_t(c.rows * heads));
  std::vector<float> partials(size_t(summary.partial_floats));
  tensors.out = out.data();
  tensors.out_token = heads * size;
  tensors.out_head = size;
  tensors.lse = result.lse.data();
  tensors.lse_token = heads;
  tensors.lse_head = 1;
  tensors.partials = partials.data();
  // One thread takes results whole; for so many they are cut as finely as can be.
  int64_t workers = parallel_for ? 64 : 1;
  if (!status)
    status = attnplat_cpu_attend(&plan, &tensors, tasks.data(), &summary, workers, parallel_for);
  if (status) {
    printf("status %d\n", status);
    exit(2);
  }
  for (int64_t n = 0; n < c.rows * heads * size; n++) {
    float x = 0;
    uint16_t half = 0;
    if (item == 4) memcpy(&x, out.data() + 4 * n, 4);
    if (item == 2) memcpy(&half, out.data() + 2 * n, 2);
    if (plan.dtype == ATTNPLAT_BF16) x = from_bf16(half);
    if (plan.dtype == ATTNPLAT_F16)
      x = (half & 0x8000 ? -1.0f : 1.0f) *
          ((half & 0x7fff) < 0x400 ? float(half & 0x7fff) / 16777216.0f
                                   : ldexpf(float(1024 + (half & 1023)), (half >> 10 & 31) - 25));
    result.out.push_back(x);
  }
  return result;
}

// The largest ||one - other|| / ||other|| over rows of `size`, and the largest gap of lse.
bool close(const Case &c, const Result &one, const Result &other) {
  const double allowed[] = {1e-5, 8e-3, 1.2e-3};
  int64_t size = c.plan.v_head_size;
  for (size_t r = 0; r < other.lse.size(); r++) {
    double gap = 0, norm = 0;
    for (int64_t d = 0; d < size; d++) {
      double a = one.out[r * size + d], b = other.out[r * size + d];
      gap += (a - b) * (a - b);
      norm += b * b;
    }
    double lse = fabs(double(one.lse[r]) - other.lse[r]);
    if (one.lse[r] == other.lse[r]) lse = 0;  // both infinite
    // Values that cancel leave rows shorter than what was added up.
    double reach = sqrt(norm) + 0.02 * sqrt(double(size));
    if (!(sqrt(gap) <= 2 * allowed[c.plan.dtype] * reach) ||
        !(lse <= 4e-4 + 2e-5 * fabs(double(other.lse[r])))) {
      printf("row %zu: off by %g of %g, lse %g and %g\n", r, sqrt(gap), sqrt(norm), one.lse[r],
             other.lse[r]);
      return false;
    }
  }
  return true;
}

}  // namespace

int main(int argc, char **argv) {
  uint32_t first = argc > 1 ? uint32_t(atoi(argv[1])) : 0;
  uint32_t last = argc > 2 ? uint32_t(atoi(argv[2])) : first + 100;
  int failures = 0, runs = 0;
  for (uint32_t seed = first; seed < last; seed++) {
    failures += compare_index(seed, &runs);
    Case c(seed);
    Result want = run(c, attnplat_cpu_isa_index("scalar"), nullptr);
    for (int32_t isa = 1; isa < attnplat_cpu_isa_count(); isa++) {
      if (!attnplat_cpu_isa_usable(isa)) continue;
      Result alone = run(c, isa, nullptr);
      Result shared = run(c, isa, attnplat_cpu_pool_for);
      bool same = memcmp(alone.out.data(), shared.out.data(), 4 * alone.out.size()) == 0 &&
                  memcmp(alone.lse.data(), shared.lse.data(), 4 * alone.lse.size()) == 0;
      runs++;
      if (same && close(c, alone, want)) continue;
      failures++;
      printf("seed %u, %s: %s; heads %d/%d of %d/%d, dtype %d, encoding %d\n", seed,
             attnplat_cpu_isa_name(isa), same ? "off" : "bits depend on threads", c.plan.num_heads,
             c.plan.num_kv_heads, c.plan.head_size, c.plan.v_head_size, c.plan.dtype,
             c.plan.kv_encoding);
    }
  }
  std::string isas;
  for (int32_t n = 0; n < attnplat_cpu_isa_count(); n++)
    if (attnplat_cpu_isa_usable(n)) isas += std::string(" ") + attnplat_cpu_isa_name(n);
  printf("%d runs, %d failures; on this machine:%s\n", runs, failures, isas.c_str());
  return failures ? 1 : 0;
}
