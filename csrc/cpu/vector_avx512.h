// Sixteen floats with AVX-512 F, BW, DQ and VL. Included inside an instruction set's namespace.

struct V {
  static constexpr int W = 16;
  using F = __m512;

  static F zero() { return _mm512_setzero_ps(); }
  static F set1(float x) { return _mm512_set1_ps(x); }
  static F load(const float *p) { return _mm512_loadu_ps(p); }
  static void store(float *p, F x) { _mm512_storeu_ps(p, x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }  // b where one is NaN
  static F abs(F a) { return _mm512_abs_ps(a); }
  static F lanes() {
    return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  }
  static F less(F a, F b, F then, F otherwise) {  // then where a < b
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), otherwise, then);
  }
  // x where its bit is set, else `otherwise`.
  static F select(uint64_t bits, F x, F otherwise) {
    return _mm512_mask_blend_ps(__mmask16(bits), otherwise, x);
  }
  static __m256 low(F x) { return _mm512_castps512_ps256(x); }
  static __m256 high(F x) { return _mm512_extractf32x8_ps(x, 1); }
  static float hmax(F x) {
    __m256 h = _mm256_max_ps(low(x), high(x));
    __m128 a = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    a = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
  }
  static float hsum(F x) {
    __m256 h = _mm256_add_ps(low(x), high(x));
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
  }
  // The sums of four vectors; each is added up in the same order whatever the others are.
  static void hsum4(F a, F b, F c, F d, float *out) {
    __m256 x = _mm256_hadd_ps(_mm256_add_ps(low(a), high(a)), _mm256_add_ps(low(b), high(b)));
    __m256 y = _mm256_hadd_ps(_mm256_add_ps(low(c), high(c)), _mm256_add_ps(low(d), high(d)));
    x = _mm256_hadd_ps(x, y);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
  }

  // 2^x for x up to about 128. `Degree` 5 is exact to 1e-7, 4 to 3e-6, 3 to 9e-5; 1 exactly for 0.
  template <int Degree>
  static F exp2(F x) {
    // The distance to the next lower integer, which is the exponent that scalef takes.
    F f = _mm512_reduce_ps(x, 1 | 8);
    F p;
    if (Degree == 5) {
      p = fma(set1(1.86713057e-3f), f, set1(9.01702925e-3f));
      p = fma(p, f, set1(5.57999139e-2f));
      p = fma(p, f, set1(2.40164450e-1f));
      p = fma(p, f, set1(6.93151312e-1f));
    } else if (Degree == 3) {
      p = fma(set1(7.70670732e-2f), f, set1(2.27644957e-1f));
      p = fma(p, f, set1(6.95116794e-1f));
    } else {
      p = fma(set1(1.34266886e-2f), f, set1(5.22424672e-2f));
      p = fma(p, f, set1(2.41280208e-1f));
      p = fma(p, f, set1(6.93044844e-1f));
    }
    return _mm512_scalef_ps(fma(p, f, set1(1.0f)), x);
  }

  // Rows to columns; in place.
  static void transpose(F *r) {
    F t[16];
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
      t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
      r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
      r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
      r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
      r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
      t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
      t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
      t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
      t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
      r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
      r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
      r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
      r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
    }
  }

  // The largest of each.
  static void hmax4(F a, F b, F c, F d, float *out) {
    F x = _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    F y = _mm512_max_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    // Lanes of x are a, b, a, b by now, of y c, d, c, d.
    x = _mm512_max_ps(_mm512_shuffle_ps(x, y, 0x44), _mm512_shuffle_ps(x, y, 0xee));
    __m256 h = _mm256_max_ps(low(x), high(x));
    _mm_storeu_ps(out, _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)));
  }
  // Columns [0, 4) of a block of 16 rows of 16.
  static void columns(const float *block, F *to) {
    F t[4];
    for (int i = 0; i < 4; i++) {
      t[i] = _mm512_castps128_ps512(_mm_loadu_ps(block + 16 * i));
      t[i] = _mm512_insertf32x4(t[i], _mm_loadu_ps(block + 16 * (i + 4)), 1);
      t[i] = _mm512_insertf32x4(t[i], _mm_loadu_ps(block + 16 * (i + 8)), 2);
      t[i] = _mm512_insertf32x4(t[i], _mm_loadu_ps(block + 16 * (i + 12)), 3);
    }
    F a = _mm512_unpacklo_ps(t[0], t[1]), b = _mm512_unpackhi_ps(t[0], t[1]);
    F c = _mm512_unpacklo_ps(t[2], t[3]), d = _mm512_unpackhi_ps(t[2], t[3]);
    to[0] = _mm512_shuffle_ps(a, c, 0x44);
    to[1] = _mm512_shuffle_ps(a, c, 0xee);
    to[2] = _mm512_shuffle_ps(b, d, 0x44);
    to[3] = _mm512_shuffle_ps(b, d, 0xee);
  }

  static __mmask16 first(int64_t n) {
    return n >= W ? __mmask16(0xffff) : n <= 0 ? __mmask16(0) : __mmask16((1u << n) - 1);
  }
  template <class E>
  static F get(const void *p);
  // The first n; the rest 0, and not read.
  template <class E>
  static F get_part(const void *p, int64_t n);
  template <class E>
  static void put(void *p, F x);

  static F widen_bf16(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  }
  static F widen_e4m3(__m128i codes) {
    // Not by multiplying subnormal bit patterns: the caller may have denormals switched off.
    __m512i x = _mm512_cvtepu8_epi32(codes);
    __m512i size = _mm512_and_si512(x, _mm512_set1_epi32(0x7f));
    __m512i sign = _mm512_slli_epi32(_mm512_xor_si512(x, size), 24);
    __m512i normal = _mm512_add_epi32(_mm512_slli_epi32(size, 20), _mm512_set1_epi32(120 << 23));
    F small = mul(_mm512_cvtepi32_ps(size), set1(1.0f / 512));
    __mmask16 subnormal = _mm512_cmplt_epi32_mask(size, _mm512_set1_epi32(8));
    __mmask16 nan = _mm512_cmpeq_epi32_mask(size, _mm512_set1_epi32(0x7f));
    __m512i value = _mm512_mask_blend_epi32(subnormal, normal, _mm512_castps_si512(small));
    value = _mm512_mask_blend_epi32(nan, value, _mm512_set1_epi32(0x7fc00000));
    return _mm512_castsi512_ps(_mm512_or_si512(value, sign));
  }
  static F widen_e5m2(__m128i codes) {
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8));
  }
  static F widen_int8(__m128i codes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)); }
};

#define ATTNPLAT_GET(E, whole, part)                         \
  template <>                                                \
  inline __m512 V::get<E>(const void *p) {                   \
    return whole;                                            \
  }                                                          \
  template <>                                                \
  inline __m512 V::get_part<E>(const void *p, int64_t n) {   \
    return part;                                             \
  }
ATTNPLAT_GET(F32, _mm512_loadu_ps(p), _mm512_maskz_loadu_ps(first(n), p))
ATTNPLAT_GET(BF16, widen_bf16(_mm256_loadu_si256(static_cast<const __m256i *>(p))),
             widen_bf16(_mm256_maskz_loadu_epi16(first(n), p)))
ATTNPLAT_GET(F16, _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i *>(p))),
             _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p)))
ATTNPLAT_GET(E4M3, widen_e4m3(_mm_loadu_si128(static_cast<const __m128i *>(p))),
             widen_e4m3(_mm_maskz_loadu_epi8(first(n), p)))
ATTNPLAT_GET(E5M2, widen_e5m2(_mm_loadu_si128(static_cast<const __m128i *>(p))),
             widen_e5m2(_mm_maskz_loadu_epi8(first(n), p)))
ATTNPLAT_GET(INT8, widen_int8(_mm_loadu_si128(static_cast<const __m128i *>(p))),
             widen_int8(_mm_maskz_loadu_epi8(first(n), p)))
#undef ATTNPLAT_GET

template <>
inline void V::put<F32>(void *p, __m512 x) {
  _mm512_storeu_ps(p, x);
}
template <>
inline void V::put<BF16>(void *p, __m512 x) {
  __m512i bits = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  up = _mm512_srli_epi32(up, 16);
  up = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), up,
                               _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(static_cast<__m256i *>(p), _mm512_cvtepi32_epi16(up));
}
template <>
inline void V::put<F16>(void *p, __m512 x) {
  _mm256_storeu_si256(static_cast<__m256i *>(p),
                      _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
