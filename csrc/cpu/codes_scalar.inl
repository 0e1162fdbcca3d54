// Codes of quantized cache rows, one lane. See vec.h.
namespace regatta::cpu::REGATTA_ISA {

REGATTA_INLINE Vec load_codes8(const uint8_t* row, int64_t i, int n) {
  return {n > 0 ? static_cast<float>(row[i] - 128) : 0.0f};
}
REGATTA_INLINE Vec load_codes4(const uint8_t* row, int64_t i, int n) {
  return {n > 0 ? static_cast<float>((row[i / 2] >> (i % 2 * 4) & 15) - 8) : 0.0f};
}
REGATTA_INLINE Vec load_e4m3(const uint8_t* row, int64_t i, int n) {
  if (n == 0) return {0.0f};
  const fp16 half = {static_cast<uint16_t>((row[i] & 0x80) << 8 | (row[i] & 0x7f) << 7)};
  return {to_float(half)};
}
REGATTA_INLINE void load_even_odd(const float* p, Vec& even, Vec& odd) {
  even.v = p[0];
  odd.v = p[1];
}
REGATTA_INLINE void store_codes(uint8_t* p, Vec a, int bias, int n) {
  if (n > 0) *p = static_cast<uint8_t>(static_cast<int>(__builtin_rintf(a.v)) + bias);
}

}  // namespace regatta::cpu::REGATTA_ISA
