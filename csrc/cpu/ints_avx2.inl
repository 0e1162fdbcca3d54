// Eight int32. See dot_int8.inl.
namespace regatta::cpu::REGATTA_ISA {
namespace int8 {

struct Ints {
  __m256i v;
};
REGATTA_INLINE Ints set_ints(int32_t x) { return {_mm256_set1_epi32(x)}; }
REGATTA_INLINE Ints add(Ints a, Ints b) { return {_mm256_add_epi32(a.v, b.v)}; }
REGATTA_INLINE Vec to_vec(Ints a) { return {_mm256_cvtepi32_ps(a.v)}; }
REGATTA_INLINE __m256i load_raw(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
REGATTA_INLINE __m256i low_nibbles(__m256i x) {
  return _mm256_and_si256(x, _mm256_set1_epi8(0x0f));
}
REGATTA_INLINE __m256i high_nibbles(__m256i x) { return low_nibbles(_mm256_srli_epi16(x, 4)); }

}  // namespace int8
}  // namespace regatta::cpu::REGATTA_ISA
