// Dot products of bytes, two lanes, of codes made signed. See dot_int8.inl.
namespace regatta::cpu::REGATTA_ISA {
namespace int8 {

constexpr bool kSignedCodes = true;

struct Ints {
  int32_t v[2];
};
struct Codes {
  int v[8];
};
struct Bytes {
  int8_t v[4];
};
REGATTA_INLINE Codes load_codes(const uint8_t* p) {
  Codes codes;
  for (int i = 0; i < 8; ++i) codes.v[i] = p[i] - 128;
  return codes;
}
REGATTA_INLINE void load_nibbles(const uint8_t* p, Codes& low, Codes& high) {
  for (int i = 0; i < 8; ++i) {
    low.v[i] = p[i] & 15;
    high.v[i] = p[i] >> 4;
  }
}
REGATTA_INLINE Bytes load_bytes(const int8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
REGATTA_INLINE Ints dot(Ints sum, Codes a, Bytes b) {
  for (int i = 0; i < 8; ++i) sum.v[i / 4] += a.v[i] * b.v[i % 4];
  return sum;
}
REGATTA_INLINE Ints set_ints(int32_t x) { return {{x, x}}; }
REGATTA_INLINE Ints add(Ints a, Ints b) { return {{a.v[0] + b.v[0], a.v[1] + b.v[1]}}; }
REGATTA_INLINE Vec to_vec(Ints a) {
  return {{static_cast<float>(a.v[0]), static_cast<float>(a.v[1])}};
}

}  // namespace int8
}  // namespace regatta::cpu::REGATTA_ISA
