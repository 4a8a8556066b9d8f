// Index keys as bfloat16, which holds codes and powers of two exactly; and the choice between the
// kernels for them and another instruction set's. Included after halves.h.

// Thirty-two codes of e4m3 that lie together, their signs turned where `flip` says so.
static inline const uint8_t *two_chunks(const uint8_t *codes, int64_t stride, uint8_t flip,
                                        uint8_t *copy) {
  if (stride == kChunk && flip == 0) return codes;
  __builtin_memcpy(copy, codes, kChunk);
  __builtin_memcpy(copy + kChunk, codes + stride, kChunk);
  for (int i = 0; i < 2 * kChunk; i++) copy[i] ^= flip;
  return copy;
}

template <class K>
static inline void narrow_key(const attnplat_cpu_index *x, const KeyPlace &key, Half *to,
                              int64_t pad, float *whole);

template <>
inline void narrow_key<KeyBf16>(const attnplat_cpu_index *x, const KeyPlace &key, Half *to,
                                int64_t pad, float *) {
  const char *row = reinterpret_cast<const char *>(codes_of(x, key));
  for (int64_t d = 0; d < pad; d += 32) H::store(to + d, take_halves<BF16>(row, d, x->head_size));
}

template <>
inline void narrow_key<KeyFp8>(const attnplat_cpu_index *x, const KeyPlace &key, Half *to, int64_t,
                               float *whole) {
  float scale = key_scale(x, key);
  *whole = __builtin_fabsf(scale);
  const uint8_t *codes = codes_of(x, key);
  uint8_t copy[2 * kChunk];
  for (int64_t part = 0; part < 4; part++)
    H::store(to + 32 * part,
             H::template narrow<E4M3>(two_chunks(codes + 2 * part * x->chunk_stride,
                                                 x->chunk_stride, scale < 0 ? 0x80 : 0, copy)));
}

template <>
inline void narrow_key<KeyFp8Parts>(const attnplat_cpu_index *x, const KeyPlace &key, Half *to,
                                    int64_t, float *) {
  const uint8_t *codes = codes_of(x, key);
  for (int64_t part = 0; part < 4; part++) {
    V::F scale = V::set1(part_scale(x, key, part));
    const uint8_t *chunk = codes + 2 * part * x->chunk_stride;
    H::store(to + 32 * part,
             H::pack(V::mul(V::template get<E4M3>(chunk), scale),
                     V::mul(V::template get<E4M3>(chunk + x->chunk_stride), scale)));
  }
}

template <>
inline void narrow_key<KeyMxfp4>(const attnplat_cpu_index *x, const KeyPlace &key, Half *to,
                                 int64_t, float *) {
  const uint8_t *codes = codes_of(x, key);
  for (int64_t part = 0; part < 4; part++) {
    V::F scale = V::set1(part_scale(x, key, part));
    const uint8_t *chunk = codes + part * x->chunk_stride;
    H::store(to + 32 * part,
             H::pack(V::mul(get_e2m1(chunk), scale), V::mul(get_e2m1(chunk + 8), scale)));
  }
}

// Keys first .. first + count of the request as rows of bfloat16; zeros behind them up to `total`.
template <class K>
static inline void narrow_keys(const attnplat_cpu_index *x, const IndexTask *task, int64_t first,
                               int64_t count, int64_t total, Half *to, int64_t pad, float *whole) {
  for (int64_t n = 0; n < total; n++) {
    if (n < count) {
      KeyPlace key = place_of(x, task->request, first + n);
      narrow_key<K>(x, key, to + n * pad, pad, whole + n);
      int64_t ahead = first + n + 2 * total;
      if (ahead < task->end) prefetch_key(x, place_of(x, task->request, ahead));
    } else {
      __builtin_memset(to + n * pad, 0, size_t(pad) * sizeof(Half));
      whole[n] = 0;
    }
  }
}

static inline const char *index_query(const attnplat_cpu_index *x, int64_t row, int64_t head) {
  return static_cast<const char *>(x->q) +
         2 * (row * x->num_heads + head) * int64_t(x->head_size);
}
