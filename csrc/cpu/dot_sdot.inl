// Dot products of bytes by SDOT. See dot_int8.inl.
#include "codes_signed_neon.inl"

namespace regatta::cpu::REGATTA_ISA {
namespace int8 {

struct Bytes {
  int8x16_t v;
};
REGATTA_INLINE Bytes load_bytes(const int8_t* p) { return {repeat_four(p)}; }
REGATTA_INLINE Ints dot(Ints sum, Codes a, Bytes b) { return {vdotq_s32(sum.v, a.v, b.v)}; }

}  // namespace int8
}  // namespace regatta::cpu::REGATTA_ISA
