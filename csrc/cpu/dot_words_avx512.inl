#include "ints_avx512.inl"

// Bytes as 16-bit numbers, on AVX-512. See dot_int8.inl.
namespace regatta::cpu::REGATTA_ISA {
namespace int8 {

using Raw = __m512i;
REGATTA_INLINE Raw even_codes(Raw x) { return _mm512_and_si512(x, _mm512_set1_epi16(0xff)); }
REGATTA_INLINE Raw odd_codes(Raw x) { return _mm512_srli_epi16(x, 8); }
REGATTA_INLINE Raw odd_bytes(Raw x) { return _mm512_srai_epi16(x, 8); }
REGATTA_INLINE Raw even_bytes(Raw x) { return odd_bytes(_mm512_slli_epi16(x, 8)); }
REGATTA_INLINE Raw multiply_words(Raw a, Raw b) { return _mm512_madd_epi16(a, b); }

}  // namespace int8
}  // namespace regatta::cpu::REGATTA_ISA

#include "dot_words.inl"
