#include "ints_avx2.inl"

// Bytes as 16-bit numbers, on AVX2. See dot_int8.inl.
namespace regatta::cpu::REGATTA_ISA {
namespace int8 {

using Raw = __m256i;
REGATTA_INLINE Raw even_codes(Raw x) { return _mm256_and_si256(x, _mm256_set1_epi16(0xff)); }
REGATTA_INLINE Raw odd_codes(Raw x) { return _mm256_srli_epi16(x, 8); }
REGATTA_INLINE Raw odd_bytes(Raw x) { return _mm256_srai_epi16(x, 8); }
REGATTA_INLINE Raw even_bytes(Raw x) { return odd_bytes(_mm256_slli_epi16(x, 8)); }
REGATTA_INLINE Raw multiply_words(Raw a, Raw b) { return _mm256_madd_epi16(a, b); }

}  // namespace int8
}  // namespace regatta::cpu::REGATTA_ISA

#include "dot_words.inl"
