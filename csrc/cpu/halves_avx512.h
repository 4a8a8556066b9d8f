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
  // Sixteen weights, each as a pair: beside 0, and behind it.
  static void apart(V::F x, uint16_t *even, uint16_t *odd) {
    __m256bh halves = _mm512_cvtneps_pbh(x);
    __m256i bits;
    __builtin_memcpy(&bits, &halves, sizeof(bits));
    X wide = _mm512_cvtepu16_epi32(bits);
    _mm512_storeu_si512(even, wide);
    _mm512_storeu_si512(odd, _mm512_slli_epi32(wide, 16));
  }
  // Elements of both by turns: one by one, and four by four.
  static void ones(V::F a, V::F b, float *to) {
    const X low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const X high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    V::store(to, _mm512_permutex2var_ps(a, low, b));
    V::store(to + V::W, _mm512_permutex2var_ps(a, high, b));
  }
  static void fours(V::F a, V::F b, float *to) {
    const X low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const X high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    V::store(to, _mm512_permutex2var_ps(a, low, b));
    V::store(to + V::W, _mm512_permutex2var_ps(a, high, b));
  }
  // Whether sixty-four codes are found in tables by one shuffle, and those as bfloat16.
  template <class E>
  static constexpr bool looks_up();
  template <class E>
  static void look_up(const void *p, uint16_t *to);
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

#if defined(__AVX512VBMI__)
// The upper and the lower bytes of bfloat16 by the lower seven bits of codes of 8 bits with so many
// for the exponent, of which the highest stands for infinity and NaN, or for NaN if it is `Last`.
template <int Exponent, bool Last>
struct CodeTable {
  alignas(64) uint8_t high[128], low[128];

  constexpr CodeTable() : high(), low() {
    constexpr int rest = 7 - Exponent, bias = 128 - (1 << (Exponent - 1));
    for (int code = 0; code < 128; code++) {
      int exponent = code >> rest, digits = code & ((1 << rest) - 1), bits = 0;
      if (Last ? code == 127 : exponent == (1 << Exponent) - 1) {
        bits = Last ? 0x7fc0 : 0x7f80 | digits << (7 - rest);
      } else if (exponent > 0) {
        bits = (exponent + bias) << 7 | digits << (7 - rest);
      } else if (digits > 0) {
        int top = 0;
        while (digits >> (top + 1)) top++;
        bits = (bias + 1 - rest + top) << 7 | ((digits << (7 - top)) & 0x7f);
      }
      high[code] = uint8_t(bits >> 8);
      low[code] = uint8_t(bits);
    }
  }

  void look_up(const void *p, uint16_t *to) const {
    // In an order in which bytes, interleaved within their sixteens, come out one after another.
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    __m512i x = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(p));
    __m512i upper = _mm512_permutex2var_epi8(_mm512_load_si512(high), x,
                                             _mm512_load_si512(high + 64));
    __m512i lower = _mm512_permutex2var_epi8(_mm512_load_si512(low), x,
                                             _mm512_load_si512(low + 64));
    // upper | (x & 0x80), its sign
    upper = _mm512_ternarylogic_epi64(upper, x, _mm512_set1_epi8(char(0x80)), 0xf8);
    _mm512_storeu_si512(to, _mm512_unpacklo_epi8(lower, upper));
    _mm512_storeu_si512(to + 32, _mm512_unpackhi_epi8(lower, upper));
  }
};

static constexpr CodeTable<4, true> kE4M3Table;
static constexpr CodeTable<5, false> kE5M2Table;

template <class E>
constexpr bool H::looks_up() {
  return __is_same(E, E4M3) || __is_same(E, E5M2);
}
template <class E>
inline void H::look_up(const void *p, uint16_t *to) {
  if constexpr (__is_same(E, E4M3))
    kE4M3Table.look_up(p, to);
  else
    kE5M2Table.look_up(p, to);
}
#else
template <class E>
constexpr bool H::looks_up() {
  return false;
}
template <class E>
inline void H::look_up(const void *, uint16_t *) {}
#endif

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
