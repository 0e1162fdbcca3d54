// Four int32, and four bytes to all lanes. See dot_int8.inl.
namespace regatta::cpu::REGATTA_ISA {
namespace int8 {

struct Ints {
  int32x4_t v;
};
REGATTA_INLINE Ints set_ints(int32_t x) { return {vdupq_n_s32(x)}; }
REGATTA_INLINE Ints add(Ints a, Ints b) { return {vaddq_s32(a.v, b.v)}; }
REGATTA_INLINE Vec to_vec(Ints a) { return {vcvtq_f32_s32(a.v)}; }
// 4 values to all lanes.
REGATTA_INLINE int8x16_t repeat_four(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(four));
}

}  // namespace int8
}  // namespace regatta::cpu::REGATTA_ISA
