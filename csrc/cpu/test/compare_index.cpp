// Random steps of an indexer through every instruction set that runs here, held against the scalar
// kernels.

#include "compare_index.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <random>
#include <vector>

#include "../attnplat_cpu.h"

namespace {

struct Step {
  std::mt19937 random;
  attnplat_cpu_index index = {};
  std::vector<int32_t> starts = {0}, lens, ends, table, value_at, scale_at;
  std::vector<uint8_t> pool, q;
  std::vector<float> weights;
  int64_t rows = 0, longest = 1;

  explicit Step(uint32_t seed) : random(seed) {
    index.size = sizeof(index);
    index.version = ATTNPLAT_CPU_ABI;
    index.encoding = int32_t(random() % 4);
    index.num_heads = int32_t(pick({1, 3, 12, 16, 17, 32, 40}));
    index.head_size = index.encoding == ATTNPLAT_INDEX_BF16 ? int32_t(pick({30, 64, 128})) : 128;
    index.dtype = random() % 2 ? ATTNPLAT_BF16 : ATTNPLAT_F32;
    index.block_size = pick({1, 16, 24, 64});
    index.topk = pick({1, 8, 100});
    batch();
    pages();
    queries();
  }

  int64_t pick(std::initializer_list<int64_t> from) {
    return *(from.begin() + random() % from.size());
  }
  float normal() { return std::normal_distribution<float>()(random); }
  uint16_t half() {
    float x = normal();
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return uint16_t(bits >> 16);
  }

  void batch() {
    index.num_reqs = int32_t(pick({1, 3}));
    for (int32_t r = 0; r < index.num_reqs; r++) {
      int64_t rows_of = pick({0, 1, 2, 19});
      starts.push_back(starts.back() + int32_t(rows_of));
      lens.push_back(int32_t(rows_of + pick({0, 1, 70, 300, 2100})));
      longest = std::max<int64_t>(longest, lens.back());
    }
    rows = starts.back();
    index.query_start = starts.data();
    index.seq_lens = lens.data();
    for (int64_t n = 0; n < rows; n++) ends.push_back(int32_t(random() % (longest + 5)) - 2);
    if (random() % 3 == 0) index.row_ends = ends.data();
  }

  // Pages with chunks side by side, or apart as in the orders that interleave tokens.
  void pages() {
    bool plain = index.encoding == ATTNPLAT_INDEX_BF16;
    int64_t values = plain ? 2 * index.head_size : index.encoding == ATTNPLAT_INDEX_MXFP4 ? 64 : 128;
    int64_t scales = plain ? 0 : 4, size = index.block_size, width = 0;
    bool apart = !plain && random() % 2;
    index.chunk_stride = apart ? 16 * size : 16;
    for (int64_t n = 0; n < size; n++) {
      value_at.push_back(int32_t(apart ? 16 * n : values * n));
      for (int64_t i = 0; i < 4; i++) scale_at.push_back(int32_t(size * values + 4 * n + i));
    }
    index.value_at = value_at.data();
    if (scales) index.scale_at = scale_at.data();
    for (int32_t n : lens) width = std::max<int64_t>(width, (n + size - 1) / size);
    index.table_stride = index.table_width = width;
    index.num_blocks = std::max<int64_t>(width * index.num_reqs, 1);
    for (int64_t n = 0; n < index.num_blocks; n++) table.push_back(int32_t(n));
    std::shuffle(table.begin(), table.end(), random);
    index.block_table = table.data();
    index.page_stride = size * (values + scales) + 32;
    pool.resize(size_t(index.num_blocks * index.page_stride));
    for (auto &byte : pool) {
      uint8_t code = uint8_t(random());
      byte = index.encoding == ATTNPLAT_INDEX_MXFP4 ? code : uint8_t((code & 0x80) | code % 0x60);
    }
    for (int64_t b = 0; b < index.num_blocks; b++)
      for (int64_t n = 0; n < size; n++) fill_key(pool.data() + b * index.page_stride, n);
    index.pool = pool.data();
  }

  void fill_key(uint8_t *page, int64_t n) {
    if (index.encoding == ATTNPLAT_INDEX_BF16) {
      for (int64_t d = 0; d < index.head_size; d++) {
        uint16_t x = half();
        memcpy(page + value_at[n] + 2 * d, &x, 2);
      }
    } else if (index.encoding == ATTNPLAT_INDEX_FP8) {
      float scale = ldexpf(random() % 8 ? 1.0f : -1.3f, int(random() % 5) - 2);
      memcpy(page + scale_at[4 * n], &scale, 4);
    } else {
      for (int64_t i = 0; i < 4; i++) page[scale_at[4 * n + i]] = uint8_t(124 + random() % 6);
    }
  }

  void queries() {
    int64_t count = rows * index.num_heads * index.head_size;
    q.resize(size_t(4 * count + 1));
    for (int64_t n = 0; n < count; n++) {
      float x = normal();
      uint16_t h = half();
      if (index.dtype == ATTNPLAT_F32) memcpy(q.data() + 4 * n, &x, 4);
      if (index.dtype == ATTNPLAT_BF16) memcpy(q.data() + 2 * n, &h, 2);
    }
    index.q = q.data();
    for (int64_t n = 0; n < rows * index.num_heads; n++) weights.push_back(normal());
    weights.push_back(0);
    index.weights = weights.data();
  }
};

struct Found {
  std::vector<float> logits;
  std::vector<int32_t> chosen, again;
};

bool run(const Step &step, int32_t isa, attnplat_cpu_parallel_for parallel_for, Found &found) {
  attnplat_cpu_index index = step.index;
  index.isa = isa;
  found.logits.assign(size_t(step.rows * step.longest + 1), -INFINITY);
  found.chosen.assign(size_t(step.rows * index.topk + 1), -1);
  found.again = found.chosen;
  index.logits = found.logits.data();
  index.logits_stride = step.longest;
  index.chosen = found.chosen.data();
  return attnplat_cpu_index_logits(&index, 3, parallel_for) == ATTNPLAT_OK &&
         attnplat_cpu_index_topk(&index, 3, parallel_for) == ATTNPLAT_OK &&
         attnplat_cpu_choose(found.logits.data(), step.rows, step.longest, step.longest,
                             found.again.data(), index.topk, 3, parallel_for) == ATTNPLAT_OK;
}

// Within the rounding of sums in float32, and what is hidden hidden in both.
bool close(const Found &one, const Found &other) {
  float most = 1;
  for (float x : other.logits)
    if (x > -INFINITY) most = std::max(most, fabsf(x));
  for (size_t n = 0; n < other.logits.size(); n++) {
    float a = one.logits[n], b = other.logits[n];
    if (a != b && !(fabsf(a - b) <= 1e-5f * most)) return false;
  }
  return true;
}

}  // namespace

int compare_index(uint32_t seed, int *runs) {
  Step step(seed);
  Found want;
  int failures = 0;
  if (!run(step, attnplat_cpu_isa_index("scalar"), nullptr, want)) return 1;
  for (int32_t isa = 0; isa < attnplat_cpu_isa_count(); isa++) {
    if (!attnplat_cpu_isa_usable(isa)) continue;
    Found alone, shared;
    bool ran = run(step, isa, nullptr, alone) && run(step, isa, attnplat_cpu_pool_for, shared);
    bool same = ran && alone.chosen == shared.chosen && alone.chosen == alone.again &&
                memcmp(alone.logits.data(), shared.logits.data(), 4 * alone.logits.size()) == 0;
    ++*runs;
    if (same && close(alone, want)) continue;
    failures++;
    printf("index seed %u, %s: %s; heads %d of %d, dtype %d, encoding %d\n", seed,
           attnplat_cpu_isa_name(isa), same ? "off" : "bits depend on threads",
           step.index.num_heads, step.index.head_size, step.index.dtype, step.index.encoding);
  }
  return failures;
}
