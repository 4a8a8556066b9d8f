// The instruction sets that were compiled in.
#pragma once

#include "kernels.h"

namespace attnplat_cpu {

// The kernels of an index that attnplat_cpu_isa_index gave; null for any other.
const Kernels *isa_kernels(int32_t index);

}  // namespace attnplat_cpu
