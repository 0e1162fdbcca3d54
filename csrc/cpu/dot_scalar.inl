// Dot products of bytes, one lane. See dot_int8.inl.
namespace regatta::cpu::REGATTA_ISA {
namespace int8 {

constexpr bool kSignedCodes = false;

struct Ints {
  int32_t v;
};
struct Codes {
  uint8_t v[4];
};
struct Bytes {
  int8_t v[4];
};
REGATTA_INLINE Codes load_codes(const uint8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
REGATTA_INLINE void load_nibbles(const uint8_t* p, Codes& low, Codes& high) {
  for (int i = 0; i < 4; ++i) {
    low.v[i] = p[i] & 15;
    high.v[i] = p[i] >> 4;
  }
}
REGATTA_INLINE Bytes load_bytes(const int8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
REGATTA_INLINE Ints dot(Ints sum, Codes a, Bytes b) {
  for (int i = 0; i < 4; ++i) sum.v += a.v[i] * b.v[i];
  return sum;
}
REGATTA_INLINE Ints set_ints(int32_t x) { return {x}; }
REGATTA_INLINE Ints add(Ints a, Ints b) { return {a.v + b.v}; }
REGATTA_INLINE Vec to_vec(Ints a) { return {static_cast<float>(a.v)}; }

}  // namespace int8
}  // namespace regatta::cpu::REGATTA_ISA
