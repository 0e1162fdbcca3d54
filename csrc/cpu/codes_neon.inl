// Codes of quantized cache rows, four lanes. See vec.h.
namespace regatta::cpu::REGATTA_ISA {

// n bytes as 16-bit numbers' source, the rest 0.
REGATTA_INLINE uint8x8_t load_bytes(const uint8_t* p, int n) {
  uint32_t bytes = 0;
  if (n == 4) {
    __builtin_memcpy(&bytes, p, 4);
  } else {
    __builtin_memcpy(&bytes, p, static_cast<size_t>(n));
  }
  return vcreate_u8(bytes);
}
REGATTA_INLINE Vec load_codes8(const uint8_t* row, int64_t i, int n) {
  const uint16x8_t words = vsubl_u8(load_bytes(row + i, n), vdup_n_u8(128));
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(vreinterpretq_s16_u16(words))))};
}
REGATTA_INLINE Vec load_codes4(const uint8_t* row, int64_t i, int n) {
  uint16_t bytes = 0;
  if (n == 4) {
    __builtin_memcpy(&bytes, row + i / 2, 2);
  } else {
    __builtin_memcpy(&bytes, row + i / 2, static_cast<size_t>((n + 1) / 2));
  }
  const uint32x4_t codes = vshlq_u32(vdupq_n_u32(bytes), int32x4_t{0, -4, -8, -12});
  const int32x4_t values = vreinterpretq_s32_u32(vandq_u32(codes, vdupq_n_u32(15)));
  return {vcvtq_f32_s32(vsubq_s32(values, vdupq_n_s32(8)))};
}
REGATTA_INLINE Vec load_e4m3(const uint8_t* row, int64_t i, int n) {
  // The sign reaches bit 15, and bit 14, which the exponent does not need.
  const int16x8_t wide = vshll_n_s8(vreinterpret_s8_u8(load_bytes(row + i, n)), 7);
  const uint16x4_t half = vand_u16(vreinterpret_u16_s16(vget_low_s16(wide)), vdup_n_u16(0xbf80));
  return {vcvt_f32_f16(vreinterpret_f16_u16(half))};
}
REGATTA_INLINE void load_even_odd(const float* p, Vec& even, Vec& odd) {
  const float32x4_t a = vld1q_f32(p), b = vld1q_f32(p + 4);
  even.v = vuzp1q_f32(a, b);
  odd.v = vuzp2q_f32(a, b);
}
REGATTA_INLINE void store_codes(uint8_t* p, Vec a, int bias, int n) {
  const int32x4_t codes = vaddq_s32(vcvtnq_s32_f32(a.v), vdupq_n_s32(bias));
  const uint16x4_t words = vqmovun_s32(codes);
  const uint64_t bytes =
      vget_lane_u64(vreinterpret_u64_u8(vqmovn_u16(vcombine_u16(words, words))), 0);
  __builtin_memcpy(p, &bytes, static_cast<size_t>(n));
}

}  // namespace regatta::cpu::REGATTA_ISA
