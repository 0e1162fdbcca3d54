// Dot products of unsigned and signed bytes by USDOT. See dot_int8.inl.
#include "ints_neon.inl"

namespace regatta::cpu::REGATTA_ISA {
namespace int8 {

constexpr bool kSignedCodes = false;

struct Codes {
  uint8x16_t v;
};
struct Bytes {
  int8x16_t v;
};
REGATTA_INLINE Codes load_codes(const uint8_t* p) { return {vld1q_u8(p)}; }
REGATTA_INLINE void load_nibbles(const uint8_t* p, Codes& low, Codes& high) {
  const uint8x16_t both = vld1q_u8(p);
  low.v = vandq_u8(both, vdupq_n_u8(15));
  high.v = vshrq_n_u8(both, 4);
}
REGATTA_INLINE Bytes load_bytes(const int8_t* p) { return {repeat_four(p)}; }
REGATTA_INLINE Ints dot(Ints sum, Codes a, Bytes b) { return {vusdotq_s32(sum.v, a.v, b.v)}; }

}  // namespace int8
}  // namespace regatta::cpu::REGATTA_ISA
