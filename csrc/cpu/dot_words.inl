// Without vpdpbusd: bytes 0 and 2 of a lane, and bytes 1 and 3, as 16-bit numbers. (The product of
// bytes, vpmaddubsw, saturates at 16 bits: 255 * 127 * 2 is beyond.)
// Dot products of bytes by those of 16-bit numbers. See dot_int8.inl.
namespace regatta::cpu::REGATTA_ISA {
namespace int8 {

constexpr bool kSignedCodes = false;

struct Codes {
  Raw even, odd;
};
struct Bytes {
  Raw even, odd;
};
REGATTA_INLINE Codes words_of(Raw codes) { return {even_codes(codes), odd_codes(codes)}; }
REGATTA_INLINE Codes load_codes(const uint8_t* p) { return words_of(load_raw(p)); }
REGATTA_INLINE void load_nibbles(const uint8_t* p, Codes& low, Codes& high) {
  const Raw both = load_raw(p);
  low = words_of(low_nibbles(both));
  high = words_of(high_nibbles(both));
}
REGATTA_INLINE Bytes load_bytes(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  const Raw all = set_ints(four).v;
  return {even_bytes(all), odd_bytes(all)};
}
REGATTA_INLINE Ints dot(Ints sum, Codes a, Bytes b) {
  const Ints odd = {multiply_words(a.odd, b.odd)};
  return add(add(sum, {multiply_words(a.even, b.even)}), odd);
}

}  // namespace int8
}  // namespace regatta::cpu::REGATTA_ISA
