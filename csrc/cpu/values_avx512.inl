// Codes of weights as floats or as pairs of bf16, sixteen lanes. See gemm_codes.inl.
namespace regatta::cpu::REGATTA_ISA {
namespace codes {

using Raw = __m512i;
REGATTA_INLINE Raw load_raw(const uint8_t* p) { return _mm512_loadu_si512(p); }
template <CodeKind kKind, bool kZeros>
REGATTA_INLINE Vec value(Raw raw, int bit) {
  if constexpr (kKind == CodeKind::kInt8) {
    // The byte as low bits of 2^23 or, 8 bits on, of 2^15: the sum of both, as a float.
    const __m512i low = bit < 16 ? raw : _mm512_srli_epi32(raw, 16);
    const bool second = bit % 16 != 0;
    const int offset = second ? 0x47000000 : 0x4b000000, mask = second ? 0xff00 : 0xff;
    const __m512i sum = _mm512_ternarylogic_epi32(low, _mm512_set1_epi32(mask),
                                                  _mm512_set1_epi32(offset), 0xea);  // a & b | c
    const float middle = (second ? 0x1p15f : 0x1p23f) + (kZeros ? 0.0f : 128.0f);
    return {_mm512_sub_ps(_mm512_castsi512_ps(sum), _mm512_set1_ps(middle))};
  } else {
    constexpr float kLow = kZeros ? 0.0f : -8.0f;
    const __m512 table =
        kKind == CodeKind::kE2m1
            ? _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f,
                             -1.5f, -2.0f, -3.0f, -4.0f, -6.0f)
            : _mm512_setr_ps(kLow, kLow + 1, kLow + 2, kLow + 3, kLow + 4, kLow + 5, kLow + 6,
                             kLow + 7, kLow + 8, kLow + 9, kLow + 10, kLow + 11, kLow + 12,
                             kLow + 13, kLow + 14, kLow + 15);
    const __m512i shifted = _mm512_srli_epi32(raw, static_cast<unsigned>(bit));
    return {_mm512_permutexvar_ps(shifted, table)};  // the index's low four bits count
  }
}

#if REGATTA_HAS_BF16_DOT
// Values 2 * unit and 2 * unit + 1 of a step.
template <CodeKind kKind, bool kZeros>
REGATTA_INLINE VecBf16 pair_of(Raw raw, int unit) {
  if constexpr (kKind == CodeKind::kInt8) {
    const int bit = first_bit<kKind>(2 * unit);
    const __m512i even = _mm512_castps_si512(value<kKind, kZeros>(raw, bit).v);
    const __m512i odd = _mm512_castps_si512(value<kKind, kZeros>(raw, bit + 8).v);
    return {(__m512bh)_mm512_mask_mov_epi16(_mm512_srli_epi32(even, 16), 0xaaaaaaaau, odd)};
  } else {
    // bf16 of the values, twice, so that bit 4 of an index does not count.
    alignas(32) static constexpr uint16_t kTables[3][16] = {
        {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80,
         0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0},
        {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000,
         0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0},
        {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
         0x4130, 0x4140, 0x4150, 0x4160, 0x4170}};
    const __m512i table = _mm512_broadcast_i64x4(
        _mm256_load_si256(reinterpret_cast<const __m256i*>(kTables[kKind == CodeKind::kE2m1 ? 0
                                                                   : kZeros                 ? 2
                                                                                            : 1])));
    unsigned bit = static_cast<unsigned>(4 * unit);
    if constexpr (kKind == CodeKind::kInt4) {  // a pair lies 8 bits apart: 16, as of e2m1
      raw = _mm512_shuffle_epi8(raw, _mm512_broadcast_i32x4(_mm_setr_epi8(
                                         0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15)));
      bit = static_cast<unsigned>(unit % 2 * 8 + unit / 2 * 4);
    }
    return {(__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi32(raw, bit), table)};
  }
}
#endif

}  // namespace codes
}  // namespace regatta::cpu::REGATTA_ISA
