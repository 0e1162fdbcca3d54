#include "ints_avx512.inl"

// Dot products of bytes by vpdpbusd. See dot_int8.inl.
namespace regatta::cpu::REGATTA_ISA {
namespace int8 {

constexpr bool kSignedCodes = false;

struct Codes {
  __m512i v;
};
struct Bytes {
  __m512i v;
};
REGATTA_INLINE Codes load_codes(const uint8_t* p) { return {load_raw(p)}; }
REGATTA_INLINE void load_nibbles(const uint8_t* p, Codes& low, Codes& high) {
  const __m512i both = load_raw(p);
  low.v = low_nibbles(both);
  high.v = high_nibbles(both);
}
REGATTA_INLINE Bytes load_bytes(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return {_mm512_set1_epi32(four)};
}
REGATTA_INLINE Ints dot(Ints sum, Codes a, Bytes b) {
  // Not _mm512_dpbusd_epi32: GCC 12 copies the sum before each, and spills what has no register
  // then (12 rows: 1,000 instead of 1,700 GOP/s).
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(a.v), "v"(b.v));
  return sum;
}

}  // namespace int8
}  // namespace regatta::cpu::REGATTA_ISA
