// An index task with bfloat16 products, or with those of `rest` where q is not bfloat16.

static void index_task(const attnplat_cpu_index *x, const IndexTask *task, float *scores,
                       int64_t stride, void *scratch) {
  if (x->dtype != ATTNPLAT_BF16) return rest.index(x, task, scores, stride, scratch);
  Arena arena{static_cast<char *>(scratch), 0};
  IndexBuffers b = place_index(x, arena);
  switch (x->encoding) {
    case ATTNPLAT_INDEX_BF16: return index_keys_of<KeyBf16>(x, task, scores, stride, b);
    case ATTNPLAT_INDEX_FP8: return index_keys_of<KeyFp8>(x, task, scores, stride, b);
    case ATTNPLAT_INDEX_FP8_E8M0: return index_keys_of<KeyFp8Parts>(x, task, scores, stride, b);
    default: return index_keys_of<KeyMxfp4>(x, task, scores, stride, b);
  }
}

static int64_t index_scratch(const attnplat_cpu_index *x) {
  if (x->dtype != ATTNPLAT_BF16) return rest.index_scratch(x);
  Arena arena{nullptr, 0};
  place_index(x, arena);
  return arena.used;
}
