// Eight floats with AVX2, FMA and F16C. Included inside an instruction set's namespace.

struct V {
  static constexpr int W = 8;
  using F = __m256;

  static F zero() { return _mm256_setzero_ps(); }
  static F set1(float x) { return _mm256_set1_ps(x); }
  static F load(const float *p) { return _mm256_loadu_ps(p); }
  static void store(float *p, F x) { _mm256_storeu_ps(p, x); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }  // b where one is NaN
  static F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
  static F lanes() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }
  static F less(F a, F b, F then, F otherwise) {  // then where a < b
    return _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
  }
  // x where its bit is set, else `otherwise`.
  static F select(uint64_t bits, F x, F otherwise) {
    __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i on = _mm256_and_si256(_mm256_set1_epi32(int(bits & 0xff)), lane);
    return _mm256_blendv_ps(otherwise, x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(on, lane)));
  }
  static float hmax(F x) {
    __m128 a = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    a = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
  }
  static float hsum(F x) {
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
  }
  // The sums of four vectors; each is added up in the same order whatever the others are.
  static void hsum4(F a, F b, F c, F d, float *out) {
    F x = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
  }

  // 2^x for x up to about 128; 0 below -126.5. `Degree` 5 is exact to 1e-7, 4 to 3e-6.
  template <int Degree>
  static F exp2(F x) {
    x = max(set1(-127.0f), x);
    F n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    F f = sub(x, n);
    F p;
    if (Degree == 5) {
      p = fma(set1(1.3264727e-3f), f, set1(9.6715128e-3f));
      p = fma(p, f, set1(5.55073374e-2f));
      p = fma(p, f, set1(2.40222421e-1f));
      p = fma(p, f, set1(6.93146978e-1f));
    } else {
      p = fma(set1(9.5828532e-3f), f, set1(5.59064262e-2f));
      p = fma(p, f, set1(2.40240986e-1f));
      p = fma(p, f, set1(6.93124193e-1f));
    }
    p = fma(p, f, set1(1.0f));
    __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return mul(p, _mm256_castsi256_ps(_mm256_slli_epi32(e, 23)));
  }

  // Rows to columns; in place.
  static void transpose(F *r) {
    F a[8], b[8];
    for (int i = 0; i < 4; i++) {
      a[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
      a[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
      b[4 * i] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0x44);
      b[4 * i + 1] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0xee);
      b[4 * i + 2] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
      b[4 * i + 3] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
      r[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
      r[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
    }
  }

  template <class E>
  static F get(const void *p);
  // The first n; the rest 0, and not read.
  template <class E>
  static F get_part(const void *p, int64_t n) {
    if (n >= W) return get<E>(p);
    alignas(32) char copy[W * 4] = {0};
    if (n > 0) __builtin_memcpy(copy, p, size_t(n) * E::bytes);
    return get<E>(copy);
  }
  template <class E>
  static void put(void *p, F x);
};

template <>
inline __m256 V::get<F32>(const void *p) {
  return _mm256_loadu_ps(static_cast<const float *>(p));
}
template <>
inline __m256 V::get<BF16>(const void *p) {
  __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i *>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
}
template <>
inline __m256 V::get<F16>(const void *p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i *>(p)));
}
template <>
inline __m256 V::get<E4M3>(const void *p) {
  // Not by multiplying subnormal bit patterns: the caller may have denormals switched off.
  __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i *>(p)));
  __m256i size = _mm256_and_si256(x, _mm256_set1_epi32(0x7f));
  __m256i sign = _mm256_slli_epi32(_mm256_xor_si256(x, size), 24);
  __m256i normal = _mm256_add_epi32(_mm256_slli_epi32(size, 20), _mm256_set1_epi32(120 << 23));
  __m256i nan = _mm256_cmpeq_epi32(size, _mm256_set1_epi32(0x7f));
  normal = _mm256_or_si256(normal, _mm256_and_si256(nan, _mm256_set1_epi32(0x7fc00000)));
  F small = mul(_mm256_cvtepi32_ps(size), set1(1.0f / 512));
  __m256i is_normal = _mm256_cmpgt_epi32(size, _mm256_set1_epi32(7));
  F value = _mm256_blendv_ps(small, _mm256_castsi256_ps(normal), _mm256_castsi256_ps(is_normal));
  return _mm256_or_ps(value, _mm256_castsi256_ps(sign));
}
template <>
inline __m256 V::get<E5M2>(const void *p) {
  __m128i x = _mm_cvtepu8_epi16(_mm_loadl_epi64(static_cast<const __m128i *>(p)));
  return _mm256_cvtph_ps(_mm_slli_epi16(x, 8));
}
template <>
inline __m256 V::get<INT8>(const void *p) {
  return _mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i *>(p))));
}
template <>
inline void V::put<F32>(void *p, __m256 x) {
  _mm256_storeu_ps(static_cast<float *>(p), x);
}
template <>
inline void V::put<BF16>(void *p, __m256 x) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  up = _mm256_srli_epi32(up, 16);
  up = _mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc0), nan);
  __m256i packed = _mm256_packus_epi32(up, up);
  packed = _mm256_permute4x64_epi64(packed, 0x08);
  _mm_storeu_si128(static_cast<__m128i *>(p), _mm256_castsi256_si128(packed));
}
template <>
inline void V::put<F16>(void *p, __m256 x) {
  _mm_storeu_si128(static_cast<__m128i *>(p),
                   _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
