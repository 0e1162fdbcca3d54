// Vec of four lanes, of NEON; with REGATTA_HAS_BF16_DOT also BFDOT and the bf16 conversion. See
// vec.h.
namespace regatta::cpu::REGATTA_ISA {

struct Vec {
  static constexpr int kLanes = 4;
  float32x4_t v;
};

REGATTA_INLINE Vec zero() { return {vdupq_n_f32(0.0f)}; }
REGATTA_INLINE Vec set1(float x) { return {vdupq_n_f32(x)}; }

// Lanes below n.
REGATTA_INLINE uint32x4_t lane_mask(int n) {
  return vcgtq_s32(vdupq_n_s32(n), int32x4_t{0, 1, 2, 3});
}
REGATTA_INLINE float32x4_t widen_bf16(uint16x4_t bits) {
  return vreinterpretq_f32_u32(vshll_n_u16(bits, 16));
}
// Rounded to nearest even; a NaN stays one.
REGATTA_INLINE uint16x4_t narrow_bf16(float32x4_t x) {
#if REGATTA_HAS_BF16_DOT
  return vreinterpret_u16_bf16(vcvt_bf16_f32(x));
#else
  const uint32x4_t bits = vreinterpretq_u32_f32(x);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet), 16);
#endif
}

REGATTA_INLINE Vec load(const float* p) { return {vld1q_f32(p)}; }
REGATTA_INLINE Vec load(const bf16* p) {
  return {widen_bf16(vld1_u16(reinterpret_cast<const uint16_t*>(p)))};
}
REGATTA_INLINE Vec load(const fp16* p) {
  const uint16x4_t bits = vld1_u16(reinterpret_cast<const uint16_t*>(p));
  return {vcvt_f32_f16(vreinterpret_f16_u16(bits))};
}
template <class T>
REGATTA_INLINE Vec load_n(const T* p, int n) {
  if (n == 4) return load(p);
  T buffer[4] = {};
  for (int i = 0; i < n; ++i) buffer[i] = p[i];
  return load(buffer);
}

REGATTA_INLINE void store(float* p, Vec a) { vst1q_f32(p, a.v); }
REGATTA_INLINE void store(bf16* p, Vec a) {
  vst1_u16(reinterpret_cast<uint16_t*>(p), narrow_bf16(a.v));
}
REGATTA_INLINE void store(fp16* p, Vec a) {
  vst1_u16(reinterpret_cast<uint16_t*>(p), vreinterpret_u16_f16(vcvt_f16_f32(a.v)));
}
template <class T>
REGATTA_INLINE void store_n(T* p, Vec a, int n) {
  if (n == 4) return store(p, a);
  T buffer[4];
  store(buffer, a);
  for (int i = 0; i < n; ++i) p[i] = buffer[i];
}
REGATTA_INLINE void load_2k(const bf16* p, Vec& even, Vec& odd) {
  const uint32x4_t bits = vreinterpretq_u32_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(p)));
  even.v = vreinterpretq_f32_u32(vshlq_n_u32(bits, 16));
  odd.v = vreinterpretq_f32_u32(vandq_u32(bits, vdupq_n_u32(0xffff0000u)));
}

REGATTA_INLINE Vec operator+(Vec a, Vec b) { return {vaddq_f32(a.v, b.v)}; }
REGATTA_INLINE Vec operator-(Vec a, Vec b) { return {vsubq_f32(a.v, b.v)}; }
REGATTA_INLINE Vec operator*(Vec a, Vec b) { return {vmulq_f32(a.v, b.v)}; }
REGATTA_INLINE Vec operator/(Vec a, Vec b) { return {vdivq_f32(a.v, b.v)}; }
// Not FMAX and FMIN: they give a NaN where either is one, the other sets give b.
REGATTA_INLINE Vec max(Vec a, Vec b) { return {vbslq_f32(vcgtq_f32(a.v, b.v), a.v, b.v)}; }
REGATTA_INLINE Vec min(Vec a, Vec b) { return {vbslq_f32(vcltq_f32(a.v, b.v), a.v, b.v)}; }
REGATTA_INLINE Vec fma(Vec a, Vec b, Vec c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
REGATTA_INLINE Vec fnma(Vec a, Vec b, Vec c) { return {vfmsq_f32(c.v, a.v, b.v)}; }
REGATTA_INLINE Vec sqrt(Vec a) { return {vsqrtq_f32(a.v)}; }

// 2^whole, which one exponent field holds.
REGATTA_INLINE float32x4_t power_of_two(int32x4_t whole) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(whole, vdupq_n_s32(127)), 23));
}
// 0 where x < bound; a NaN of x in place of `result`.
REGATTA_INLINE float32x4_t zero_below(float32x4_t x, float bound, float32x4_t result) {
  const uint32x4_t below = vcltq_f32(x, vdupq_n_f32(bound));
  const float32x4_t kept = vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(result), below));
  return vbslq_f32(vceqq_f32(x, x), kept, x);
}
// As in vec_avx2.inl.
REGATTA_INLINE Vec exp(Vec a) {
  const Vec x = min(set1(89.0f), max(set1(-88.0f), a));
  const float32x4_t n = vrndnq_f32(vmulq_f32(x.v, vdupq_n_f32(1.44269504f)));
  float32x4_t r = vfmsq_f32(x.v, n, vdupq_n_f32(0.693359375f));
  r = vfmsq_f32(r, n, vdupq_n_f32(-2.12194440e-4f));
  float32x4_t p = vdupq_n_f32(1.0f / 5040.0f);
  p = vfmaq_f32(vdupq_n_f32(1.0f / 720.0f), p, r);
  p = vfmaq_f32(vdupq_n_f32(1.0f / 120.0f), p, r);
  p = vfmaq_f32(vdupq_n_f32(1.0f / 24.0f), p, r);
  p = vfmaq_f32(vdupq_n_f32(1.0f / 6.0f), p, r);
  p = vfmaq_f32(vdupq_n_f32(0.5f), p, r);
  p = vfmaq_f32(vdupq_n_f32(1.0f), p, r);
  p = vfmaq_f32(vdupq_n_f32(1.0f), p, r);
  // 2^n as two factors: n reaches 128, which one exponent field cannot hold.
  const int32x4_t whole = vcvtq_s32_f32(n), half = vshrq_n_s32(whole, 1);
  p = vmulq_f32(vmulq_f32(p, power_of_two(half)), power_of_two(vsubq_s32(whole, half)));
  return {zero_below(a.v, -87.33654f, p)};
}
REGATTA_INLINE Vec sigmoid(Vec a) {
  const Vec one = set1(1.0f);
  return one / (one + exp(zero() - a));
}
REGATTA_INLINE Vec silu(Vec a) { return a * sigmoid(a); }

REGATTA_INLINE float reduce_add(Vec a) { return vaddvq_f32(a.v); }
REGATTA_INLINE float reduce_max(Vec a) {
  const Vec b = max(a, {vextq_f32(a.v, a.v, 2)});
  return vgetq_lane_f32(max(b, {vextq_f32(b.v, b.v, 1)}).v, 0);
}
REGATTA_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
REGATTA_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

REGATTA_INLINE float32x4_t halves(float64x2_t x) { return vreinterpretq_f32_f64(x); }
// 4 x 4 in place.
REGATTA_INLINE void transpose(Vec* rows) {
  const float64x2_t a = vreinterpretq_f64_f32(vtrn1q_f32(rows[0].v, rows[1].v));
  const float64x2_t b = vreinterpretq_f64_f32(vtrn2q_f32(rows[0].v, rows[1].v));
  const float64x2_t c = vreinterpretq_f64_f32(vtrn1q_f32(rows[2].v, rows[3].v));
  const float64x2_t d = vreinterpretq_f64_f32(vtrn2q_f32(rows[2].v, rows[3].v));
  rows[0].v = halves(vtrn1q_f64(a, c));
  rows[1].v = halves(vtrn1q_f64(b, d));
  rows[2].v = halves(vtrn2q_f64(a, c));
  rows[3].v = halves(vtrn2q_f64(b, d));
}
// As in vec_avx512.inl; 2^n through the exponent field. Far below, conversion gives the least
// integer, and what comes of it is dropped.
REGATTA_INLINE Vec exp2_below0(Vec a) {
  const float32x4_t n = vrndnq_f32(a.v), r = vsubq_f32(a.v, n);
  float32x4_t p = vdupq_n_f32(1.53458022e-4f);
  p = vfmaq_f32(vdupq_n_f32(1.33999309e-3f), p, r);
  p = vfmaq_f32(vdupq_n_f32(9.61848907e-3f), p, r);
  p = vfmaq_f32(vdupq_n_f32(5.55032864e-2f), p, r);
  p = vfmaq_f32(vdupq_n_f32(0.240226462f), p, r);
  p = vfmaq_f32(vdupq_n_f32(0.693147182f), p, r);
  p = vfmaq_f32(vdupq_n_f32(1.0f), p, r);
  return {zero_below(a.v, -126.0f, vmulq_f32(p, power_of_two(vcvtq_s32_f32(n))))};
}
REGATTA_INLINE Vec keep_lanes(Vec a, int begin, int end, Vec other) {
  return {vbslq_f32(vbicq_u32(lane_mask(end), lane_mask(begin)), a.v, other.v)};
}
REGATTA_INLINE uint32_t ge_mask(Vec a, Vec b) {
  return vaddvq_u32(vandq_u32(vcgeq_f32(a.v, b.v), uint32x4_t{1, 2, 4, 8}));
}
REGATTA_INLINE Vec where_ge(Vec a, Vec b, Vec x) {
  return {vreinterpretq_f32_u32(vandq_u32(vcgeq_f32(a.v, b.v), vreinterpretq_u32_f32(x.v)))};
}
// Magnitudes compare as integers, and a NaN's bits are above those of infinity.
REGATTA_INLINE Vec max_magnitude(Vec m, Vec a) {
  const int32x4_t bits = vreinterpretq_s32_f32(vabsq_f32(a.v));
  return {vreinterpretq_f32_s32(vmaxq_s32(vreinterpretq_s32_f32(m.v), bits))};
}
REGATTA_INLINE float reduce_magnitude(Vec m) {
  const int32_t bits = vmaxvq_s32(vreinterpretq_s32_f32(m.v));
  float result;
  __builtin_memcpy(&result, &bits, 4);
  return result;
}
REGATTA_INLINE int32_t store_int8(const Vec* a, int8_t* p) {
  int16x8_t words[4];
  for (int i = 0; i < 4; ++i) {
    int32x4_t whole[2];
    for (int v = 0; v < 2; ++v) {
      whole[v] = vcvtnq_s32_f32(min(max(a[2 * i + v], set1(-127.0f)), set1(127.0f)).v);
    }
    words[i] = vcombine_s16(vmovn_s32(whole[0]), vmovn_s32(whole[1]));
  }
  for (int i = 0; i < 2; ++i) {
    vst1q_s8(p + 16 * i, vcombine_s8(vmovn_s16(words[2 * i]), vmovn_s16(words[2 * i + 1])));
  }
  const int16x8_t sums = vaddq_s16(vaddq_s16(words[0], words[1]), vaddq_s16(words[2], words[3]));
  return vaddlvq_s16(sums);
}

#if REGATTA_HAS_BF16_DOT
struct VecBf16 {
  bfloat16x8_t v;
};
REGATTA_INLINE VecBf16 load_pairs(const bf16* p) {
  return {vreinterpretq_bf16_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(p)))};
}
REGATTA_INLINE VecBf16 set1_pair(const bf16* p) {
  uint32_t pair;
  __builtin_memcpy(&pair, p, 4);
  return {vreinterpretq_bf16_u32(vdupq_n_u32(pair))};
}
REGATTA_INLINE Vec dot_pairs(Vec acc, VecBf16 a, VecBf16 b) {
  return {vbfdotq_f32(acc.v, a.v, b.v)};
}
REGATTA_INLINE Vec round_bf16(Vec a) { return {widen_bf16(narrow_bf16(a.v))}; }
REGATTA_INLINE Vec join_pairs(Vec low, Vec high) {
  return {vreinterpretq_f32_u16(vcombine_u16(narrow_bf16(low.v), narrow_bf16(high.v)))};
}
REGATTA_INLINE Vec zip_pairs(Vec a, Vec b) {
  const uint16x4_t x = narrow_bf16(a.v), y = narrow_bf16(b.v);
  return {vreinterpretq_f32_u16(vcombine_u16(vzip1_u16(x, y), vzip2_u16(x, y)))};
}
REGATTA_INLINE void interleave(bf16* out, const bf16* a, const bf16* b, int64_t count) {
  auto* to = reinterpret_cast<uint16_t*>(out);
  for (int64_t i = 0; i < count; i += 4) {
    uint16_t x[4] = {}, y[4] = {};
    const int64_t n = count - i < 4 ? count - i : 4;
    __builtin_memcpy(x, a + i, static_cast<size_t>(2 * n));
    __builtin_memcpy(y, b + i, static_cast<size_t>(2 * n));
    vst1_u16(to + 2 * i, vzip1_u16(vld1_u16(x), vld1_u16(y)));
    vst1_u16(to + 2 * i + 4, vzip2_u16(vld1_u16(x), vld1_u16(y)));
  }
}
#endif

}  // namespace regatta::cpu::REGATTA_ISA
