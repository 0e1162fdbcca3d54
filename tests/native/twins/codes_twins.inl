// Codes of quantized cache rows, two lanes. See vec.h.
namespace regatta::cpu::REGATTA_ISA {

template <class Fn>
REGATTA_INLINE Vec first_lanes(int n, Fn&& f) {
  return {{n > 0 ? f(0) : 0.0f, n > 1 ? f(1) : 0.0f}};
}
REGATTA_INLINE Vec load_codes8(const uint8_t* row, int64_t i, int n) {
  return first_lanes(n, [&](int j) { return static_cast<float>(row[i + j] - 128); });
}
REGATTA_INLINE Vec load_codes4(const uint8_t* row, int64_t i, int n) {
  return first_lanes(n, [&](int j) { return static_cast<float>((row[i / 2] >> 4 * j & 15) - 8); });
}
REGATTA_INLINE Vec load_e4m3(const uint8_t* row, int64_t i, int n) {
  return first_lanes(n, [&](int j) {
    const int code = row[i + j];
    return to_float(fp16{static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7)});
  });
}
REGATTA_INLINE void load_even_odd(const float* p, Vec& even, Vec& odd) {
  even = {{p[0], p[2]}};
  odd = {{p[1], p[3]}};
}
REGATTA_INLINE void store_codes(uint8_t* p, Vec a, int bias, int n) {
  for (int i = 0; i < n; ++i) {
    p[i] = static_cast<uint8_t>(static_cast<int>(__builtin_rintf(a.v[i])) + bias);
  }
}

}  // namespace regatta::cpu::REGATTA_ISA
