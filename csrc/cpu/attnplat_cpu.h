/* The C ABI of attnplat's CPU kernels: attention over paged or packed keys and values.
 *
 * Plain C, no torch and no Python. A caller fills an `attnplat_cpu_plan` once a step, lets
 * `attnplat_cpu_schedule` turn it into tasks, and runs `attnplat_cpu_attend` once a layer.
 * Both structs begin with their size and the ABI version, and are refused when either differs.
 *
 * Nothing here holds state between calls, and results do not depend on the number of threads:
 * a schedule is a function of each request's own lengths, and what several tasks computed of one
 * request is folded in the order of the keys.
 */
#ifndef ATTNPLAT_CPU_H
#define ATTNPLAT_CPU_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ATTNPLAT_CPU_ABI 3u

#define ATTNPLAT_CPU_EXPORT __attribute__((visibility("default")))

/* How numbers are stored: of q and out the first three, of k and v any. */
enum attnplat_cpu_encoding {
  ATTNPLAT_F32 = 0,
  ATTNPLAT_BF16 = 1,
  ATTNPLAT_F16 = 2,
  ATTNPLAT_E4M3FN = 3,
  ATTNPLAT_E5M2 = 4,
  ATTNPLAT_INT8 = 5,
  /* Rows of latent attention: codes, scales and what stays unscaled, by their bytes. */
  ATTNPLAT_MLA_FP8_656 = 6,
  ATTNPLAT_MLA_FP8_584 = 7, /* their scales are apart */
  ATTNPLAT_MLA_FP8_528 = 8,
  ATTNPLAT_MLA_NVFP4_352 = 9
};

enum attnplat_cpu_status {
  ATTNPLAT_OK = 0,
  ATTNPLAT_BAD_STRUCT = 1,    /* a size or version this library does not know */
  ATTNPLAT_BAD_VALUE = 2,     /* a count, encoding or block size that cannot be */
  ATTNPLAT_BAD_BLOCK = 3,     /* a negative block id among those that are read */
  ATTNPLAT_OUTSIDE_TABLE = 4, /* a block that the request's row of the table does not hold */
  ATTNPLAT_NO_MEMORY = 5,
  ATTNPLAT_UNKNOWN_ISA = 6
};

/* Everything a schedule depends on, and the batch's own tensors. Strides count elements.
 * Optional pointers are null. */
typedef struct attnplat_cpu_plan {
  uint32_t size;
  uint32_t version;
  int32_t isa; /* as attnplat_cpu_isa_index gives it */
  int32_t num_reqs;
  int64_t num_tokens; /* rows of q and out, padding included */
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_size;
  int32_t v_head_size;
  int32_t dtype;
  int32_t kv_encoding;
  int32_t values_in_keys; /* v is the front of k */
  int32_t causal;
  const int32_t *query_start; /* [num_reqs + 1] */
  const int32_t *seq_lens;    /* [num_reqs] */
  /* Pages: block_table [num_reqs, table_width]. Without: rows of k and v from kv_start on. */
  const int32_t *block_table;
  int64_t table_stride;
  int64_t table_width;
  int64_t block_size;
  const int32_t *first_block; /* [num_reqs] */
  const int64_t *kv_start;    /* [num_reqs] */
  /* Masks. */
  const uint8_t *causal_of; /* [num_reqs], instead of `causal` */
  int64_t window_left;      /* negative: open */
  int64_t window_right;
  int64_t chunk_size; /* 0: none */
  int64_t static_sink_tokens;
  const int32_t *prefix_lens;  /* [num_reqs] */
  const int32_t *ranges;       /* [num_ranges, 3]: request, begin, end; grouped by request */
  const int32_t *range_starts; /* [num_reqs + 1] rows of `ranges` */
  const uint8_t *tree_mask;    /* [num_tokens, tree_bytes] */
  int64_t tree_stride;
  int64_t tree_bytes;
  int32_t topk; /* most indices that each query row brings; 0: none do */
  int32_t reserved;
} attnplat_cpu_plan;

/* What a schedule came to. */
typedef struct attnplat_cpu_summary {
  int64_t num_tasks;
  int64_t num_whole;      /* the same work in tasks that make results alone; behind the others */
  int64_t whole_workers;  /* threads among which these are still shared out well */
  int64_t num_folds;      /* results that several tasks make together */
  int64_t partial_floats; /* room for what those tasks found */
  int64_t scratch_bytes;  /* that each thread takes while it runs */
  int64_t most_workers;   /* threads that have enough to do to be worth starting */
  int64_t highest_block;  /* that is read; -1 for none */
  int64_t bad_request;    /* where a status tells of a request */
  int64_t bad_block;
} attnplat_cpu_summary;

/* One layer's tensors. Strides count elements; the last dimension has stride 1. */
typedef struct attnplat_cpu_tensors {
  uint32_t size;
  uint32_t version;
  const void *q;
  int64_t q_token, q_head;
  const void *k;
  int64_t k_block, k_head, k_token;
  const void *v;
  int64_t v_block, v_head, v_token;
  void *out;
  int64_t out_token, out_head;
  float *lse; /* or null */
  int64_t lse_token, lse_head;
  const float *sinks;         /* [num_heads] */
  const float *alibi_slopes;  /* [num_heads] */
  const float *position_bias; /* [num_reqs or 1, num_heads, queries, keys] */
  int64_t bias_request, bias_head, bias_query;
  const int32_t *topk_indices; /* [num_tokens, topk_count] */
  int64_t topk_stride, topk_count;
  /* One per tensor or per kv head (stride 0 or 1), multiplied on read; null for 1. */
  const float *k_scale;
  const float *v_scale;
  int64_t k_scale_head, v_scale_head;
  /* Bytes from the start of a row to a float32 that scales it, too; 0: there is none. */
  int64_t k_scale_at, v_scale_at;
  float scale;
  float logits_soft_cap; /* 0: none */
  float *partials;       /* [partial_floats] */
  /* Scales of latent rows that a page keeps apart, and bytes between blocks and tokens. */
  const uint8_t *row_scales;
  int64_t row_scales_block, row_scales_token;
} attnplat_cpu_tensors;

typedef void (*attnplat_cpu_body)(int64_t begin, int64_t end, void *context);

/* Runs the body over all of [begin, end), in pieces of any size, and returns when all are done;
 * 0 on success. libtorch's `torch_parallel_for` is one. */
typedef int32_t (*attnplat_cpu_parallel_for)(int64_t begin, int64_t end, int64_t grain,
                                             attnplat_cpu_body body, void *context);

ATTNPLAT_CPU_EXPORT uint32_t attnplat_cpu_abi(void);

/* Instruction sets compiled in, lowest first: names, and whether this machine runs each. */
ATTNPLAT_CPU_EXPORT int32_t attnplat_cpu_isa_count(void);
ATTNPLAT_CPU_EXPORT const char *attnplat_cpu_isa_name(int32_t index);
ATTNPLAT_CPU_EXPORT int32_t attnplat_cpu_isa_usable(int32_t index);

/* The highest instruction set that this machine runs and `limit` includes (null: any), or -1
 * when there is none of that name, or this machine does not run it. */
ATTNPLAT_CPU_EXPORT int32_t attnplat_cpu_isa_index(const char *limit);

/* Bytes of one task. */
ATTNPLAT_CPU_EXPORT int64_t attnplat_cpu_task_bytes(void);

/* Writes the tasks into `tasks`, room for `capacity` of them; tells in `summary` how many
 * there are in any case, so that a call with more room can follow. */
ATTNPLAT_CPU_EXPORT int32_t attnplat_cpu_schedule(const attnplat_cpu_plan *plan, void *tasks,
                                                  int64_t capacity, attnplat_cpu_summary *summary);

/* Writes out and lse of every query row. `workers` is how many threads are worth starting;
 * a null `parallel_for` runs all on the calling one. */
ATTNPLAT_CPU_EXPORT int32_t attnplat_cpu_attend(const attnplat_cpu_plan *plan,
                                                const attnplat_cpu_tensors *tensors,
                                                const void *tasks,
                                                const attnplat_cpu_summary *summary,
                                                int64_t workers,
                                                attnplat_cpu_parallel_for parallel_for);

/* New rows of keys and values, and their slots in the pages. Strides and sizes count elements; the
 * last dimension has stride 1. Rows are copied as they are. */
typedef struct attnplat_cpu_writing {
  uint32_t size;
  uint32_t version;
  int32_t element_size; /* bytes */
  int32_t num_heads;
  const int64_t *rows;  /* [count] rows of k and v; null: the first, in order */
  const int64_t *slots; /* [count], none negative */
  int64_t count;
  int64_t block_size;
  const void *k;
  int64_t k_token, k_head, k_size;
  void *k_pages;
  int64_t k_pages_block, k_pages_head, k_pages_token;
  const void *v; /* null: there are none */
  int64_t v_token, v_head, v_size;
  void *v_pages;
  int64_t v_pages_block, v_pages_head, v_pages_token;
} attnplat_cpu_writing;

/* Copies them. No two slots may be equal. */
ATTNPLAT_CPU_EXPORT int32_t attnplat_cpu_write(const attnplat_cpu_writing *writing,
                                               int64_t workers,
                                               attnplat_cpu_parallel_for parallel_for);

/* A pool of threads for callers that have none. `attnplat_cpu_pool_for` has the type
 * attnplat_cpu_parallel_for and runs on the process's one pool, made on first use by the process
 * (a child process after a fork makes its own). */
ATTNPLAT_CPU_EXPORT int32_t attnplat_cpu_pool_for(int64_t begin, int64_t end, int64_t grain,
                                                  attnplat_cpu_body body, void *context);
ATTNPLAT_CPU_EXPORT int64_t attnplat_cpu_pool_threads(void);

/* Sums `bytes` of memory at `data` as 32-bit integers with `workers` threads: how fast this
 * machine reads. */
ATTNPLAT_CPU_EXPORT uint64_t attnplat_cpu_read(int32_t isa, const void *data, int64_t bytes,
                                               int64_t workers,
                                               attnplat_cpu_parallel_for parallel_for);

/* Multiplies and adds on `workers` threads as fast as the instruction set can from L1, `rounds`
 * times on each; returns how many operations that were. */
ATTNPLAT_CPU_EXPORT int64_t attnplat_cpu_multiply(int32_t isa, int64_t rounds, int64_t workers,
                                                  attnplat_cpu_parallel_for parallel_for);

/* How an index cache stores a key: bfloat16, or codes and scales. */
enum attnplat_cpu_index_encoding {
  ATTNPLAT_INDEX_BF16 = 0,
  ATTNPLAT_INDEX_FP8 = 1,      /* e4m3, a float32 scale a key */
  ATTNPLAT_INDEX_FP8_E8M0 = 2, /* e4m3, a power of two per 32 */
  ATTNPLAT_INDEX_MXFP4 = 3     /* e2m1, a power of two per 32 */
};

/* A step of a sparse indexer: logit = sum over heads of weight * max(0, q . key).
 *
 * Keys are read where they lie in their pages. A page holds a key's codes in chunks of 16 bytes,
 * `chunk_stride` bytes apart, from `value_at` of its slot on, and the four bytes of its scales at
 * `scale_at` of its slot; offsets are bytes from the page's start. */
typedef struct attnplat_cpu_index {
  uint32_t size;
  uint32_t version;
  int32_t isa;
  int32_t num_reqs;
  int32_t num_heads;
  int32_t head_size; /* 128 unless keys are bfloat16 */
  int32_t dtype;     /* of q: ATTNPLAT_F32 or ATTNPLAT_BF16 */
  int32_t encoding;
  const int32_t *query_start; /* [num_reqs + 1] */
  const int32_t *seq_lens;    /* [num_reqs] */
  const int32_t *row_ends;    /* [query_start[num_reqs]], keys a row sees; null: its own position */
  const int32_t *block_table; /* [num_reqs, table_width] */
  int64_t table_stride;
  int64_t table_width;
  int64_t block_size;
  const int32_t *first_block; /* [num_reqs], or null */
  const uint8_t *pool;        /* [num_blocks], page_stride bytes apart */
  int64_t page_stride;
  int64_t num_blocks;
  const int32_t *value_at; /* [block_size] */
  int64_t chunk_stride;
  const int32_t *scale_at; /* [block_size, 4]; null for bfloat16 */
  const void *q;           /* [tokens, num_heads, head_size] */
  const float *weights;    /* [tokens, num_heads] */
  float *logits;           /* [tokens, logits_stride or less]; what a row does not see stays */
  int64_t logits_stride;
  int32_t *chosen; /* [tokens, topk] */
  int64_t topk;
  int64_t bad_request; /* where a status tells of a request */
  int64_t bad_block;
} attnplat_cpu_index;

/* Writes the scores of the keys that each row sees into `logits`. */
ATTNPLAT_CPU_EXPORT int32_t attnplat_cpu_index_logits(attnplat_cpu_index *index, int64_t workers,
                                                      attnplat_cpu_parallel_for parallel_for);

/* Writes the positions of each row's best keys into `chosen`, as attnplat_cpu_choose does; scores
 * are kept for a few rows at a time, and `logits` is not used. */
ATTNPLAT_CPU_EXPORT int32_t attnplat_cpu_index_topk(attnplat_cpu_index *index, int64_t workers,
                                                    attnplat_cpu_parallel_for parallel_for);

/* Writes the columns of the `topk` largest of each row of `logits` into `chosen` [rows, topk],
 * ascending, -1 behind them. Of equal ones the lower column is taken, 0 and -0 are equal, and
 * neither NaN nor minus infinity is ever taken. */
ATTNPLAT_CPU_EXPORT int32_t attnplat_cpu_choose(const float *logits, int64_t rows, int64_t columns,
                                                int64_t stride, int32_t *chosen, int64_t topk,
                                                int64_t workers,
                                                attnplat_cpu_parallel_for parallel_for);

#ifdef __cplusplus
}
#endif

#endif
