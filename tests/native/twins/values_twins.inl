// Codes of weights as floats, two lanes. See gemm_codes.inl.
namespace regatta::cpu::REGATTA_ISA {
namespace codes {

struct Raw {
  uint32_t v[2];
};
REGATTA_INLINE Raw load_raw(const uint8_t* p) {
  Raw raw;
  __builtin_memcpy(raw.v, p, 8);
  return raw;
}
template <CodeKind kKind, bool kZeros>
REGATTA_INLINE Vec value(Raw raw, int bit) {
  static constexpr float kValues[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  constexpr int kBits = bits_of(kKind), kMiddle = kZeros ? 0 : 1 << (kBits - 1);
  return each([&](int i) {
    const int code = static_cast<int>(raw.v[i] >> bit) & ((1 << kBits) - 1);
    if (kKind == CodeKind::kE2m1) return code & 8 ? -kValues[code & 7] : kValues[code & 7];
    return static_cast<float>(code - kMiddle);
  });
}

}  // namespace codes
}  // namespace regatta::cpu::REGATTA_ISA
