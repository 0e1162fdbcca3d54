// Codes that are made signed, for instructions that multiply signed bytes alone: of 8 bits less
// 128; of 4 bits as they are. See dot_int8.inl.
#include "ints_neon.inl"

namespace regatta::cpu::REGATTA_ISA {
namespace int8 {

constexpr bool kSignedCodes = true;

struct Codes {
  int8x16_t v;
};
REGATTA_INLINE Codes load_codes(const uint8_t* p) {
  return {vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p), vdupq_n_u8(0x80)))};
}
REGATTA_INLINE void load_nibbles(const uint8_t* p, Codes& low, Codes& high) {
  const uint8x16_t both = vld1q_u8(p);
  low.v = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
  high.v = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
}

}  // namespace int8
}  // namespace regatta::cpu::REGATTA_ISA
