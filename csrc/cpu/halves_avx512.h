// Thirty-two bfloat16 with AVX-512-BF16, and tile registers with AMX. Included inside an
// instruction set's namespace, after vector_avx512.h.

struct H {
  using X = __m512i;

  static X load(const void *p) { return _mm512_loadu_si512(p); }
  static X load_part(const void *p, int64_t n) {  // the first n; the rest 0, and not read
    uint32_t some = n >= 32 ? 0xffffffffu : n <= 0 ? 0u : (1u << n) - 1;
    return _mm512_maskz_loadu_epi16(some, p);
  }
  static void store(void *p, X x) { _mm512_storeu_si512(p, x); }
  static X pack(V::F low, V::F high) {
    __m512bh x = _mm512_cvtne2ps_pbh(high, low);
    X bits;
    __builtin_memcpy(&bits, &x, sizeof(bits));
    return bits;
  }
  // Thirty-two codes as bfloat16, which holds them exactly.
  template <class E>
  static X narrow(const void *p);
  // sum + the products of a's and b's pairs, pair by pair.
  static V::F dot(V::F sum, X a, X b) {
    __m512bh x, y;
    __builtin_memcpy(&x, &a, sizeof(x));
    __builtin_memcpy(&y, &b, sizeof(y));
    return _mm512_dpbf16_ps(sum, x, y);
  }
  // The two elements at p, sixteen times.
  static X pair(const uint16_t *p) {
    int32_t two;
    __builtin_memcpy(&two, p, sizeof(two));
    return _mm512_set1_epi32(two);
  }
  // Elements of a and b by turns, from the first and from the second half of each eight.
  static X mix_low(X a, X b) { return _mm512_unpacklo_epi16(a, b); }
  static X mix_high(X a, X b) { return _mm512_unpackhi_epi16(a, b); }
};

template <>
inline __m512i H::narrow<E4M3>(const void *p) {
  __m512i x = _mm512_cvtepu8_epi16(_mm256_loadu_si256(static_cast<const __m256i *>(p)));
  __m512i size = _mm512_and_si512(x, _mm512_set1_epi16(0x7f));
  __m512i sign = _mm512_slli_epi16(_mm512_xor_si512(x, size), 8);
  __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(120 << 7));
  // Subnormal codes n are n / 512; the permutation looks at the five lowest bits of each.
  const __m512i small = _mm512_castsi128_si512(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00,
                                                              0x3c20, 0x3c40, 0x3c60));
  __mmask32 subnormal = _mm512_cmplt_epi16_mask(size, _mm512_set1_epi16(8));
  __mmask32 nan = _mm512_cmpeq_epi16_mask(size, _mm512_set1_epi16(0x7f));
  x = _mm512_mask_permutexvar_epi16(normal, subnormal, size, small);
  x = _mm512_mask_blend_epi16(nan, x, _mm512_set1_epi16(0x7fc0));
  return _mm512_or_si512(x, sign);
}

template <>
inline __m512i H::narrow<E5M2>(const void *p) {
  __m512i x = _mm512_cvtepu8_epi16(_mm256_loadu_si256(static_cast<const __m256i *>(p)));
  __m512i size = _mm512_and_si512(x, _mm512_set1_epi16(0x7f));
  __m512i sign = _mm512_slli_epi16(_mm512_xor_si512(x, size), 8);
  __m512i bits = _mm512_slli_epi16(size, 5);
  __m512i normal = _mm512_add_epi16(bits, _mm512_set1_epi16(112 << 7));
  // Subnormal codes n are n / 65536.
  const __m512i small =
      _mm512_castsi128_si512(_mm_setr_epi16(0, 0x3780, 0x3800, 0x3840, 0, 0, 0, 0));
  __mmask32 subnormal = _mm512_cmplt_epi16_mask(size, _mm512_set1_epi16(4));
  __mmask32 odd = _mm512_cmpgt_epi16_mask(size, _mm512_set1_epi16(0x7b));  // infinity and NaN
  x = _mm512_mask_permutexvar_epi16(normal, subnormal, size, small);
  x = _mm512_mask_blend_epi16(odd, x, _mm512_or_si512(bits, _mm512_set1_epi16(0x7f80)));
  return _mm512_or_si512(x, sign);
}

template <>
inline __m512i H::narrow<INT8>(const void *p) {
  return pack(V::get<INT8>(p), V::get<INT8>(static_cast<const char *>(p) + V::W));
}

// Eight registers of 16 rows by 64 bytes. In inline assembly, since compilers before GCC 13 take
// the intrinsics for functions that touch no memory.
struct Tiles {
  template <int T>
  static void zero() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(T));
  }
  template <int T>
  static void load(const void *p, int64_t stride) {
    __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(stride) : "memory");
  }
  template <int T>
  static void store(void *p, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(p), "r"(stride) : "memory");
  }
  // C += A * B, B with pairs of rows side by side.
  template <int C, int A, int B>
  static void multiply() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
  static void enter() {
    struct alignas(64) {
      uint8_t palette, start_row, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } config = {};
    config.palette = 1;
    for (int t = 0; t < 8; t++) {
      config.row_bytes[t] = 64;
      config.rows[t] = 16;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
  }
  static void leave() { __asm__ volatile("tilerelease"); }
};
