// Codes of quantized cache rows, sixteen lanes. See vec.h.
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
REGATTA_INLINE void load_even_odd(const float* p, Vec& even, Vec& odd) {
  const __m512 a = _mm512_loadu_ps(p), b = _mm512_loadu_ps(p + 16);
  const __m512i first =
      _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(1));
  even.v = _mm512_permutex2var_ps(a, first, b);
  odd.v = _mm512_permutex2var_ps(a, second, b);
}
REGATTA_INLINE void store_codes(uint8_t* p, Vec a, int bias, int n) {
  const __m512i codes = _mm512_add_epi32(_mm512_cvtps_epi32(a.v), _mm512_set1_epi32(bias));
  _mm512_mask_cvtepi32_storeu_epi8(p, lane_mask(n), codes);
}

}  // namespace regatta::cpu::REGATTA_ISA
