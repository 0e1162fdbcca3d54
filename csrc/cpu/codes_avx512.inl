// Codes of quantized cache rows, sixteen lanes; with REGATTA_HAS_BF16_DOT also pairs. See vec.h.
namespace regatta::cpu::REGATTA_ISA {

REGATTA_INLINE __m128i load_bytes(const uint8_t* p, int n) {
  return n == 16 ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))
                 : _mm_maskz_loadu_epi8(lane_mask(n), p);
}
REGATTA_INLINE Vec load_codes8(const uint8_t* row, int64_t i, int n) {
  const __m512i codes = _mm512_cvtepu8_epi32(load_bytes(row + i, n));
  return {_mm512_cvtepi32_ps(_mm512_sub_epi32(codes, _mm512_set1_epi32(128)))};
}
REGATTA_INLINE Vec load_codes4(const uint8_t* row, int64_t i, int n) {
  const __m128i bytes = _mm_maskz_loadu_epi8(lane_mask((n + 1) / 2), row + i / 2);
  const __m512i words = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(bytes, _mm_srli_epi16(bytes, 4)));
  // The index's low four bits count.
  const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm512_permutexvar_ps(words, table)};
}
REGATTA_INLINE Vec load_e4m3(const uint8_t* row, int64_t i, int n) {
  // The sign reaches bit 15, and bit 14, which the exponent does not need.
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_bytes(row + i, n)), 7);
  return {_mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16(static_cast<short>(0xbf80))))};
}
REGATTA_INLINE void store_codes(uint8_t* p, Vec a, int bias, int n) {
  const __m512i codes = _mm512_add_epi32(_mm512_cvtps_epi32(a.v), _mm512_set1_epi32(bias));
  _mm512_mask_cvtepi32_storeu_epi8(p, lane_mask(n), codes);
}

#if REGATTA_HAS_BF16_DOT
// 2 n bytes, the rest 0.
REGATTA_INLINE __m256i load_byte_pairs(const uint8_t* p, int n) {
  return n == 16 ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))
                 : _mm256_maskz_loadu_epi16(lane_mask(n), p);
}
REGATTA_INLINE VecBf16 pairs_of(__m512 low, __m512 high) {
  return {_mm512_cvtne2ps_pbh(high, low)};
}
REGATTA_INLINE VecBf16 load_pairs_codes8(const uint8_t* row, int64_t unit, int n) {
  const __m256i bytes = load_byte_pairs(row + 2 * unit, n);
  const __m512i bias = _mm512_set1_epi32(128);
  const __m512i low = _mm512_cvtepu8_epi32(_mm256_castsi256_si128(bytes));
  const __m512i high = _mm512_cvtepu8_epi32(_mm256_extracti128_si256(bytes, 1));
  return pairs_of(_mm512_cvtepi32_ps(_mm512_sub_epi32(low, bias)),
                  _mm512_cvtepi32_ps(_mm512_sub_epi32(high, bias)));
}
REGATTA_INLINE VecBf16 load_pairs_codes4(const uint8_t* row, int64_t unit, int n) {
  // bf16 of -8 .. 7, twice: the index's bit 4 does not count.
  constexpr short kTable[32] = {
      short(0xc100), short(0xc0e0), short(0xc0c0), short(0xc0a0), short(0xc080), short(0xc040),
      short(0xc000), short(0xbf80), 0x0000,        0x3f80,        0x4000,        0x4040,
      0x4080,        0x40a0,        0x40c0,        0x40e0,        short(0xc100), short(0xc0e0),
      short(0xc0c0), short(0xc0a0), short(0xc080), short(0xc040), short(0xc000), short(0xbf80),
      0x0000,        0x3f80,        0x4000,        0x4040,        0x4080,        0x40a0,
      0x40c0,        0x40e0};
  const __m512i bytes = _mm512_cvtepu8_epi32(load_bytes(row + unit, n));
  // Low word: the byte, of which bits 0 to 3 count. High word: its bits 4 to 7.
  const __m512i index = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
  return {(__m512bh)_mm512_permutexvar_epi16(index, _mm512_loadu_si512(kTable))};
}
REGATTA_INLINE VecBf16 load_pairs_e4m3(const uint8_t* row, int64_t unit, int n) {
  const __m512i wide =
      _mm512_slli_epi16(_mm512_cvtepi8_epi16(load_byte_pairs(row + 2 * unit, n)), 7);
  const __m512i halves = _mm512_and_si512(wide, _mm512_set1_epi16(static_cast<short>(0xbf80)));
  return pairs_of(_mm512_cvtph_ps(_mm512_castsi512_si256(halves)),
                  _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)));
}
// Words of a and b by turns, as interleave() has them: a0 b0 a1 b1 ..., 32 words in each half.
REGATTA_INLINE void store_interleaved(bf16* out, VecBf16 a, VecBf16 b, bool both) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                       39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i x = (__m512i)a.v, y = (__m512i)b.v;
  _mm512_storeu_si512(out, _mm512_permutex2var_epi16(x, low, y));
  if (!both) return;
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  _mm512_storeu_si512(out + 32, _mm512_permutex2var_epi16(x, high, y));
}
#endif

}  // namespace regatta::cpu::REGATTA_ISA
