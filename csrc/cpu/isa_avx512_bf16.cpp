// AVX-512-BF16 for bfloat16 queries; everything else is left to plain AVX-512.

#include <immintrin.h>
#include <stddef.h>

#include "kernels.h"

namespace attnplat_cpu {
namespace avx512_bf16 {
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
constexpr int64_t kTile = 128;
constexpr int64_t kStep = 32;
constexpr int64_t kPadRows = 1;
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
#include "attend_bf16.h"

static const Kernels &rest = ATTNPLAT_REST;
#include "attend_halves.h"
#include "index_halves.h"
#include "index_bf16.h"
#include "index_any.h"

static void nothing() {}

const Kernels kKernels = {"avx512_bf16", any_block_rows, any_few_rows, any_scratch, nothing,
                          nothing, any_attend,     any_fold,     any_read,
                          multiply,  index_scratch, index_task};
}  // namespace avx512_bf16
}  // namespace attnplat_cpu
