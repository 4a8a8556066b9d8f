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
