// Vec of sixteen lanes; with REGATTA_HAS_BF16_DOT also vdpbf16ps and the bf16 conversion. See
// vec.h.
namespace regatta::cpu::REGATTA_ISA {

struct Vec {
  static constexpr int kLanes = 16;
  __m512 v;
};

REGATTA_INLINE Vec zero() { return {_mm512_setzero_ps()}; }
REGATTA_INLINE Vec set1(float x) { return {_mm512_set1_ps(x)}; }

REGATTA_INLINE __mmask16 lane_mask(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
REGATTA_INLINE __m512 widen_bf16(__m256i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
REGATTA_INLINE __m256i narrow_bf16(__m512 x) {
#if REGATTA_HAS_BF16_DOT
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  rounded = _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), bits,
                                 _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}

REGATTA_INLINE Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
REGATTA_INLINE Vec load(const bf16* p) {
  return {widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
REGATTA_INLINE Vec load(const fp16* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
REGATTA_INLINE Vec load_n(const float* p, int n) {
  return {_mm512_maskz_loadu_ps(lane_mask(n), p)};
}
REGATTA_INLINE Vec load_n(const bf16* p, int n) {
  return {widen_bf16(_mm256_maskz_loadu_epi16(lane_mask(n), p))};
}
REGATTA_INLINE Vec load_n(const fp16* p, int n) {
  return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lane_mask(n), p))};
}

REGATTA_INLINE void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
REGATTA_INLINE void store(bf16* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(a.v));
}
REGATTA_INLINE void store(fp16* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
REGATTA_INLINE void store_n(float* p, Vec a, int n) { _mm512_mask_storeu_ps(p, lane_mask(n), a.v); }
REGATTA_INLINE void store_n(bf16* p, Vec a, int n) {
  _mm256_mask_storeu_epi16(p, lane_mask(n), narrow_bf16(a.v));
}
REGATTA_INLINE void store_n(fp16* p, Vec a, int n) {
  _mm256_mask_storeu_epi16(p, lane_mask(n),
                           _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
REGATTA_INLINE void split_pairs(Vec pairs, Vec& even, Vec& odd) {
  const __m512i bits = _mm512_castps_si512(pairs.v);
  even.v = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
  odd.v =
      _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
REGATTA_INLINE void load_2k(const bf16* p, Vec& even, Vec& odd) {
  split_pairs({_mm512_loadu_ps(p)}, even, odd);
}

REGATTA_INLINE Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
REGATTA_INLINE Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
REGATTA_INLINE Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
REGATTA_INLINE Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
REGATTA_INLINE Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
REGATTA_INLINE Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
REGATTA_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
REGATTA_INLINE Vec fnma(Vec a, Vec b, Vec c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
REGATTA_INLINE Vec sqrt(Vec a) { return {_mm512_sqrt_ps(a.v)}; }

// As in vec_avx2.inl; vscalefps does the 2^n.
REGATTA_INLINE Vec exp(Vec a) {
  const __m512 x = _mm512_min_ps(_mm512_set1_ps(89.0f), _mm512_max_ps(_mm512_set1_ps(-88.0f), a.v));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.0f / 5040.0f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 720.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  p = _mm512_scalef_ps(p, n);
  const __mmask16 keep = _mm512_cmp_ps_mask(a.v, _mm512_set1_ps(-87.33654f), _CMP_NLT_UQ);
  p = _mm512_maskz_mov_ps(keep, p);
  return {_mm512_mask_mov_ps(p, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), a.v)};
}
REGATTA_INLINE Vec sigmoid(Vec a) {
  const Vec one = set1(1.0f);
  return one / (one + exp(zero() - a));
}
REGATTA_INLINE Vec silu(Vec a) { return a * sigmoid(a); }

REGATTA_INLINE float reduce_add(Vec a) { return _mm512_reduce_add_ps(a.v); }
REGATTA_INLINE float reduce_max(Vec a) { return _mm512_reduce_max_ps(a.v); }
REGATTA_INLINE void prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}
REGATTA_INLINE void prefetch_l2(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}

// 16 x 16 in place, bits untouched (also used on pairs of bf16). Four rounds of interleaving:
// floats, pairs, then 128-bit quarters twice.
REGATTA_INLINE void transpose(Vec* rows) {
  __m512 a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps(rows[i].v, rows[i + 1].v);
    a[i + 1] = _mm512_unpackhi_ps(rows[i].v, rows[i + 1].v);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      const __m512d low = _mm512_castps_pd(a[i + j]), high = _mm512_castps_pd(a[i + j + 2]);
      b[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      b[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  }
  // b[4 g + c], quarter q: column 4 q + c of rows 4 g .. 4 g + 3.
  for (int c = 0; c < 4; ++c) {
    const __m512 low0 = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x88);
    const __m512 low1 = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xdd);
    const __m512 high0 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x88);
    const __m512 high1 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xdd);
    rows[c].v = _mm512_shuffle_f32x4(low0, high0, 0x88);
    rows[8 + c].v = _mm512_shuffle_f32x4(low0, high0, 0xdd);
    rows[4 + c].v = _mm512_shuffle_f32x4(low1, high1, 0x88);
    rows[12 + c].v = _mm512_shuffle_f32x4(low1, high1, 0xdd);
  }
}
// 2^a = 2^n * 2^r, n = round(a): minimax polynomial of degree 6 for 2^r, constant term 1.
REGATTA_INLINE Vec exp2_below0(Vec a) {
  const __m512 n = _mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 r = _mm512_sub_ps(a.v, n);
  __m512 p = _mm512_set1_ps(1.53458022e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.33999309e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.61848907e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.55032864e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.240226462f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.693147182f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  const __mmask16 keep = _mm512_cmp_ps_mask(a.v, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return {_mm512_maskz_scalef_ps(keep, p, n)};
}
REGATTA_INLINE Vec keep_lanes(Vec a, int begin, int end, Vec other) {
  const __mmask16 keep = static_cast<__mmask16>(lane_mask(end) & ~lane_mask(begin));
  return {_mm512_mask_mov_ps(other.v, keep, a.v)};
}
REGATTA_INLINE uint32_t ge_mask(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
REGATTA_INLINE Vec where_ge(Vec a, Vec b, Vec x) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ), x.v)};
}
// Magnitudes compare as integers, and a NaN's bits are above those of infinity.
REGATTA_INLINE Vec max_magnitude(Vec m, Vec a) {
  const __m512i bits = _mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7fffffff));
  return {_mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(m.v), bits))};
}
REGATTA_INLINE float reduce_magnitude(Vec m) {
  const int bits = _mm512_reduce_max_epi32(_mm512_castps_si512(m.v));
  float result;
  __builtin_memcpy(&result, &bits, 4);
  return result;
}
REGATTA_INLINE int32_t store_int8(const Vec* a, int8_t* p) {
  __m512i whole[2];
  for (int v = 0; v < 2; ++v) {
    const __m512 limited =
        _mm512_min_ps(_mm512_max_ps(a[v].v, _mm512_set1_ps(-127.0f)), _mm512_set1_ps(127.0f));
    whole[v] = _mm512_cvtps_epi32(limited);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p) + v, _mm512_cvtepi32_epi8(whole[v]));
  }
  return _mm512_reduce_add_epi32(_mm512_add_epi32(whole[0], whole[1]));
}

#if REGATTA_HAS_BF16_DOT
struct VecBf16 {
  __m512bh v;
};
REGATTA_INLINE VecBf16 load_pairs(const bf16* p) { return {(__m512bh)_mm512_loadu_si512(p)}; }
REGATTA_INLINE VecBf16 set1_pair(const bf16* p) {
  int pair;
  __builtin_memcpy(&pair, p, 4);
  return {(__m512bh)_mm512_set1_epi32(pair)};
}
REGATTA_INLINE Vec dot_pairs(Vec acc, VecBf16 a, VecBf16 b) {
  return {_mm512_dpbf16_ps(acc.v, a.v, b.v)};
}
REGATTA_INLINE Vec round_bf16(Vec a) { return {widen_bf16(narrow_bf16(a.v))}; }
// 16 values rounded to bf16, those of a pair swapped; and eight such pairs as they are stored.
REGATTA_INLINE Vec swapped_pairs(Vec a) {
  return {_mm512_permute_ps(widen_bf16(narrow_bf16(a.v)), 0xb1)};
}
// Denormals are zeros, as in dot_pairs() and in tiles, until the end of the scope.
class FlushDenormals {
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(before_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  unsigned before_;
};
REGATTA_INLINE void interleave(bf16* out, const bf16* a, const bf16* b, int64_t count) {
  // Words 0 32 1 33 ... of the 64 words of (a, b), then the upper half of both.
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                       39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const __m512i x = _mm512_loadu_si512(a + i), y = _mm512_loadu_si512(b + i);
    _mm512_storeu_si512(out + 2 * i, _mm512_permutex2var_epi16(x, low, y));
    _mm512_storeu_si512(out + 2 * i + 32, _mm512_permutex2var_epi16(x, high, y));
  }
  for (; i < count; i += 16) {
    const __mmask16 mask = lane_mask(count - i < 16 ? static_cast<int>(count - i) : 16);
    const __m512i x = _mm512_castsi256_si512(_mm256_maskz_loadu_epi16(mask, a + i));
    const __m512i y = _mm512_castsi256_si512(_mm256_maskz_loadu_epi16(mask, b + i));
    _mm512_storeu_si512(out + 2 * i, _mm512_permutex2var_epi16(x, low, y));
  }
}
#endif

}  // namespace regatta::cpu::REGATTA_ISA
