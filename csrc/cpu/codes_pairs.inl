// Codes of quantized cache rows as pairs of bf16, by permuting bytes (AVX512-VBMI): two tables of
// 128 bytes make the halves of a bf16 from a code. A third to a half of the work of converting
// through float. See kv_rows.inl for what the readers offer.
namespace regatta::cpu::REGATTA_ISA {

// Low and high bytes of bf16 numbers.
struct Bf16Bytes {
  uint8_t low[128], high[128];
};

constexpr void set_bytes(Bf16Bytes& table, int i, int bits) {
  table.low[i] = static_cast<uint8_t>(bits & 0xff);
  table.high[i] = static_cast<uint8_t>(bits >> 8);
}

// mantissa * 2^exponent, mantissa in 1 .. 127.
constexpr int bf16_bits(int mantissa, int exponent) {
  while (mantissa < 128) {
    mantissa *= 2;
    --exponent;
  }
  return (exponent + 7 + 127) << 7 | (mantissa & 127);
}

// 0 .. 127.
constexpr Bf16Bytes whole_number_bytes() {
  Bf16Bytes table{};
  for (int i = 1; i < 128; ++i) set_bytes(table, i, bf16_bits(i, 0));
  return table;
}

// e4m3 without its sign, / 256 as load_e4m3 has it. 127, NaN to others, is never written.
constexpr Bf16Bytes e4m3_bytes() {
  Bf16Bytes table{};
  for (int i = 1; i < 128; ++i) {
    const int exponent = i >> 3, mantissa = i & 7;
    set_bytes(table, i,
              exponent ? bf16_bits(8 + mantissa, exponent - 18) : bf16_bits(mantissa, -17));
  }
  return table;
}

alignas(64) constexpr Bf16Bytes kWholeNumbers = whole_number_bytes();
alignas(64) constexpr Bf16Bytes kE4m3Numbers = e4m3_bytes();

// count bytes, the rest 0.
REGATTA_INLINE __m512i load_row_bytes(const char* p, int64_t count) {
  return count >= 64 ? _mm512_loadu_si512(p)
                     : _mm512_maskz_loadu_epi8((__mmask64{1} << count) - 1, p);
}

// 32 bytes of a row, and 32 of another; count of each, the rest 0.
REGATTA_INLINE __m512i load_half_rows(const char* p, const char* q, int64_t count) {
  const auto half = [count](const char* from) REGATTA_LAMBDA_INLINE {
    return count >= 32 ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))
                       : _mm256_maskz_loadu_epi8((__mmask32{1} << count) - 1, from);
  };
  return _mm512_inserti64x4(_mm512_castsi256_si512(half(p)), half(q), 1);
}

// Bytes (first, second) by turns from `begin` on: first from the one operand, second from the
// other.
REGATTA_INLINE __m512i by_turns(__m512i a, __m512i b, int begin) {
  // Byte 2 i: a's begin + i; byte 2 i + 1: b's.
  const __m512i words = _mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17,
                                         16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i low = _mm512_add_epi16(words, _mm512_set1_epi16(static_cast<short>(begin)));
  const __m512i index =
      _mm512_or_si512(low, _mm512_slli_epi16(_mm512_add_epi16(low, _mm512_set1_epi16(64)), 8));
  return _mm512_permutex2var_epi8(a, index, b);
}

// 8-bit codes.
template <bool kIsE4m3>
struct PairReader8 {
  static constexpr int kPairsPerUnit = 2;
  __m512i low0, low1, high0, high1;

  // Not a constructor: one that the compiler makes by itself would lack the instruction set.
  static REGATTA_INLINE PairReader8 make() {
    const Bf16Bytes& table = kIsE4m3 ? kE4m3Numbers : kWholeNumbers;
    return {_mm512_load_si512(table.low), _mm512_load_si512(table.low + 64),
            _mm512_load_si512(table.high), _mm512_load_si512(table.high + 64)};
  }

  // 64 codes -> low and high bytes of their numbers.
  REGATTA_INLINE void split(__m512i codes, __m512i& low, __m512i& high) const {
    // An index's low seven bits count.
    const __m512i top = _mm512_set1_epi8(static_cast<char>(0x80));
    const __m512i sign = kIsE4m3 ? codes : _mm512_xor_si512(codes, top);
    const __m512i index = kIsE4m3 ? codes : _mm512_abs_epi8(sign);
    low = _mm512_permutex2var_epi8(low0, index, low1);
    high = _mm512_permutex2var_epi8(high0, index, high1);
    high = _mm512_ternarylogic_epi32(high, sign, top, 0xf8);  // high | sign & top
  }

  // units: 4 codes in each lane. out: two steps of pairs, kChunk lanes apart.
  REGATTA_INLINE void store_pairs(__m512i units, bf16* out, int64_t step) const {
    const __m512i lanes =
        _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                           _mm512_set1_epi32(0x04040404));
    // Low byte, high byte of code 0, then of code 1.
    const __m512i first = _mm512_add_epi8(lanes, _mm512_set1_epi32(0x41014000));
    const __m512i second = _mm512_add_epi8(first, _mm512_set1_epi8(2));
    __m512i low, high;
    split(units, low, high);
    _mm512_storeu_si512(out, _mm512_permutex2var_epi8(low, first, high));
    _mm512_storeu_si512(out + step, _mm512_permutex2var_epi8(low, second, high));
  }

  REGATTA_INLINE void interleave_rows(bf16* out, const char* a, const char* b,
                                      int64_t head_dim) const {
    for (int64_t d = 0; d < head_dim; d += 64) {
      const int64_t count = head_dim - d < 64 ? head_dim - d : 64;
      const __m512i x = load_row_bytes(a + d, count), y = load_row_bytes(b + d, count);
      __m512i low, high;
      split(by_turns(x, y, 0), low, high);
      bf16* to = out + 2 * d;
      _mm512_storeu_si512(to, by_turns(low, high, 0));
      if (count > 16) _mm512_storeu_si512(to + 32, by_turns(low, high, 32));
      if (count <= 32) return;
      split(by_turns(x, y, 32), low, high);
      _mm512_storeu_si512(to + 64, by_turns(low, high, 0));
      if (count > 48) _mm512_storeu_si512(to + 96, by_turns(low, high, 32));
    }
  }
};

// 4-bit codes: bf16 of -8 .. 7, twice, so that bit 4 of an index does not count.
struct PairReader4 {
  static constexpr int kPairsPerUnit = 4;
  __m512i table;

  static REGATTA_INLINE PairReader4 make() {
    constexpr short kNumbers[16] = {short(0xc100), short(0xc0e0), short(0xc0c0), short(0xc0a0),
                                    short(0xc080), short(0xc040), short(0xc000), short(0xbf80),
                                    0x0000,        0x3f80,        0x4000,        0x4040,
                                    0x4080,        0x40a0,        0x40c0,        0x40e0};
    return {_mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(kNumbers)))};
  }

  // units: 8 codes in each lane. out: four steps of pairs.
  REGATTA_INLINE void store_pairs(__m512i units, bf16* out, int64_t step) const {
    // Bits from which a byte is taken, of two lanes: the even bytes are words' indices.
    const __m512i from = _mm512_set1_epi64(0x0024002000040000);
    for (int pair = 0; pair < 4; ++pair) {
      const __m512i bits = _mm512_add_epi8(from, _mm512_set1_epi8(static_cast<char>(8 * pair)));
      const __m512i index = _mm512_multishift_epi64_epi8(bits, units);
      _mm512_storeu_si512(out + pair * step, _mm512_permutexvar_epi16(index, table));
    }
  }

  REGATTA_INLINE void interleave_rows(bf16* out, const char* a, const char* b,
                                      int64_t head_dim) const {
    const int64_t bytes = head_dim / 2;
    // Byte i of a, then of b, in each 64 bits.
    const __m512i spread =
        _mm512_setr_epi64(0x4000, 0x4101, 0x4202, 0x4303, 0x4404, 0x4505, 0x4606, 0x4707);
    const __m512i from = _mm512_set1_epi64(0x000c000400080000);
    for (int64_t i = 0; i < bytes; i += 64) {
      const int64_t count = bytes - i < 64 ? bytes - i : 64;
      const __m512i x = load_row_bytes(a + i, count), y = load_row_bytes(b + i, count);
      __m512i place = spread;
      for (int64_t k = 0; k < count; k += 8) {
        const __m512i both = _mm512_permutex2var_epi8(x, place, y);
        const __m512i index = _mm512_multishift_epi64_epi8(from, both);
        _mm512_storeu_si512(out + 4 * (i + k), _mm512_permutexvar_epi16(index, table));
        place = _mm512_add_epi8(place, _mm512_set1_epi8(8));
      }
    }
  }
};

}  // namespace regatta::cpu::REGATTA_ISA
