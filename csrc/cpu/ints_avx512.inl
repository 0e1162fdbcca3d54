// Sixteen int32. See dot_int8.inl.
namespace regatta::cpu::REGATTA_ISA {
namespace int8 {

struct Ints {
  __m512i v;
};
REGATTA_INLINE Ints set_ints(int32_t x) { return {_mm512_set1_epi32(x)}; }
REGATTA_INLINE Ints add(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
REGATTA_INLINE Vec to_vec(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
REGATTA_INLINE __m512i load_raw(const void* p) { return _mm512_loadu_si512(p); }
REGATTA_INLINE __m512i low_nibbles(__m512i x) {
  return _mm512_and_si512(x, _mm512_set1_epi8(0x0f));
}
REGATTA_INLINE __m512i high_nibbles(__m512i x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }

}  // namespace int8
}  // namespace regatta::cpu::REGATTA_ISA
