// A call's work on the threads that a caller lends. Not for the units of an instruction set.
#pragma once

#include <stdint.h>

#include "attnplat_cpu.h"

namespace attnplat_cpu {

// Multiplications, about, that take as long as waking a thread.
constexpr int64_t kWorkOfOne = int64_t(1) << 18;

// Runs `body` as `workers` shares of one context, or as one here; a status.
inline int32_t spread(attnplat_cpu_body body, void *context, int64_t workers,
                      attnplat_cpu_parallel_for parallel_for) {
  if (workers > 1 && parallel_for)
    return parallel_for(0, workers, 1, body, context) ? ATTNPLAT_NO_MEMORY : ATTNPLAT_OK;
  body(0, 1, context);
  return ATTNPLAT_OK;
}

}  // namespace attnplat_cpu
