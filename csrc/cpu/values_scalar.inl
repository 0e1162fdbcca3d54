// Codes of weights as floats, one lane. See gemm_codes.inl.
namespace regatta::cpu::REGATTA_ISA {
namespace codes {

using Raw = uint32_t;
REGATTA_INLINE Raw load_raw(const uint8_t* p) {
  Raw raw;
  __builtin_memcpy(&raw, p, 4);
  return raw;
}
template <CodeKind kKind, bool kZeros>
REGATTA_INLINE Vec value(Raw raw, int bit) {
  constexpr int kBits = bits_of(kKind);
  const int code = static_cast<int>(raw >> bit) & ((1 << kBits) - 1);
  if constexpr (kKind == CodeKind::kE2m1) {
    static constexpr float kValues[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    return {code & 8 ? -kValues[code & 7] : kValues[code]};
  } else {
    return {static_cast<float>(kZeros ? code : code - (1 << (kBits - 1)))};
  }
}

}  // namespace codes
}  // namespace regatta::cpu::REGATTA_ISA
