// Codes of quantized cache rows, eight lanes. See vec.h.
namespace regatta::cpu::REGATTA_ISA {

// n bytes, the rest 0.
REGATTA_INLINE __m128i load_bytes(const uint8_t* p, int n) {
  if (n == 8) return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  uint64_t bytes = 0;
  __builtin_memcpy(&bytes, p, static_cast<size_t>(n));
  return _mm_cvtsi64_si128(static_cast<long long>(bytes));
}
REGATTA_INLINE Vec load_codes8(const uint8_t* row, int64_t i, int n) {
  const __m256i codes = _mm256_cvtepu8_epi32(load_bytes(row + i, n));
  return {_mm256_cvtepi32_ps(_mm256_sub_epi32(codes, _mm256_set1_epi32(128)))};
}
REGATTA_INLINE Vec load_codes4(const uint8_t* row, int64_t i, int n) {
  uint32_t bytes = 0;
  if (n == 8) {
    __builtin_memcpy(&bytes, row + i / 2, 4);
  } else {
    __builtin_memcpy(&bytes, row + i / 2, static_cast<size_t>((n + 1) / 2));
  }
  const __m256i codes = _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(bytes)),
                                          _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
  const __m256i values =
      _mm256_sub_epi32(_mm256_and_si256(codes, _mm256_set1_epi32(15)), _mm256_set1_epi32(8));
  return {_mm256_cvtepi32_ps(values)};
}
REGATTA_INLINE Vec load_e4m3(const uint8_t* row, int64_t i, int n) {
  // The sign reaches bit 15, and bit 14, which the exponent does not need.
  const __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(load_bytes(row + i, n)), 7);
  return {_mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16(static_cast<short>(0xbf80))))};
}
REGATTA_INLINE void load_even_odd(const float* p, Vec& even, Vec& odd) {
  const __m256 a = _mm256_loadu_ps(p), b = _mm256_loadu_ps(p + 8);
  const __m256 low = _mm256_permute2f128_ps(a, b, 0x20), high = _mm256_permute2f128_ps(a, b, 0x31);
  even.v = _mm256_shuffle_ps(low, high, 0x88);
  odd.v = _mm256_shuffle_ps(low, high, 0xdd);
}
REGATTA_INLINE void store_codes(uint8_t* p, Vec a, int bias, int n) {
  const __m256i codes = _mm256_add_epi32(_mm256_cvtps_epi32(a.v), _mm256_set1_epi32(bias));
  const __m128i words =
      _mm_packus_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
  const long long bytes = _mm_cvtsi128_si64(_mm_packus_epi16(words, words));
  __builtin_memcpy(p, &bytes, static_cast<size_t>(n));
}

}  // namespace regatta::cpu::REGATTA_ISA
