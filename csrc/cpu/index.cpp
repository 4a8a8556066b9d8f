// A sparse indexer's step: checked, cut into tasks, run on whatever threads there are.

#include <algorithm>
#include <atomic>
#include <new>
#include <vector>

#include "isa.h"
#include "kernels.h"
#include "threads.h"
#include "topk.h"

namespace attnplat_cpu {
namespace {

// Keys of one task; each score is a result of its own, so that the cut changes no bits.
constexpr int64_t kIndexTaskKeys = 2048;

// Scores that are kept at once while the best are chosen, 64 MiB, but at least a row's.
constexpr int64_t kKeptScores = int64_t(16) << 20;

constexpr std::align_val_t kAlignment{64};

struct Memory {
  explicit Memory(int64_t bytes)
      : at(::operator new(size_t(std::max<int64_t>(bytes, 64)), kAlignment, std::nothrow)) {}
  ~Memory() { ::operator delete(at, kAlignment); }
  Memory(const Memory &) = delete;
  Memory &operator=(const Memory &) = delete;
  void *at;
};

int64_t keys_seen(const attnplat_cpu_index *x, int64_t request, int64_t row) {
  int64_t seq_len = x->seq_lens[request];
  int64_t seen = x->row_ends ? x->row_ends[row]
                             : seq_len - (x->query_start[request + 1] - row) + 1;
  return std::max<int64_t>(std::min(seen, seq_len), 0);
}

int64_t most_seen(const attnplat_cpu_index *x, int64_t request, int64_t first, int64_t last) {
  int64_t most = 0;
  for (int64_t row = first; row < last; row++) most = std::max(most, keys_seen(x, request, row));
  return most;
}

int32_t check_blocks(attnplat_cpu_index *x, int32_t request, int64_t keys) {
  int64_t first = x->first_block ? x->first_block[request] : 0;
  const int32_t *row = x->block_table + request * x->table_stride;
  for (int64_t at = 0; at < (keys + x->block_size - 1) / x->block_size; at++) {
    int64_t column = at - first;
    x->bad_request = request;
    x->bad_block = at;
    if (column < 0 || column >= x->table_width) return ATTNPLAT_OUTSIDE_TABLE;
    x->bad_block = row[column];
    if (row[column] < 0 || row[column] >= x->num_blocks) return ATTNPLAT_BAD_BLOCK;
  }
  return ATTNPLAT_OK;
}

int32_t check_index(attnplat_cpu_index *x) {
  if (x->size != sizeof(*x) || x->version != ATTNPLAT_CPU_ABI) return ATTNPLAT_BAD_STRUCT;
  if (!isa_kernels(x->isa)) return ATTNPLAT_UNKNOWN_ISA;
  bool codes = x->encoding != ATTNPLAT_INDEX_BF16;
  bool good = x->num_reqs >= 0 && x->num_heads > 0 && x->head_size > 0 && x->block_size > 0 &&
              (x->dtype == ATTNPLAT_F32 || x->dtype == ATTNPLAT_BF16) && x->encoding >= 0 &&
              x->encoding <= ATTNPLAT_INDEX_MXFP4 && (!codes || x->head_size == 128) &&
              (!codes || x->scale_at) && x->value_at && x->query_start && x->seq_lens &&
              x->topk >= 0;
  if (!good) return ATTNPLAT_BAD_VALUE;
  for (int32_t r = 0; r < x->num_reqs; r++) {
    int64_t first = x->query_start[r], last = x->query_start[r + 1];
    x->bad_request = r;
    if (first < 0 || last < first || x->seq_lens[r] < 0) return ATTNPLAT_BAD_VALUE;
    if (int32_t status = check_blocks(x, r, most_seen(x, r, first, last))) return status;
  }
  return ATTNPLAT_OK;
}

// Where scores of a run of rows go: `at` is row `first`'s place of key 0.
struct Scores {
  float *at;
  int64_t stride, first;
};

struct Call {
  const attnplat_cpu_index *index;
  const Kernels *kernels;
  Scores scores;
  const IndexTask *tasks;
  int64_t num_tasks;
  const int32_t *request_of;  // [rows] where the best are chosen
  std::atomic<int64_t> next{0};
  std::atomic<int32_t> status{ATTNPLAT_OK};
};

// Rows [first, last) of a request, all their keys.
void add_tasks(const attnplat_cpu_index *x, int32_t request, int64_t first, int64_t last,
               std::vector<IndexTask> &tasks) {
  for (int64_t row = first; row < last; row += kIndexRows) {
    int64_t end = std::min(row + kIndexRows, last), keys = most_seen(x, request, row, end);
    for (int64_t key = 0; key < keys; key += kIndexTaskKeys)
      tasks.push_back({request, row, end, key, std::min(key + kIndexTaskKeys, keys)});
  }
}

void score(int64_t begin, int64_t end, void *context) {
  Call &call = *static_cast<Call *>(context);
  if (begin >= end) return;
  Memory scratch(call.kernels->index_scratch(call.index));
  if (!scratch.at) {
    call.status.store(ATTNPLAT_NO_MEMORY, std::memory_order_relaxed);
    return;
  }
  call.kernels->enter();
  for (int64_t n; (n = call.next.fetch_add(1, std::memory_order_relaxed)) < call.num_tasks;) {
    const IndexTask *task = call.tasks + n;
    float *to = call.scores.at + (task->first_row - call.scores.first) * call.scores.stride;
    call.kernels->index(call.index, task, to + task->begin, call.scores.stride, scratch.at);
  }
  call.kernels->leave();
}

// The items of a call, a Call or Choosing, on as many threads as are worth waking.
template <class Items>
int32_t run(Items &call, int64_t items, int64_t work, int64_t workers,
            attnplat_cpu_parallel_for parallel_for, attnplat_cpu_body body) {
  call.next.store(0);
  workers = std::min({workers, items, 1 + work / kWorkOfOne});
  int32_t status = spread(body, &call, workers, parallel_for);
  return status ? status : call.status.load();
}

int32_t score_all(Call &call, const std::vector<IndexTask> &tasks, int64_t workers,
                  attnplat_cpu_parallel_for parallel_for) {
  if (tasks.empty()) return ATTNPLAT_OK;
  call.tasks = tasks.data();
  call.num_tasks = int64_t(tasks.size());
  int64_t products = 0;
  for (const IndexTask &t : tasks) products += (t.last_row - t.first_row) * (t.end - t.begin);
  products *= int64_t(call.index->num_heads) * call.index->head_size;
  return run(call, call.num_tasks, products, workers, parallel_for, score);
}

// Rows of a wave, whose best are chosen.
void choose_rows(int64_t begin, int64_t end, void *context) {
  Call &call = *static_cast<Call *>(context);
  if (begin >= end) return;
  const attnplat_cpu_index *x = call.index;
  Memory scratch(int64_t(sizeof(uint32_t)) * choose_scratch(call.scores.stride));
  if (!scratch.at) {
    call.status.store(ATTNPLAT_NO_MEMORY, std::memory_order_relaxed);
    return;
  }
  for (int64_t n; (n = call.next.fetch_add(1, std::memory_order_relaxed)) < call.num_tasks;) {
    int64_t row = call.scores.first + n;
    choose_row(call.scores.at + n * call.scores.stride, keys_seen(x, call.request_of[n], row),
               x->chosen + row * x->topk, x->topk, static_cast<uint32_t *>(scratch.at));
  }
}

// The best keys of rows [first, first + requests.size()), whose requests these are.
int32_t choose_wave(Call &call, int64_t first, const std::vector<int32_t> &requests, int64_t width,
                    int64_t workers, attnplat_cpu_parallel_for parallel_for) {
  const attnplat_cpu_index *x = call.index;
  int64_t rows = int64_t(requests.size());
  Memory memory(int64_t(sizeof(float)) * rows * width);
  if (!memory.at) return ATTNPLAT_NO_MEMORY;
  call.scores = {static_cast<float *>(memory.at), width, first};
  std::vector<IndexTask> tasks;
  for (int64_t n = 0; n < rows;) {
    int64_t last = std::min<int64_t>(x->query_start[requests[n] + 1], first + rows);
    add_tasks(x, requests[n], first + n, last, tasks);
    n = last - first;
  }
  if (int32_t status = score_all(call, tasks, workers, parallel_for)) return status;
  call.request_of = requests.data();
  call.num_tasks = rows;
  return run(call, rows, rows * width * 4, workers, parallel_for, choose_rows);
}

int32_t choose_all(attnplat_cpu_index *x, int64_t workers,
                   attnplat_cpu_parallel_for parallel_for) {
  Call call;
  call.index = x;
  call.kernels = isa_kernels(x->isa);
  std::vector<int32_t> requests;
  int64_t width = 1, first = x->num_reqs ? x->query_start[0] : 0;
  for (int32_t r = 0; r < x->num_reqs; r++)
    for (int64_t row = x->query_start[r]; row < x->query_start[r + 1]; row++) {
      int64_t wider = std::max(width, keys_seen(x, r, row));
      if (!requests.empty() && int64_t(requests.size() + 1) * wider > kKeptScores) {
        if (int32_t status = choose_wave(call, first, requests, width, workers, parallel_for))
          return status;
        requests.clear();
        first = row;
        wider = std::max<int64_t>(1, keys_seen(x, r, row));
      }
      width = wider;
      requests.push_back(r);
    }
  if (requests.empty()) return ATTNPLAT_OK;
  return choose_wave(call, first, requests, width, workers, parallel_for);
}

struct Choosing {
  const float *logits;
  int64_t rows, columns, stride, topk;
  int32_t *chosen;
  std::atomic<int64_t> next{0};
  std::atomic<int32_t> status{ATTNPLAT_OK};
};

void choose_some(int64_t begin, int64_t end, void *context) {
  Choosing &c = *static_cast<Choosing *>(context);
  if (begin >= end) return;
  Memory scratch(int64_t(sizeof(uint32_t)) * choose_scratch(c.columns));
  if (!scratch.at) {
    c.status.store(ATTNPLAT_NO_MEMORY, std::memory_order_relaxed);
    return;
  }
  for (int64_t n; (n = c.next.fetch_add(1, std::memory_order_relaxed)) < c.rows;)
    choose_row(c.logits + n * c.stride, c.columns, c.chosen + n * c.topk, c.topk,
               static_cast<uint32_t *>(scratch.at));
}

}  // namespace
}  // namespace attnplat_cpu

using namespace attnplat_cpu;

extern "C" int32_t attnplat_cpu_index_logits(attnplat_cpu_index *index, int64_t workers,
                                             attnplat_cpu_parallel_for parallel_for) {
  if (int32_t status = check_index(index)) return status;
  try {
    Call call;
    call.index = index;
    call.kernels = isa_kernels(index->isa);
    call.scores = {index->logits, index->logits_stride, 0};
    std::vector<IndexTask> tasks;
    for (int32_t r = 0; r < index->num_reqs; r++)
      add_tasks(index, r, index->query_start[r], index->query_start[r + 1], tasks);
    return score_all(call, tasks, workers, parallel_for);
  } catch (...) {
    return ATTNPLAT_NO_MEMORY;
  }
}

extern "C" int32_t attnplat_cpu_index_topk(attnplat_cpu_index *index, int64_t workers,
                                           attnplat_cpu_parallel_for parallel_for) {
  if (int32_t status = check_index(index)) return status;
  try {
    return choose_all(index, workers, parallel_for);
  } catch (...) {
    return ATTNPLAT_NO_MEMORY;
  }
}

extern "C" int32_t attnplat_cpu_choose(const float *logits, int64_t rows, int64_t columns,
                                       int64_t stride, int32_t *chosen, int64_t topk,
                                       int64_t workers, attnplat_cpu_parallel_for parallel_for) {
  if (rows < 0 || columns < 0 || topk < 0) return ATTNPLAT_BAD_VALUE;
  Choosing c;
  c.logits = logits;
  c.rows = rows;
  c.columns = columns;
  c.stride = stride;
  c.chosen = chosen;
  c.topk = topk;
  return run(c, rows, rows * columns * 4, workers, parallel_for, choose_some);
}
