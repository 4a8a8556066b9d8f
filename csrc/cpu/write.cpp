// Copies new rows of keys and values to their slots.

#include <string.h>

#include "attnplat_cpu.h"

namespace {

struct Plane {
  const char *from;
  int64_t from_token, from_head;
  char *to;
  int64_t to_block, to_head, to_token;
  int64_t bytes;  // of a row
};

struct Writing {
  Plane planes[2];
  int num_planes;
  const attnplat_cpu_writing *w;
};

// Bytes that take as long to copy as a thread to wake.
constexpr int64_t kBytesOfOne = int64_t(1) << 18;

void copy(int64_t begin, int64_t end, void *context) {
  const Writing &writing = *static_cast<const Writing *>(context);
  const attnplat_cpu_writing *w = writing.w;
  for (int64_t n = begin; n < end; n++) {
    int64_t row = w->rows ? w->rows[n] : n;
    int64_t block = w->slots[n] / w->block_size, offset = w->slots[n] % w->block_size;
    for (int p = 0; p < writing.num_planes; p++) {
      const Plane &plane = writing.planes[p];
      const char *from = plane.from + row * plane.from_token;
      char *to = plane.to + block * plane.to_block + offset * plane.to_token;
      for (int32_t head = 0; head < w->num_heads; head++)
        memcpy(to + head * plane.to_head, from + head * plane.from_head, size_t(plane.bytes));
    }
  }
}

}  // namespace

extern "C" int32_t attnplat_cpu_write(const attnplat_cpu_writing *w, int64_t workers,
                                      attnplat_cpu_parallel_for parallel_for) {
  if (w->size != sizeof(*w) || w->version != ATTNPLAT_CPU_ABI) return ATTNPLAT_BAD_STRUCT;
  if (w->count < 0 || w->num_heads < 0 || w->element_size <= 0 || w->block_size <= 0 ||
      w->k_size < 0 || w->v_size < 0)
    return ATTNPLAT_BAD_VALUE;
  int64_t size = w->element_size;
  Writing writing{{}, 1, w};
  writing.planes[0] = {static_cast<const char *>(w->k), w->k_token * size, w->k_head * size,
                       static_cast<char *>(w->k_pages), w->k_pages_block * size,
                       w->k_pages_head * size, w->k_pages_token * size, w->k_size * size};
  if (w->v) {
    writing.planes[1] = {static_cast<const char *>(w->v), w->v_token * size, w->v_head * size,
                         static_cast<char *>(w->v_pages), w->v_pages_block * size,
                         w->v_pages_head * size, w->v_pages_token * size, w->v_size * size};
    writing.num_planes = 2;
  }
  int64_t row_bytes = (w->k_size + (w->v ? w->v_size : 0)) * size * w->num_heads;
  int64_t grain = kBytesOfOne / (row_bytes + 1) + 1;
  if (workers > 1 && parallel_for && w->count > grain)
    return parallel_for(0, w->count, grain, copy, &writing) ? ATTNPLAT_NO_MEMORY : ATTNPLAT_OK;
  copy(0, w->count, &writing);
  return ATTNPLAT_OK;
}
