// The 512-bit vectors, halves and tiles of AVX-512-BF16 and AMX in plain C++, so that kernels
// written for them can be tested on machines without. Slow; never part of an installed library.

typedef float Sixteen __attribute__((vector_size(64)));

struct V {
  static constexpr int W = 16;
  using F = Sixteen;

  static F zero() { return F{}; }
  static F set1(float x) { return x - F{}; }
  static F load(const float *p) {
    F x;
    __builtin_memcpy(&x, p, sizeof(x));
    return x;
  }
  static void store(float *p, F x) { __builtin_memcpy(p, &x, sizeof(x)); }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F fma(F a, F b, F c) {
    for (int i = 0; i < W; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
  }
  static F max(F a, F b) { return a > b ? a : b; }
  static F abs(F a) {
    for (int i = 0; i < W; i++) a[i] = __builtin_fabsf(a[i]);
    return a;
  }
  static F lanes() { return F{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
  static F less(F a, F b, F then, F otherwise) { return a < b ? then : otherwise; }
  static F select(uint64_t bits, F x, F otherwise) {
    for (int i = 0; i < W; i++)
      if (!(bits >> i & 1)) x[i] = otherwise[i];
    return x;
  }
  static float hmax(F x) {
    float top = x[0];
    for (int i = 1; i < W; i++) top = top > x[i] ? top : x[i];
    return top;
  }
  static float hsum(F x) {
    for (int half = 8; half > 0; half /= 2)
      for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
  }
  static void hsum4(F a, F b, F c, F d, float *out) {
    out[0] = hsum(a);
    out[1] = hsum(b);
    out[2] = hsum(c);
    out[3] = hsum(d);
  }
  template <int Degree>
  static F exp2(F x) {
    for (int i = 0; i < W; i++) x[i] = x[i] < -127.0f ? 0.0f : __builtin_exp2f(x[i]);
    return x;
  }
  static void transpose(F *r) {
    for (int i = 0; i < W; i++)
      for (int j = 0; j < i; j++) {
        float x = r[i][j];
        r[i][j] = r[j][i];
        r[j][i] = x;
      }
  }
  static void hmax4(F a, F b, F c, F d, float *out) {
    out[0] = hmax(a);
    out[1] = hmax(b);
    out[2] = hmax(c);
    out[3] = hmax(d);
  }
  static void columns(const float *block, F *to) {
    for (int n = 0; n < 4; n++)
      for (int i = 0; i < W; i++) to[n][i] = block[16 * i + n];
  }
  static float half_to_float(uint16_t h) {
    uint32_t size = h & 0x7fff, bits = (size << 13) + (112u << 23);
    if (size >= 0x7c00) bits = 0x7f800000 | size << 13;
    float x;
    __builtin_memcpy(&x, &bits, 4);
    if (size < 0x400) x = float(size) / 16777216.0f;
    return h & 0x8000 ? -x : x;
  }
  static float bf16_to_float(uint16_t h) {
    uint32_t bits = uint32_t(h) << 16;
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
  }
  static uint16_t float_to_bf16(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  static float e4m3_to_float(uint8_t c) {
    int exponent = c >> 3 & 15, rest = c & 7;
    float size = exponent ? float(8 + rest) / 1024.0f * float(1 << exponent) : float(rest) / 512.0f;
    if ((c & 0x7f) == 0x7f) size = __builtin_nanf("");
    return c & 0x80 ? -size : size;
  }

  template <class E>
  static float one(const void *p, int64_t n) {
    uint16_t half = 0;
    uint8_t code = static_cast<const uint8_t *>(p)[n * E::bytes];
    if (E::bytes == 2) __builtin_memcpy(&half, static_cast<const char *>(p) + 2 * n, 2);
    if (Same<E, BF16>::value) return bf16_to_float(half);
    if (Same<E, F16>::value) return half_to_float(half);
    if (Same<E, E4M3>::value) return e4m3_to_float(code);
    if (Same<E, E5M2>::value) return half_to_float(uint16_t(code << 8));
    if (Same<E, INT8>::value) return float(int8_t(code));
    float x;
    __builtin_memcpy(&x, static_cast<const char *>(p) + E::bytes * n, size_t(E::bytes));
    return x;
  }
  template <class E>
  static F get_part(const void *p, int64_t n) {
    F x{};
    for (int64_t i = 0; i < W && i < n; i++) x[i] = one<E>(p, i);
    return x;
  }
  template <class E>
  static F get(const void *p) {
    return get_part<E>(p, W);
  }
  template <class E>
  static void put(void *p, F x) {
    // Of activations, only bfloat16 comes here.
    for (int i = 0; i < W; i++) {
      uint16_t half = float_to_bf16(x[i]);
      __builtin_memcpy(static_cast<char *>(p) + 2 * i, &half, 2);
    }
  }

 private:
  template <class A, class B>
  struct Same {
    static constexpr bool value = false;
  };
  template <class A>
  struct Same<A, A> {
    static constexpr bool value = true;
  };
};

struct H {
  typedef uint16_t X __attribute__((vector_size(64)));

  static X load(const void *p) { return load_part(p, 32); }
  static X load_part(const void *p, int64_t n) {
    X x{};
    if (n > 0) __builtin_memcpy(&x, p, size_t(n < 32 ? n : 32) * 2);
    return x;
  }
  static void store(void *p, X x) { __builtin_memcpy(p, &x, sizeof(x)); }
  static X pack(V::F low, V::F high) {
    X x{};
    for (int i = 0; i < 16; i++) {
      x[i] = V::float_to_bf16(low[i]);
      x[16 + i] = V::float_to_bf16(high[i]);
    }
    return x;
  }
  static void apart(V::F x, uint16_t *even, uint16_t *odd) {
    for (int i = 0; i < 16; i++) {
      even[2 * i] = odd[2 * i + 1] = V::float_to_bf16(x[i]);
      even[2 * i + 1] = odd[2 * i] = 0;
    }
  }
  static void ones(V::F a, V::F b, float *to) {
    for (int i = 0; i < 16; i++) {
      to[2 * i] = a[i];
      to[2 * i + 1] = b[i];
    }
  }
  static void fours(V::F a, V::F b, float *to) {
    for (int i = 0; i < 16; i++) {
      to[i / 4 * 8 + i % 4] = a[i];
      to[i / 4 * 8 + 4 + i % 4] = b[i];
    }
  }
  template <class E>
  static constexpr bool looks_up() {
    return false;
  }
  template <class E>
  static void look_up(const void *, uint16_t *) {}
  template <class E>
  static X narrow(const void *p) {
    return pack(V::get<E>(p), V::get<E>(static_cast<const char *>(p) + V::W));
  }
  static V::F dot(V::F sum, X a, X b) {
    for (int i = 0; i < 32; i++)
      sum[i / 2] = __builtin_fmaf(V::bf16_to_float(a[i]), V::bf16_to_float(b[i]), sum[i / 2]);
    return sum;
  }
  static X pair(const uint16_t *p) {
    X x{};
    for (int i = 0; i < 32; i++) x[i] = p[i % 2];
    return x;
  }
  static X mix(X a, X b, int half) {
    X x{};
    for (int i = 0; i < 16; i++) {
      int from = i / 4 * 8 + 4 * half + i % 4;
      x[2 * i] = a[from];
      x[2 * i + 1] = b[from];
    }
    return x;
  }
  static X mix_low(X a, X b) { return mix(a, b, 0); }
  static X mix_high(X a, X b) { return mix(a, b, 1); }
};

struct Tiles {
  struct Registers {
    uint8_t bytes[8][16][64];
  };
  static Registers &registers() {
    static thread_local Registers all;
    return all;
  }
  template <int T>
  static void zero() {
    __builtin_memset(registers().bytes[T], 0, 1024);
  }
  template <int T>
  static void load(const void *p, int64_t stride) {
    for (int64_t i = 0; i < 16; i++)
      __builtin_memcpy(registers().bytes[T][i], static_cast<const char *>(p) + i * stride, 64);
  }
  template <int T>
  static void store(void *p, int64_t stride) {
    for (int64_t i = 0; i < 16; i++)
      __builtin_memcpy(static_cast<char *>(p) + i * stride, registers().bytes[T][i], 64);
  }
  template <int C, int A, int B>
  static void multiply() {
    Registers &r = registers();
    for (int m = 0; m < 16; m++)
      for (int k = 0; k < 16; k++)
        for (int n = 0; n < 16; n++) {
          uint16_t a[2], b[2];
          float c;
          __builtin_memcpy(a, r.bytes[A][m] + 4 * k, 4);
          __builtin_memcpy(b, r.bytes[B][k] + 4 * n, 4);
          __builtin_memcpy(&c, r.bytes[C][m] + 4 * n, 4);
          for (int i = 0; i < 2; i++) c += V::bf16_to_float(a[i]) * V::bf16_to_float(b[i]);
          __builtin_memcpy(r.bytes[C][m] + 4 * n, &c, 4);
        }
  }
  static void enter() {}
  static void leave() {}
};
