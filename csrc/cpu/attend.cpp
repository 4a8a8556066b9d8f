// Runs the tasks of a schedule on whatever threads there are.

#include <stddef.h>

#include <atomic>
#include <new>

#include "isa.h"
#include "kernels.h"
#include "threads.h"

namespace attnplat_cpu {
namespace {

struct Call {
  const attnplat_cpu_plan *plan;
  const attnplat_cpu_tensors *tensors;
  const Task *tasks;
  int64_t num_tasks;
  int64_t scratch_bytes;
  const Kernels *kernels;
  std::atomic<int64_t> next{0};
  std::atomic<int32_t> status{ATTNPLAT_OK};
  std::atomic<int32_t> *done = nullptr;  // parts of each fold
};

constexpr std::align_val_t kAlignment{64};

// Memory that a thread keeps for its next call, since the system clears anew what was given back. No
// call reads what it has not written.
class Kept {
 public:
  ~Kept() { ::operator delete(at_, kAlignment); }

  void *room(int64_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
    bool fits = bytes == bytes_;  // so that going past its end is seen
#else
    bool fits = bytes <= bytes_;
#endif
    if (!fits) {
      ::operator delete(at_, kAlignment);
      at_ = ::operator new(size_t(bytes), kAlignment, std::nothrow);
      bytes_ = at_ ? bytes : 0;
    }
    return at_;
  }

 private:
  void *at_ = nullptr;
  int64_t bytes_ = 0;
};

thread_local Kept kept;

// One thread's share: tasks by number, until none is left.
void work(Call &call) {
  int64_t n = call.next.fetch_add(1, std::memory_order_relaxed);
  if (n >= call.num_tasks) return;
  void *scratch = kept.room(call.scratch_bytes);
  if (!scratch) {
    call.status.store(ATTNPLAT_NO_MEMORY, std::memory_order_relaxed);
    return;
  }
  call.kernels->enter();
  for (; n < call.num_tasks; n = call.next.fetch_add(1, std::memory_order_relaxed)) {
    const Task *task = call.tasks + n;
    call.kernels->attend(call.plan, call.tensors, task, scratch);
    // Whoever ends last folds a result's parts, in the order of the keys.
    if (task->parts > 1 &&
        call.done[task->fold].fetch_add(1, std::memory_order_acq_rel) == task->parts - 1)
      call.kernels->fold(call.plan, call.tensors, task, scratch);
  }
  call.kernels->leave();
}

void share(int64_t begin, int64_t end, void *context) {
  // How many shares come in one piece does not matter: each goes on until no task is left.
  if (begin < end) work(*static_cast<Call *>(context));
}

}  // namespace
}  // namespace attnplat_cpu

extern "C" int32_t attnplat_cpu_attend(const attnplat_cpu_plan *plan,
                                       const attnplat_cpu_tensors *tensors, const void *tasks,
                                       const attnplat_cpu_summary *summary, int64_t workers,
                                       attnplat_cpu_parallel_for parallel_for) {
  using namespace attnplat_cpu;
  if (plan->size != sizeof(*plan) || tensors->size != sizeof(*tensors) ||
      plan->version != ATTNPLAT_CPU_ABI || tensors->version != ATTNPLAT_CPU_ABI)
    return ATTNPLAT_BAD_STRUCT;
  if (tensors->topk_count > plan->topk) return ATTNPLAT_BAD_VALUE;
  Call call;
  call.plan = plan;
  call.tensors = tensors;
  call.tasks = static_cast<const Task *>(tasks);
  call.num_tasks = summary->num_tasks;
  call.scratch_bytes = summary->scratch_bytes;
  call.kernels = isa_kernels(plan->isa);
  if (!call.kernels) return ATTNPLAT_UNKNOWN_ISA;
  std::atomic<int32_t> few_folds[64];
  std::atomic<int32_t> *many_folds = nullptr;
  call.done = few_folds;
  if (summary->num_folds > 64) {
    call.done = many_folds = new (std::nothrow) std::atomic<int32_t>[size_t(summary->num_folds)];
    if (!many_folds) return ATTNPLAT_NO_MEMORY;
  }
  for (int64_t n = 0; n < summary->num_folds; n++) call.done[n].store(0);
  if (workers > summary->most_workers) workers = summary->most_workers;
  if (workers <= summary->whole_workers) {
    call.tasks += summary->num_tasks;
    call.num_tasks = summary->num_whole;
  }
  if (workers > call.num_tasks) workers = call.num_tasks;
  int32_t status = spread(share, &call, workers, parallel_for);
  delete[] many_folds;
  return status ? status : call.status.load();
}
