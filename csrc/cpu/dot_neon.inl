// Dot products of bytes by products of 16 bits. See dot_int8.inl.
#include "codes_signed_neon.inl"

namespace regatta::cpu::REGATTA_ISA {
namespace int8 {

// Activations are in -127 .. 127: the sum of two products, at most 2 * 128 * 127, is one of 16
// bits.
struct Bytes {
  int8x16_t v;
};
REGATTA_INLINE Bytes load_bytes(const int8_t* p) { return {repeat_four(p)}; }
REGATTA_INLINE Ints dot(Ints sum, Codes a, Bytes b) {
  const int16x8_t low = vmull_s8(vget_low_s8(a.v), vget_low_s8(b.v));
  const int16x8_t high = vmull_high_s8(a.v, b.v);
  return {vpadalq_s16(sum.v, vpaddq_s16(low, high))};
}

}  // namespace int8
}  // namespace regatta::cpu::REGATTA_ISA
