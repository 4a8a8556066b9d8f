// Four floats with NEON. Included inside an instruction set's namespace.

struct V {
  static constexpr int W = 4;
  using F = float32x4_t;

  static F zero() { return vdupq_n_f32(0); }
  static F set1(float x) { return vdupq_n_f32(x); }
  static F load(const float *p) { return vld1q_f32(p); }
  static void store(float *p, F x) { vst1q_f32(p, x); }
  static F add(F a, F b) { return vaddq_f32(a, b); }
  static F sub(F a, F b) { return vsubq_f32(a, b); }
  static F mul(F a, F b) { return vmulq_f32(a, b); }
  static F div(F a, F b) { return vdivq_f32(a, b); }
  static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
  static F max(F a, F b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }  // b where one is NaN
  static F abs(F a) { return vabsq_f32(a); }
  static F lanes() {
    const float n[4] = {0, 1, 2, 3};
    return vld1q_f32(n);
  }
  static F less(F a, F b, F then, F otherwise) {  // then where a < b
    return vbslq_f32(vcltq_f32(a, b), then, otherwise);
  }
  // x where its bit is set, else `otherwise`.
  static F select(uint64_t bits, F x, F otherwise) {
    const uint32_t lane[4] = {1, 2, 4, 8};
    return vbslq_f32(vtstq_u32(vdupq_n_u32(uint32_t(bits)), vld1q_u32(lane)), x, otherwise);
  }
  static float hmax(F x) { return vmaxnmvq_f32(x); }
  static float hsum(F x) { return vaddvq_f32(x); }
  // The sums of four vectors; each is added up in the same order whatever the others are.
  static void hsum4(F a, F b, F c, F d, float *out) {
    vst1q_f32(out, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
  }

  // 2^x for x up to about 128; 0 below -126.5. `Degree` 5 is exact to 1e-7, 4 to 3e-6.
  template <int Degree>
  static F exp2(F x) {
    x = max(set1(-127.0f), x);
    F n = vrndnq_f32(x);
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
    int32x4_t e = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
    return mul(p, vreinterpretq_f32_s32(vshlq_n_s32(e, 23)));
  }

  // Rows to columns; in place.
  static void transpose(F *r) {
    float32x4x2_t a = vtrnq_f32(r[0], r[1]), b = vtrnq_f32(r[2], r[3]);
    r[0] = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
    r[1] = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
    r[2] = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
    r[3] = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
  }

  template <class E>
  static F get(const void *p);
  // The first n; the rest 0, and not read.
  template <class E>
  static F get_part(const void *p, int64_t n) {
    if (n >= W) return get<E>(p);
    alignas(16) char copy[W * 4] = {0};
    if (n > 0) __builtin_memcpy(copy, p, size_t(n) * E::bytes);
    return get<E>(copy);
  }
  template <class E>
  static void put(void *p, F x);

  static uint16x4_t halves(const void *p) {
    uint64_t four;
    __builtin_memcpy(&four, p, 8);
    return vcreate_u16(four);
  }
  static uint16x4_t codes(const void *p) {
    uint32_t four;
    __builtin_memcpy(&four, p, 4);
    return vget_low_u16(vmovl_u8(vcreate_u8(four)));
  }
  static void put_halves(void *p, uint16x4_t x) {
    uint64_t four = vget_lane_u64(vreinterpret_u64_u16(x), 0);
    __builtin_memcpy(p, &four, 8);
  }
};

template <>
inline float32x4_t V::get<F32>(const void *p) {
  return vld1q_f32(static_cast<const float *>(p));
}
template <>
inline float32x4_t V::get<BF16>(const void *p) {
  return vreinterpretq_f32_u32(vshll_n_u16(halves(p), 16));
}
template <>
inline float32x4_t V::get<F16>(const void *p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(halves(p)));
}
template <>
inline float32x4_t V::get<E4M3>(const void *p) {
  // Not by multiplying subnormal bit patterns: the caller may have denormals switched off.
  uint32x4_t x = vmovl_u16(codes(p));
  uint32x4_t size = vandq_u32(x, vdupq_n_u32(0x7f));
  uint32x4_t sign = vshlq_n_u32(veorq_u32(x, size), 24);
  uint32x4_t normal = vaddq_u32(vshlq_n_u32(size, 20), vdupq_n_u32(120 << 23));
  uint32x4_t small = vreinterpretq_u32_f32(mul(vcvtq_f32_u32(size), set1(1.0f / 512)));
  uint32x4_t value = vbslq_u32(vcltq_u32(size, vdupq_n_u32(8)), small, normal);
  value = vbslq_u32(vceqq_u32(size, vdupq_n_u32(0x7f)), vdupq_n_u32(0x7fc00000), value);
  return vreinterpretq_f32_u32(vorrq_u32(value, sign));
}
template <>
inline float32x4_t V::get<E5M2>(const void *p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vshl_n_u16(codes(p), 8)));
}
template <>
inline float32x4_t V::get<INT8>(const void *p) {
  int16x4_t x = vreinterpret_s16_u16(vshl_n_u16(codes(p), 8));
  return vcvtq_f32_s32(vmovl_s16(vshr_n_s16(x, 8)));
}
template <>
inline void V::put<F32>(void *p, float32x4_t x) {
  vst1q_f32(static_cast<float *>(p), x);
}
template <>
inline void V::put<BF16>(void *p, float32x4_t x) {
  uint32x4_t bits = vreinterpretq_u32_f32(x);
  uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  uint32x4_t up = vshrq_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
  up = vbslq_u32(vceqq_f32(x, x), up, vdupq_n_u32(0x7fc0));
  put_halves(p, vmovn_u32(up));
}
template <>
inline void V::put<F16>(void *p, float32x4_t x) {
  put_halves(p, vreinterpret_u16_f16(vcvt_f16_f32(x)));
}
