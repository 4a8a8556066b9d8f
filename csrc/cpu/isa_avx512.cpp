// AVX-512 F, BW, DQ and VL.

#include <immintrin.h>
#include <stddef.h>

#include "kernels.h"

namespace attnplat_cpu {
namespace avx512 {
#include "encodings.h"
#include "masks.h"
#include "listed.h"
#include "vector_avx512.h"
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

const Kernels kKernels = {"avx512", block_rows,  few_rows_of,   scratch_of, nothing,
                          nothing,  attend_task, fold_partials, read_memory,
                          multiply,  index_scratch, index_task};
}  // namespace avx512
}  // namespace attnplat_cpu
