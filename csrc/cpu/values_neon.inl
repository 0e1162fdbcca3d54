// Codes of weights as floats or as pairs of bf16, four lanes. See gemm_codes.inl.
namespace regatta::cpu::REGATTA_ISA {
namespace codes {

using Raw = uint32x4_t;
REGATTA_INLINE Raw load_raw(const uint8_t* p) { return vreinterpretq_u32_u8(vld1q_u8(p)); }

// `bit` is known once loops are unrolled: an operator, which becomes a shift by a constant then.
REGATTA_INLINE Raw shifted(Raw raw, int bit) { return raw >> static_cast<uint32_t>(bit); }

template <CodeKind kKind, bool kZeros>
REGATTA_INLINE Vec value(Raw raw, int bit) {
  constexpr int kBits = bits_of(kKind);
  const uint32x4_t code = vandq_u32(shifted(raw, bit), vdupq_n_u32((1u << kBits) - 1));
  if constexpr (kKind == CodeKind::kE2m1) {
    // A float's two upper bytes are all of it: a table of each.
    const uint8x16_t high = {0x00, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40,
                             0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0};
    const uint8x16_t low = {0x00, 0x00, 0x80, 0xc0, 0x00, 0x40, 0x80, 0xc0,
                            0x00, 0x00, 0x80, 0xc0, 0x00, 0x40, 0x80, 0xc0};
    // Bytes 1 .. 3 of a lane are 0, and the tables' entry 0 is 0 too.
    const uint8x16_t index = vreinterpretq_u8_u32(code);
    const uint32x4_t upper = vreinterpretq_u32_u8(vqtbl1q_u8(high, index));
    const uint32x4_t lower = vreinterpretq_u32_u8(vqtbl1q_u8(low, index));
    return {vreinterpretq_f32_u32(vorrq_u32(vshlq_n_u32(upper, 24), vshlq_n_u32(lower, 16)))};
  } else {
    const int32x4_t middle = vdupq_n_s32(kZeros ? 0 : 1 << (kBits - 1));
    return {vcvtq_f32_s32(vsubq_s32(vreinterpretq_s32_u32(code), middle))};
  }
}

#if REGATTA_HAS_BF16_DOT
// bf16 of the sixteen codes: low bytes, then high bytes.
template <CodeKind kKind, bool kZeros>
REGATTA_INLINE uint8x16x2_t bf16_bytes() {
  static constexpr uint8_t kTables[3][32] = {
      {0x00, 0x00, 0x80, 0xc0, 0x00, 0x40, 0x80, 0xc0, 0x00, 0x00, 0x80,
       0xc0, 0x00, 0x40, 0x80, 0xc0, 0x00, 0x3f, 0x3f, 0x3f, 0x40, 0x40,
       0x40, 0x40, 0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0},  // e2m1
      {0x00, 0xe0, 0xc0, 0xa0, 0x80, 0x40, 0x00, 0x80, 0x00, 0x80, 0x00,
       0x40, 0x80, 0xa0, 0xc0, 0xe0, 0xc1, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0,
       0xc0, 0xbf, 0x00, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40},  // -8 .. 7
      {0x00, 0x80, 0x00, 0x40, 0x80, 0xa0, 0xc0, 0xe0, 0x00, 0x10, 0x20,
       0x30, 0x40, 0x50, 0x60, 0x70, 0x00, 0x3f, 0x40, 0x40, 0x40, 0x40,
       0x40, 0x40, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41}};  // 0 .. 15
  const uint8_t* bytes = kTables[kKind == CodeKind::kE2m1 ? 0 : kZeros ? 2 : 1];
  return {{vld1q_u8(bytes), vld1q_u8(bytes + 16)}};
}

// Values 2 * unit and 2 * unit + 1 of a step.
template <CodeKind kKind, bool kZeros>
REGATTA_INLINE VecBf16 pair_of(Raw raw, int unit) {
  if constexpr (kKind == CodeKind::kInt8) {
    // bf16 holds these numbers: a float's upper half is all of it.
    const int bit = first_bit<kKind>(2 * unit);
    const uint32x4_t even = vreinterpretq_u32_f32(value<kKind, kZeros>(raw, bit).v);
    const uint32x4_t odd = vreinterpretq_u32_f32(value<kKind, kZeros>(raw, bit + 8).v);
    return {vreinterpretq_bf16_u32(vsriq_n_u32(odd, even, 16))};
  } else {
    // Nibbles of the pair into bytes 0 and 2 of each lane, and again, 16 more, into bytes 1 and 3.
    int bit = 4 * unit;
    if constexpr (kKind == CodeKind::kInt4) {  // a pair lies 8 bits apart: 16, as of e2m1
      const uint8x16_t order = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15};
      raw = vreinterpretq_u32_u8(vqtbl1q_u8(vreinterpretq_u8_u32(raw), order));
      bit = unit % 2 * 8 + unit / 2 * 4;
    }
    const uint16x8_t nibbles =
        vreinterpretq_u16_u32(vandq_u32(shifted(raw, bit), vdupq_n_u32(0x000f000f)));
    const uint16x8_t index = vorrq_u16(vsliq_n_u16(nibbles, nibbles, 8), vdupq_n_u16(0x1000));
    return {vreinterpretq_bf16_u8(
        vqtbl2q_u8(bf16_bytes<kKind, kZeros>(), vreinterpretq_u8_u16(index)))};
  }
}
#endif

}  // namespace codes
}  // namespace regatta::cpu::REGATTA_ISA
