// Dot products of four bytes per 32-bit lane, unsigned codes times signed activations, on each ISA.
//
//   struct Ints                                   Vec::kLanes int32
//   struct Codes                                  4 codes for each lane, ready to multiply
//   struct Bytes                                  4 activations, the same for all lanes
//   Codes load_codes(const uint8_t*)              4 * kLanes codes
//   void load_nibbles(const uint8_t*, Codes& low, Codes& high)
//                                                 the low and the high halves of 4 * kLanes bytes
//   Bytes load_bytes(const int8_t*)               4 values to all lanes
//   Ints dot(Ints sum, Codes, Bytes)              exact
//   Ints set_ints(int32_t), add(Ints, Ints);  Vec to_vec(Ints)
namespace regatta::cpu::REGATTA_ISA {
namespace int8 {

#if REGATTA_VECTOR_BITS == 0

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

#else

#if REGATTA_VECTOR_BITS == 512
struct Ints {
  __m512i v;
};
REGATTA_INLINE Ints set_ints(int32_t x) { return {_mm512_set1_epi32(x)}; }
REGATTA_INLINE Ints add(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
REGATTA_INLINE Vec to_vec(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
REGATTA_INLINE __m512i load_raw(const void* p) { return _mm512_loadu_si512(p); }
REGATTA_INLINE __m512i low_nibbles(__m512i x) {
  return _mm512_and_si512(x, _mm512_set1_epi8(0x0f));
}
REGATTA_INLINE __m512i high_nibbles(__m512i x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }
#else
struct Ints {
  __m256i v;
};
REGATTA_INLINE Ints set_ints(int32_t x) { return {_mm256_set1_epi32(x)}; }
REGATTA_INLINE Ints add(Ints a, Ints b) { return {_mm256_add_epi32(a.v, b.v)}; }
REGATTA_INLINE Vec to_vec(Ints a) { return {_mm256_cvtepi32_ps(a.v)}; }
REGATTA_INLINE __m256i load_raw(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
REGATTA_INLINE __m256i low_nibbles(__m256i x) {
  return _mm256_and_si256(x, _mm256_set1_epi8(0x0f));
}
REGATTA_INLINE __m256i high_nibbles(__m256i x) { return low_nibbles(_mm256_srli_epi16(x, 4)); }
#endif

#if REGATTA_HAS_VNNI

struct Codes {
  __m512i v;
};
struct Bytes {
  __m512i v;
};
REGATTA_INLINE Codes load_codes(const uint8_t* p) { return {load_raw(p)}; }
REGATTA_INLINE void load_nibbles(const uint8_t* p, Codes& low, Codes& high) {
  const __m512i both = load_raw(p);
  low.v = low_nibbles(both);
  high.v = high_nibbles(both);
}
REGATTA_INLINE Bytes load_bytes(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return {_mm512_set1_epi32(four)};
}
REGATTA_INLINE Ints dot(Ints sum, Codes a, Bytes b) {
  // Not _mm512_dpbusd_epi32: GCC 12 copies the sum before each, and spills what has no register
  // then (12 rows: 1,000 instead of 1,700 GOP/s).
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(a.v), "v"(b.v));
  return sum;
}

#else

// Without vpdpbusd: bytes 0 and 2 of a lane, and bytes 1 and 3, as 16-bit numbers. (The product of
// bytes, vpmaddubsw, saturates at 16 bits: 255 * 127 * 2 is beyond.)
#if REGATTA_VECTOR_BITS == 512
using Raw = __m512i;
REGATTA_INLINE Raw even_codes(Raw x) { return _mm512_and_si512(x, _mm512_set1_epi16(0xff)); }
REGATTA_INLINE Raw odd_codes(Raw x) { return _mm512_srli_epi16(x, 8); }
REGATTA_INLINE Raw odd_bytes(Raw x) { return _mm512_srai_epi16(x, 8); }
REGATTA_INLINE Raw even_bytes(Raw x) { return odd_bytes(_mm512_slli_epi16(x, 8)); }
REGATTA_INLINE Raw multiply_words(Raw a, Raw b) { return _mm512_madd_epi16(a, b); }
#else
using Raw = __m256i;
REGATTA_INLINE Raw even_codes(Raw x) { return _mm256_and_si256(x, _mm256_set1_epi16(0xff)); }
REGATTA_INLINE Raw odd_codes(Raw x) { return _mm256_srli_epi16(x, 8); }
REGATTA_INLINE Raw odd_bytes(Raw x) { return _mm256_srai_epi16(x, 8); }
REGATTA_INLINE Raw even_bytes(Raw x) { return odd_bytes(_mm256_slli_epi16(x, 8)); }
REGATTA_INLINE Raw multiply_words(Raw a, Raw b) { return _mm256_madd_epi16(a, b); }
#endif

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

#endif  // REGATTA_HAS_VNNI
#endif  // REGATTA_VECTOR_BITS

}  // namespace int8
}  // namespace regatta::cpu::REGATTA_ISA
