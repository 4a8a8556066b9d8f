// Keys of an index cache, found in their pages and decoded. Included inside an instruction set's
// namespace, after its vectors.

// Keys of a chunk of codes: sixteen bytes that lie together in every order of a page.
constexpr int64_t kChunk = 16;

// Where a key is: its page, and its slot there.
struct KeyPlace {
  const uint8_t *page;
  int64_t slot;
};

static inline KeyPlace place_of(const attnplat_cpu_index *x, int64_t request, int64_t position) {
  int64_t first = x->first_block ? x->first_block[request] : 0;
  int64_t column = position / x->block_size - first;
  int64_t block = x->block_table[request * x->table_stride + column];
  return {x->pool + block * x->page_stride, position % x->block_size};
}

// How many keys a row sees.
static inline int64_t keys_seen(const attnplat_cpu_index *x, int64_t request, int64_t row) {
  int64_t seq_len = x->seq_lens[request];
  int64_t seen = x->row_ends ? x->row_ends[row]
                             : seq_len - (x->query_start[request + 1] - row) + 1;
  return greater(lesser(seen, seq_len), 0);
}

static inline const uint8_t *codes_of(const attnplat_cpu_index *x, const KeyPlace &key) {
  return key.page + x->value_at[key.slot];
}

// 2^(byte - 127); NaN for 255.
static inline float power_of_two(uint8_t byte) {
  uint32_t bits = byte == 255 ? 0x7fc00000u : byte == 0 ? 0x00400000u : uint32_t(byte) << 23;
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

// What multiplies elements [32 part, 32 part + 32) of a key.
static inline float part_scale(const attnplat_cpu_index *x, const KeyPlace &key, int64_t part) {
  return power_of_two(key.page[x->scale_at[4 * key.slot + part]]);
}

// The float32 scale of a key.
static inline float key_scale(const attnplat_cpu_index *x, const KeyPlace &key) {
  uint8_t bytes[4];
  for (int i = 0; i < 4; i++) bytes[i] = key.page[x->scale_at[4 * key.slot + i]];
  float scale;
  __builtin_memcpy(&scale, bytes, 4);
  // Codes of 0 make the products of an infinite scale NaN, and no sum of NaN is a number.
  return __builtin_isfinite(scale) ? scale : __builtin_nanf("");
}

static constexpr float e2m1_value(int code) {
  const float sizes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  return code & 8 ? -sizes[code & 7] : sizes[code & 7];
}

// The two elements of a byte of e2m1 codes, the low one first.
struct E2M1Pairs {
  float of[256][2];
  constexpr E2M1Pairs() : of() {
    for (int byte = 0; byte < 256; byte++) {
      of[byte][0] = e2m1_value(byte & 15);
      of[byte][1] = e2m1_value(byte >> 4);
    }
  }
};
static constexpr E2M1Pairs kE2M1Pairs;

// V::W elements from half as many bytes of e2m1 codes.
static inline V::F get_e2m1(const uint8_t *p) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f,
                                       -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
  __m128i low = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p));
  // The permutation looks at the four lowest bits of each lane.
  __m128i codes = _mm_unpacklo_epi8(low, _mm_srli_epi16(low, 4));
  return _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(codes), values);
#else
  alignas(64) float x[V::W];
  for (int i = 0; i < V::W / 2; i++) __builtin_memcpy(x + 2 * i, kE2M1Pairs.of[p[i]], 8);
  return V::load(x);
#endif
}

// The encodings. `whole` is what multiplies all products of a key; it is never negative, so that
// it may wait until heads have been added up: where the stored scale is, codes change their sign.
struct KeyBf16 {
  static constexpr bool scaled = false;
  static void widen(const attnplat_cpu_index *x, const KeyPlace &key, float *to, int64_t pad,
                    float *) {
    const char *row = reinterpret_cast<const char *>(codes_of(x, key));
    for (int64_t d = 0; d < pad; d += V::W)
      V::store(to + d, V::template get_part<BF16>(row + 2 * d, x->head_size - d));
  }
};

struct KeyFp8 {
  static constexpr bool scaled = true;
  static void widen(const attnplat_cpu_index *x, const KeyPlace &key, float *to, int64_t,
                    float *whole) {
    float scale = key_scale(x, key);
    V::F sign = V::set1(scale < 0 ? -1.0f : 1.0f);
    *whole = __builtin_fabsf(scale);
    const uint8_t *codes = codes_of(x, key);
    for (int64_t d = 0; d < 128; d += V::W)
      V::store(to + d, V::mul(sign, V::template get<E4M3>(codes + d / kChunk * x->chunk_stride +
                                                          d % kChunk)));
  }
};

struct KeyFp8Parts {
  static constexpr bool scaled = false;
  static void widen(const attnplat_cpu_index *x, const KeyPlace &key, float *to, int64_t,
                    float *) {
    const uint8_t *codes = codes_of(x, key);
    for (int64_t d = 0; d < 128; d += V::W) {
      V::F value =
          V::template get<E4M3>(codes + d / kChunk * x->chunk_stride + d % kChunk);
      V::store(to + d, V::mul(value, V::set1(part_scale(x, key, d / 32))));
    }
  }
};

struct KeyMxfp4 {
  static constexpr bool scaled = false;
  static void widen(const attnplat_cpu_index *x, const KeyPlace &key, float *to, int64_t,
                    float *) {
    const uint8_t *codes = codes_of(x, key);
    for (int64_t part = 0; part < 4; part++) {
      V::F scale = V::set1(part_scale(x, key, part));
      const uint8_t *chunk = codes + part * x->chunk_stride;
      for (int64_t d = 0; d < 32; d += V::W)
        V::store(to + 32 * part + d, V::mul(get_e2m1(chunk + d / 2), scale));
    }
  }
};

// A key's codes on their way from memory.
static inline void prefetch_key(const attnplat_cpu_index *x, const KeyPlace &key) {
  const uint8_t *codes = codes_of(x, key);
  int64_t bytes = x->encoding == ATTNPLAT_INDEX_BF16    ? 2 * int64_t(x->head_size)
                  : x->encoding == ATTNPLAT_INDEX_MXFP4 ? 64
                                                        : 128;
  for (int64_t n = 0; n < bytes; n += 64)
    prefetch_line(reinterpret_cast<const char *>(codes + n / kChunk * x->chunk_stride));
  if (x->scale_at)
    prefetch_line(reinterpret_cast<const char *>(key.page + x->scale_at[4 * key.slot]));
}

// Scores of keys that start at `first`, of which the row sees those before `seen`.
static inline void put_scores(float *row, int64_t first, int64_t seen, const float *scores,
                              int64_t count) {
  count = lesser(count, seen - first);
  if (count > 0) __builtin_memcpy(row + first, scores, size_t(count) * sizeof(float));
}
