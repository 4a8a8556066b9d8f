// What the parts of the library share: a task, and the functions that each instruction set brings.
//
// Plain data and declarations only. Units for different instruction sets include this, and a
// function defined here would be compiled for each: the linker could keep one that this machine
// cannot run.
#pragma once

#include <stdint.h>

#include "attnplat_cpu.h"

namespace attnplat_cpu {

// Keys of one piece are a multiple of this.
constexpr int64_t kPieceKeys = 512;

// Rows of one request and kv head against keys [begin, end).
//
// Rows are query tokens times the heads of a group: row = token * group_size + head in group,
// token counted from the request's first. Keys come in pieces of `piece_keys`, which begin at
// multiples of it. Each piece is computed by itself, and pieces are folded first to last: by the
// task where it has all of them, else by whichever of the result's tasks, its `parts`, ends last.
// So it makes no difference to the bits how many tasks there are.
struct Task {
  int32_t request;
  int32_t kv_head;
  int32_t first_row;
  int32_t last_row;
  int32_t begin;
  int32_t end;
  int32_t piece_keys;
  int32_t few;      // the request has few rows: kernels that read pages in place pay
  int32_t parts;    // tasks of the result
  int32_t fold;     // number of the result; only for parts > 1
  int32_t slots;    // partials of the result: one of the first part, one of each later piece
  int32_t slot;     // first of this task
  int64_t partial;  // of slot 0, in floats from tensors.partials
};

// Floats that one row of a partial takes: its maximum, its sum and its values.
static constexpr int64_t partial_row(int64_t v_head_size) { return v_head_size + 2; }

// Floats that one partial takes.
static constexpr int64_t partial_slot(int64_t rows, int64_t v_head_size) {
  return (rows * partial_row(v_head_size) + 15) / 16 * 16;
}

// Query rows [first_row, last_row) of one request, counted over the batch, against keys
// [begin, end) of an index cache; each score is a result of its own.
struct IndexTask {
  int32_t request;
  int64_t first_row;
  int64_t last_row;
  int64_t begin;
  int64_t end;
};

// Rows of one index task at most.
constexpr int64_t kIndexRows = 16;

struct Kernels {
  const char *name;
  // Most rows of one task of a request with `rows` of them, and up to how many it counts as having
  // few.
  int32_t (*block_rows)(const attnplat_cpu_plan *plan, int64_t rows);
  int32_t (*few_rows)(const attnplat_cpu_plan *plan);
  // Scratch that the task needs, 64-byte aligned.
  int64_t (*scratch_bytes)(const attnplat_cpu_plan *plan, const Task *task);
  // Before the first and after the last task of a thread.
  void (*enter)(void);
  void (*leave)(void);
  // Attends; writes out and lse, or the task's partials.
  void (*attend)(const attnplat_cpu_plan *plan, const attnplat_cpu_tensors *tensors,
                 const Task *task, void *scratch);
  // Folds the partials of the task's result and writes out and lse.
  void (*fold)(const attnplat_cpu_plan *plan, const attnplat_cpu_tensors *tensors,
               const Task *task, void *scratch);
  // Ceilings: the sum of memory as words; the fastest products, counted in operations.
  uint64_t (*read)(const void *data, int64_t bytes);
  int64_t (*multiply)(int64_t rounds);
  // The scores of an indexer's task, into `scores` of `stride` a row, whose first row and key are
  // those of the task; and the scratch it takes.
  int64_t (*index_scratch)(const attnplat_cpu_index *index);
  void (*index)(const attnplat_cpu_index *index, const IndexTask *task, float *scores,
                int64_t stride, void *scratch);
};

#define ATTNPLAT_DECLARE_ISA(isa) \
  namespace isa {                 \
  extern const Kernels kKernels;  \
  }
ATTNPLAT_DECLARE_ISA(scalar)
ATTNPLAT_DECLARE_ISA(avx2)
ATTNPLAT_DECLARE_ISA(avx512)
ATTNPLAT_DECLARE_ISA(avx512_bf16)
ATTNPLAT_DECLARE_ISA(amx)
ATTNPLAT_DECLARE_ISA(neon)
ATTNPLAT_DECLARE_ISA(neon_bf16)

// Whether this processor and its system run the instruction set (cpu.cpp).
bool machine_runs(const char *isa);

}  // namespace attnplat_cpu
