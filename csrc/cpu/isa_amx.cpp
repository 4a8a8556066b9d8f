// AMX-BF16 for bfloat16 queries; everything else is left to the vectors that come with AMX.

#include <immintrin.h>
#include <stddef.h>

#include "kernels.h"

namespace attnplat_cpu {
namespace amx {
#include "encodings.h"
#include "masks.h"
#include "listed.h"
#if defined(ATTNPLAT_EMULATE)
#include "vector_emulated.h"
#define ATTNPLAT_REST avx2::kKernels
#else
#include "vector_avx512.h"
#include "halves_avx512.h"
#define ATTNPLAT_REST avx512::kKernels
#endif
#if !defined(ATTNPLAT_AMX_TILE)
#define ATTNPLAT_AMX_TILE 256
#endif
constexpr int64_t kTile = ATTNPLAT_AMX_TILE;
constexpr int64_t kStep = 32;
constexpr int64_t kPadRows = 32;
// Each of these builds on those above it.
#include "prefetch.h"
#include "index_keys.h"
#include "latent.h"
#include "softmax.h"
#include "tile.h"
#include "finish.h"
#include "listed_tiles.h"
#include "pieces.h"
#include "halves.h"
// Rows up to which values are not paired.
constexpr int64_t kFewTileRows = 8;
static inline bool takes_few(const Work &w) { return w.rows <= kFewTileRows && !w.careful; }
#include "softmax_tiles.h"
#include "tiles_few.h"
#include "attend_amx.h"

static const Kernels &rest = ATTNPLAT_REST;
#include "attend_halves.h"
#include "index_halves.h"
#include "index_amx.h"
#include "index_any.h"

const Kernels kKernels = {"amx",        any_block_rows, any_few_rows, any_scratch, Tiles::enter,
                          Tiles::leave, any_attend,     any_fold,     any_read,
                          multiply,  index_scratch, index_task};
}  // namespace amx
}  // namespace attnplat_cpu
