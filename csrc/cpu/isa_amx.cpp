// AMX-BF16 for bfloat16 queries; everything else is left to the vectors that come with AMX.

#include <immintrin.h>
#include <stddef.h>

#include "kernels.h"

namespace attnplat_cpu {
namespace amx {
#include "encodings.h"
#include "masks.h"
#if defined(ATTNPLAT_EMULATE)
#include "vector_emulated.h"
#define ATTNPLAT_REST avx2::kKernels
#else
#include "vector_avx512.h"
#include "halves_avx512.h"
#define ATTNPLAT_REST avx512::kKernels
#endif
constexpr int64_t kTile = 256;
constexpr int64_t kStep = 32;
constexpr int64_t kPadRows = 32;
// Each of these builds on those above it.
#include "softmax.h"
#include "tile.h"
#include "finish.h"
#include "pieces.h"
#include "halves.h"
#include "attend_amx.h"

static const Kernels &rest = ATTNPLAT_REST;
#include "attend_halves.h"

const Kernels kKernels = {"amx",        any_block_rows, any_few_rows, any_scratch, Tiles::enter,
                          Tiles::leave, any_attend,     any_fold,     any_read,
                          multiply};
}  // namespace amx
}  // namespace attnplat_cpu
