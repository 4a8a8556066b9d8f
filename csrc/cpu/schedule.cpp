// From a batch to tasks. A function of each request's own lengths: neither threads nor the other
// requests of the batch change how a request is cut, so they cannot change its bits.

#include <algorithm>
#include <vector>

#include "isa.h"
#include "kernels.h"
#include "threads.h"

namespace attnplat_cpu {
namespace {
#include "masks.h"

// A request's keys come in pieces, so that about so many tasks can make up the request: enough
// for the cores of a large machine, too few for the folding to cost anything.
constexpr int64_t kWantedTasks = 64;

// Values of one partial from which it takes about as long to write and read as its keys, so that
// pieces are longer.
#if !defined(ATTNPLAT_MANY_VALUES)
#define ATTNPLAT_MANY_VALUES 49152
#endif
constexpr int64_t kManyValues = ATTNPLAT_MANY_VALUES;

// So many tasks as long as the longest keep a thread from waiting long for another at the end.
constexpr int64_t kWholePerWorker = 4;

// Room for partials beyond which results are no longer shared out.
constexpr int64_t kMostPartials = int64_t(4) << 20;

class Scheduler {
 public:
  Scheduler(const attnplat_cpu_plan *plan, attnplat_cpu_summary *summary)
      : plan_(plan), summary_(summary), kernels_(isa_kernels(plan->isa)) {
    group_ = plan->num_heads / plan->num_kv_heads;
  }

  int32_t run() {
    *summary_ = attnplat_cpu_summary{};
    summary_->highest_block = -1;
    for (int32_t r = 0; r < plan_->num_reqs; r++)
      if (int32_t status = add_request(r)) return status;
    longest_first(tasks_);
    std::vector<Task> whole = tasks_;
    share_out();
    longest_first(tasks_);
    summary_->num_tasks = int64_t(tasks_.size());
    summary_->most_workers = 1 + all_work() / kWorkOfOne;
    if (summary_->num_folds > 0) keep_whole(whole);
    for (const Task &task : tasks_)
      summary_->scratch_bytes =
          std::max(summary_->scratch_bytes, kernels_->scratch_bytes(plan_, &task));
    return ATTNPLAT_OK;
  }

  const std::vector<Task> &tasks() const { return tasks_; }

 private:
  static int64_t work(const Task &t) {
    return int64_t(t.last_row - t.first_row + 8) * (t.end - t.begin + 32);
  }

  int64_t all_work() const {
    int64_t sum = 0;
    for (const Task &task : tasks_) sum += work(task);
    return sum * (plan_->head_size + plan_->v_head_size);
  }

  // So that the last to finish are short.
  static void longest_first(std::vector<Task> &tasks) {
    std::stable_sort(tasks.begin(), tasks.end(),
                     [](const Task &a, const Task &b) { return work(a) > work(b); });
  }

  // A few threads have enough to share without cutting results, and then nothing to fold.
  void keep_whole(const std::vector<Task> &whole) {
    int64_t all = 0;
    for (const Task &task : whole) all += work(task);
    summary_->whole_workers =
        std::max<int64_t>(1, all / (kWholePerWorker * work(whole.front())));
    summary_->num_whole = int64_t(whole.size());
    tasks_.insert(tasks_.end(), whole.begin(), whole.end());
  }

  int32_t add_request(int32_t request) {
    int64_t start = plan_->query_start[request], stop = plan_->query_start[request + 1];
    summary_->bad_request = request;
    if (start < 0 || stop < start || stop > plan_->num_tokens || plan_->seq_lens[request] < 0 ||
        (!plan_->block_table && plan_->kv_start[request] < 0))
      return ATTNPLAT_BAD_VALUE;
    if (stop == start) return ATTNPLAT_OK;
    Masks masks(plan_, request);
    Reach all(masks, 0, masks.query_len);
    if (int32_t status = check_blocks(request, all)) return status;
    int64_t rows = masks.query_len * group_;
    // With topk every query token has keys of its own.
    int64_t unit = plan_->topk ? group_ : rows;
    block_ = std::max(kernels_->block_rows(plan_, unit), 1);
    int64_t tasks = rows / unit * ((unit + block_ - 1) / block_) * plan_->num_kv_heads;
    // A function of nothing but the request's own lengths and the layer's shape.
    int64_t pieces = std::max<int64_t>(1, kWantedTasks / tasks);
    // With topk, keys are entries of a token's list, and its pieces half as long.
    int64_t span = plan_->topk ? std::min<int64_t>(plan_->topk, masks.seq_len) : masks.seq_len;
    int64_t least = plan_->topk ? kPieceKeys / 2 : kPieceKeys;
    if (!plan_->topk && std::min(unit, block_) * plan_->v_head_size >= kManyValues) least *= 2;
    int64_t keys = (span + pieces - 1) / pieces;
    keys = std::max<int64_t>(1, (keys + least - 1) / least) * least;
    int32_t few = unit <= kernels_->few_rows(plan_) ? 1 : 0;
    for (int64_t first = 0; first < rows; first += unit)
      for (int64_t row = first; row < first + unit; row += block_)
        add_block(masks, request, row, std::min(row + block_, first + unit), keys, few);
    return ATTNPLAT_OK;
  }

  void add_block(const Masks &masks, int32_t request, int64_t first, int64_t last,
                 int64_t piece_keys, int32_t few) {
    Reach reach(masks, first / group_, (last - 1) / group_ + 1);
    Task task{};
    task.request = request;
    task.first_row = int32_t(first);
    task.last_row = int32_t(last);
    task.begin = int32_t(reach.head > 0 ? 0 : reach.low / piece_keys * piece_keys);
    task.end = int32_t(std::max<int64_t>(std::max(reach.head, reach.high), task.begin));
    if (plan_->topk) {
      task.begin = 0;
      task.end = int32_t(std::min<int64_t>(plan_->topk, masks.seq_len));
    }
    task.piece_keys = int32_t(piece_keys);
    task.few = few;
    task.parts = task.slots = 1;
    for (task.kv_head = 0; task.kv_head < plan_->num_kv_heads; task.kv_head++)
      tasks_.push_back(task);
  }

  // Cuts tasks that are long beside all the work there is. Bits do not depend on it.
  void share_out() {
    int64_t all = 0;
    for (const Task &task : tasks_) all += work(task);
    int64_t fair = all / kWantedTasks + 1;
    size_t count = tasks_.size();
    for (size_t n = 0; n < count; n++) {
      int64_t pieces = (tasks_[n].end - tasks_[n].begin + tasks_[n].piece_keys - 1) /
                       tasks_[n].piece_keys;
      int64_t parts = std::min(pieces, (work(tasks_[n]) + fair - 1) / fair);
      if (parts > 1) cut(n, pieces, parts);
    }
  }

  void cut(size_t n, int64_t pieces, int64_t parts) {
    Task task = tasks_[n];
    int64_t begin = task.begin, end = task.end, first = pieces / parts;
    task.slots = int32_t(1 + pieces - first);
    int64_t floats =
        task.slots * partial_slot(task.last_row - task.first_row, plan_->v_head_size);
    if (summary_->partial_floats + floats > kMostPartials) return;
    task.parts = int32_t(parts);
    task.fold = int32_t(summary_->num_folds++);
    task.partial = summary_->partial_floats;
    summary_->partial_floats += floats;
    for (int64_t part = 0; part < parts; part++) {
      int64_t from = pieces * part / parts, to = pieces * (part + 1) / parts;
      task.begin = int32_t(begin + from * task.piece_keys);
      task.end = int32_t(std::min(begin + to * task.piece_keys, end));
      task.slot = int32_t(part == 0 ? 0 : 1 + from - first);
      if (part == 0)
        tasks_[n] = task;
      else
        tasks_.push_back(task);
    }
  }

  // Ids of the blocks that some row reads.
  int32_t check_blocks(int32_t request, const Reach &reach) {
    if (!plan_->block_table) return ATTNPLAT_OK;
    if (int32_t status = check_span(request, 0, reach.head)) return status;
    return check_span(request, std::max(reach.low, reach.head), reach.high);
  }

  int32_t check_span(int32_t request, int64_t begin, int64_t end) {
    int64_t first = plan_->first_block ? plan_->first_block[request] : 0;
    const int32_t *row = plan_->block_table + request * plan_->table_stride;
    if (end <= begin) return ATTNPLAT_OK;
    for (int64_t at = begin / plan_->block_size; at <= (end - 1) / plan_->block_size; at++) {
      int64_t column = at - first;
      summary_->bad_request = request;
      summary_->bad_block = at;
      if (column < 0 || column >= plan_->table_width) return ATTNPLAT_OUTSIDE_TABLE;
      summary_->bad_block = row[column];
      if (row[column] < 0) return ATTNPLAT_BAD_BLOCK;
      summary_->highest_block = std::max<int64_t>(summary_->highest_block, row[column]);
    }
    return ATTNPLAT_OK;
  }

  const attnplat_cpu_plan *plan_;
  attnplat_cpu_summary *summary_;
  const Kernels *kernels_;
  int64_t group_, block_ = 1;
  std::vector<Task> tasks_;
};

// Latent rows have their sizes, and values inside.
bool latent_fits(const attnplat_cpu_plan *p) {
  if (p->kv_encoding < ATTNPLAT_MLA_FP8_656) return true;
  bool long_rows =
      p->kv_encoding == ATTNPLAT_MLA_FP8_656 || p->kv_encoding == ATTNPLAT_MLA_NVFP4_352;
  return p->values_in_keys && p->num_kv_heads == 1 && p->head_size == (long_rows ? 576 : 512) &&
         p->v_head_size <= p->head_size;
}

int32_t check_plan(const attnplat_cpu_plan *p) {
  if (p->size != sizeof(attnplat_cpu_plan) || p->version != ATTNPLAT_CPU_ABI)
    return ATTNPLAT_BAD_STRUCT;
  if (!isa_kernels(p->isa)) return ATTNPLAT_UNKNOWN_ISA;
  bool good = p->num_kv_heads > 0 && p->num_heads > 0 && p->num_heads % p->num_kv_heads == 0 &&
              p->head_size > 0 && p->v_head_size > 0 && p->num_reqs >= 0 && p->dtype >= 0 &&
              p->dtype <= ATTNPLAT_F16 && p->kv_encoding >= 0 && p->kv_encoding <= ATTNPLAT_MLA_NVFP4_352 && p->topk >= 0 &&
              latent_fits(p) &&
              (p->num_reqs == 0 ||
               ((p->block_table ? p->block_size > 0 : p->kv_start != nullptr) && p->query_start &&
                p->seq_lens && (!p->ranges || p->range_starts)));
  return good ? ATTNPLAT_OK : ATTNPLAT_BAD_VALUE;
}

}  // namespace
}  // namespace attnplat_cpu

extern "C" int64_t attnplat_cpu_task_bytes(void) { return sizeof(attnplat_cpu::Task); }

extern "C" int32_t attnplat_cpu_schedule(const attnplat_cpu_plan *plan, void *tasks,
                                         int64_t capacity, attnplat_cpu_summary *summary) {
  using namespace attnplat_cpu;
  if (int32_t status = check_plan(plan)) return status;
  try {
    Scheduler scheduler(plan, summary);
    if (int32_t status = scheduler.run()) return status;
    const std::vector<Task> &found = scheduler.tasks();
    if (int64_t(found.size()) <= capacity)
      std::copy(found.begin(), found.end(), static_cast<Task *>(tasks));
  } catch (...) {
    return ATTNPLAT_NO_MEMORY;
  }
  return ATTNPLAT_OK;
}
