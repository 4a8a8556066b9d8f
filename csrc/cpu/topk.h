// Choosing the best of a row.
#pragma once

#include <stdint.h>

namespace attnplat_cpu {

// Entries of scratch that a row of `count` scores takes.
constexpr int64_t choose_scratch(int64_t count) { return 3 * count; }

// The places of the `topk` largest scores into `chosen`, ascending, -1 behind them.
void choose_row(const float *scores, int64_t count, int32_t *chosen, int64_t topk,
                uint32_t *scratch);

}  // namespace attnplat_cpu
