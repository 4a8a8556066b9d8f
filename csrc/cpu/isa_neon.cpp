// NEON, which every 64-bit ARM processor has.

#include <arm_neon.h>
#include <stddef.h>

#include "kernels.h"

namespace attnplat_cpu {
namespace neon {
#include "encodings.h"
#include "masks.h"
#include "listed.h"
#include "vector_neon.h"
constexpr int64_t kTile = 64;
constexpr int64_t kStep = V::W;
constexpr int64_t kPadRows = 1;
// Each of these builds on those above it.
#include "prefetch.h"
#include "index_keys.h"
#include "latent.h"
#include "softmax.h"
#include "tile.h"
#include "products.h"
#include "finish.h"
#include "listed_tiles.h"
#include "pieces.h"
#include "attend_vector.h"
#include "index_vector.h"

const Kernels kKernels = {"neon", block_rows,  few_rows_of,   scratch_of, nothing,
                          nothing,  attend_task, fold_partials, read_memory,
                          multiply,  index_scratch, index_task};
}  // namespace neon
}  // namespace attnplat_cpu
