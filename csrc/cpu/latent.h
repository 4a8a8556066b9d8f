// Latent rows that are stored as codes and scales, decoded. Included inside an instruction set's
// namespace, after its vectors and index_keys.h.

static inline bool is_latent(int32_t encoding) { return encoding >= ATTNPLAT_MLA_FP8_656; }

// Calls put(d, V::F) for elements d .. d + V::W of the row, in order. `scales` are those that a
// page keeps apart.
template <class Put>
static inline void decode_latent(int32_t encoding, const uint8_t *row, const uint8_t *scales,
                                 Put put) {
  switch (encoding) {
    case ATTNPLAT_MLA_FP8_656:
      for (int64_t d = 0; d < 512; d += V::W) {
        float scale;
        __builtin_memcpy(&scale, row + 512 + d / 128 * 4, 4);
        put(d, V::mul(V::template get<E4M3>(row + d), V::set1(scale)));
      }
      for (int64_t d = 512; d < 576; d += V::W)
        put(d, V::template get<BF16>(row + 528 + 2 * (d - 512)));
      return;
    case ATTNPLAT_MLA_FP8_584:
      for (int64_t d = 0; d < 448; d += V::W)
        put(d, V::mul(V::template get<E4M3>(row + d), V::set1(power_of_two(scales[d / 64]))));
      for (int64_t d = 448; d < 512; d += V::W)
        put(d, V::template get<BF16>(row + 448 + 2 * (d - 448)));
      return;
    case ATTNPLAT_MLA_FP8_528:
      for (int64_t d = 0; d < 512; d += V::W)
        put(d, V::mul(V::template get<E4M3>(row + d), V::set1(power_of_two(row[512 + d / 32]))));
      return;
    default:
      // The 32 scales of e4m3, s at 8 * (s % 4) + s / 4.
      alignas(64) float widened[32];
      for (int64_t n = 0; n < 32; n += V::W)
        V::store(widened + n, V::template get<E4M3>(row + 320 + n));
      for (int64_t d = 0; d < 512; d += V::W)
        put(d, V::mul(get_e2m1(row + d / 2), V::set1(widened[d / 16 % 4 * 8 + d / 64])));
      for (int64_t d = 512; d < 576; d += V::W) put(d, V::template get<E4M3>(row + 256 + d - 512));
  }
}
