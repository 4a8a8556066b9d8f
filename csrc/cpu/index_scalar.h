// An indexer's scores one element at a time, in float64. Included by the scalar unit.

static double index_element(const attnplat_cpu_index *x, const uint8_t *page, int64_t slot,
                            int64_t d) {
  const uint8_t *codes = page + x->value_at[slot];
  if (x->encoding == ATTNPLAT_INDEX_BF16) {
    uint16_t half;
    __builtin_memcpy(&half, codes + 2 * d, 2);
    return from_bits(uint32_t(half) << 16);
  }
  int64_t byte = x->encoding == ATTNPLAT_INDEX_MXFP4 ? d / 2 : d;
  uint8_t code = codes[byte / 16 * x->chunk_stride + byte % 16];
  const int32_t *scale_at = x->scale_at + 4 * slot;
  if (x->encoding == ATTNPLAT_INDEX_FP8) {
    uint8_t bytes[4];
    for (int i = 0; i < 4; i++) bytes[i] = page[scale_at[i]];
    float scale;
    __builtin_memcpy(&scale, bytes, 4);
    return get(&code, 0, ATTNPLAT_E4M3FN) * scale;
  }
  double scale = power_of_two(page[scale_at[d / 32]]);
  if (x->encoding == ATTNPLAT_INDEX_FP8_E8M0) return get(&code, 0, ATTNPLAT_E4M3FN) * scale;
  return e2m1(d % 2 ? code >> 4 : code & 15) * scale;
}

static double index_score(const attnplat_cpu_index *x, int64_t row, const double *key) {
  double score = 0;
  for (int64_t h = 0; h < x->num_heads; h++) {
    double dot = 0;
    int64_t at = (row * x->num_heads + h) * x->head_size;
    for (int64_t d = 0; d < x->head_size; d++) dot += get(x->q, at + d, x->dtype) * key[d];
    score += double(x->weights[row * x->num_heads + h]) * (dot < 0 ? 0 : dot);
  }
  return score;
}

static int64_t index_scratch(const attnplat_cpu_index *x) { return 8 * int64_t(x->head_size); }

static void index_task(const attnplat_cpu_index *x, const IndexTask *task, float *scores,
                       int64_t stride, void *scratch) {
  double *key = static_cast<double *>(scratch);
  int64_t first_block = x->first_block ? x->first_block[task->request] : 0;
  for (int64_t j = task->begin; j < task->end; j++) {
    int64_t column = j / x->block_size - first_block;
    int64_t block = x->block_table[task->request * x->table_stride + column];
    const uint8_t *page = x->pool + block * x->page_stride;
    for (int64_t d = 0; d < x->head_size; d++)
      key[d] = index_element(x, page, j % x->block_size, d);
    int64_t seq_len = x->seq_lens[task->request];
    for (int64_t row = task->first_row; row < task->last_row; row++) {
      int64_t seen = x->row_ends ? lesser(x->row_ends[row], seq_len)
                                 : seq_len - (x->query_start[task->request + 1] - row) + 1;
      if (j < seen)
        scores[(row - task->first_row) * stride + j - task->begin] =
            float(index_score(x, row, key));
    }
  }
}
