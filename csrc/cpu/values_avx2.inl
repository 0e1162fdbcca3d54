// Codes of weights as floats, eight lanes. See gemm_codes.inl.
namespace regatta::cpu::REGATTA_ISA {
namespace codes {

using Raw = __m256i;
REGATTA_INLINE Raw load_raw(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
template <CodeKind kKind, bool kZeros>
REGATTA_INLINE Vec value(Raw raw, int bit) {
  if constexpr (kKind == CodeKind::kE2m1) {
    // The index's low three bits count; the fourth is the sign.
    const __m256 magnitudes = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    const __m256 magnitude = _mm256_permutevar8x32_ps(magnitudes, _mm256_srli_epi32(raw, bit));
    const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(raw, 28 - bit),
                                          _mm256_set1_epi32(static_cast<int>(0x80000000u)));
    return {_mm256_or_ps(magnitude, _mm256_castsi256_ps(sign))};
  } else {
    constexpr int kBits = bits_of(kKind);
    const __m256i code =
        _mm256_and_si256(_mm256_srli_epi32(raw, bit), _mm256_set1_epi32((1 << kBits) - 1));
    const __m256i middle = _mm256_set1_epi32(kZeros ? 0 : 1 << (kBits - 1));
    return {_mm256_cvtepi32_ps(_mm256_sub_epi32(code, middle))};
  }
}

}  // namespace codes
}  // namespace regatta::cpu::REGATTA_ISA
