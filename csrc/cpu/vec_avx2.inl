// Vec of eight lanes. See vec.h.
namespace regatta::cpu::REGATTA_ISA {

struct Vec {
  static constexpr int kLanes = 8;
  __m256 v;
};

REGATTA_INLINE Vec zero() { return {_mm256_setzero_ps()}; }
REGATTA_INLINE Vec set1(float x) { return {_mm256_set1_ps(x)}; }

REGATTA_INLINE __m256i lane_mask(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
REGATTA_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
REGATTA_INLINE Vec load(const bf16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
}
REGATTA_INLINE Vec load(const fp16* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
REGATTA_INLINE Vec load_n(const float* p, int n) { return {_mm256_maskload_ps(p, lane_mask(n))}; }
template <class T>
REGATTA_INLINE Vec load_n(const T* p, int n) {
  T buffer[8] = {};
  for (int i = 0; i < n; ++i) buffer[i] = p[i];
  return load(buffer);
}

REGATTA_INLINE void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
REGATTA_INLINE void store(bf16* p, Vec a) {
  const __m256i bits = _mm256_castps_si256(a.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 is_nan = _mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q);
  const __m256i high =
      _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(is_nan)), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
REGATTA_INLINE void store(fp16* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
REGATTA_INLINE void store_n(float* p, Vec a, int n) { _mm256_maskstore_ps(p, lane_mask(n), a.v); }
template <class T>
REGATTA_INLINE void store_n(T* p, Vec a, int n) {
  T buffer[8];
  store(buffer, a);
  for (int i = 0; i < n; ++i) p[i] = buffer[i];
}
REGATTA_INLINE void load_2k(const bf16* p, Vec& even, Vec& odd) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  even.v = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  odd.v =
      _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

REGATTA_INLINE Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
REGATTA_INLINE Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
REGATTA_INLINE Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
REGATTA_INLINE Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
REGATTA_INLINE Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
REGATTA_INLINE Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
REGATTA_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
REGATTA_INLINE Vec fnma(Vec a, Vec b, Vec c) { return {_mm256_fnmadd_ps(a.v, b.v, c.v)}; }
REGATTA_INLINE Vec sqrt(Vec a) { return {_mm256_sqrt_ps(a.v)}; }

// exp(x) = 2^n * exp(r), n = round(x / ln 2), |r| <= ln 2 / 2, ln 2 in two parts (Cody and Waite),
// exp(r) by its Taylor polynomial of degree 7 (error 5e-9 at the ends of the interval).
REGATTA_INLINE Vec exp(Vec a) {
  const __m256 x = _mm256_min_ps(_mm256_set1_ps(89.0f), _mm256_max_ps(_mm256_set1_ps(-88.0f), a.v));
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 p = _mm256_set1_ps(1.0f / 5040.0f);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 720.0f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 120.0f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 24.0f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 6.0f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  // 2^n as two factors: n reaches 128, which one exponent field cannot hold.
  const __m256i whole = _mm256_cvtps_epi32(n);
  const __m256i half = _mm256_srai_epi32(whole, 1);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256 scale0 = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  const __m256 scale1 = _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23));
  p = _mm256_mul_ps(_mm256_mul_ps(p, scale0), scale1);
  p = _mm256_andnot_ps(_mm256_cmp_ps(a.v, _mm256_set1_ps(-87.33654f), _CMP_LT_OQ), p);
  return {_mm256_blendv_ps(p, a.v, _mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q))};
}
REGATTA_INLINE Vec sigmoid(Vec a) {
  const Vec one = set1(1.0f);
  return one / (one + exp(zero() - a));
}
REGATTA_INLINE Vec silu(Vec a) { return a * sigmoid(a); }

REGATTA_INLINE float reduce_add(Vec a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
REGATTA_INLINE float reduce_max(Vec a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
REGATTA_INLINE void prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}
REGATTA_INLINE void prefetch_l2(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}

// 8 x 8 in place: interleave floats, then pairs, then the 128-bit halves.
REGATTA_INLINE void transpose(Vec* rows) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps(rows[i].v, rows[i + 1].v);
    a[i + 1] = _mm256_unpackhi_ps(rows[i].v, rows[i + 1].v);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; ++j) {
      b[i + 2 * j] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0x44);
      b[i + 2 * j + 1] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0xee);
    }
  }
  for (int c = 0; c < 4; ++c) {
    rows[c].v = _mm256_permute2f128_ps(b[c], b[4 + c], 0x20);
    rows[4 + c].v = _mm256_permute2f128_ps(b[c], b[4 + c], 0x31);
  }
}
// As in vec_avx512.inl; 2^n through the exponent field.
REGATTA_INLINE Vec exp2_below0(Vec a) {
  const __m256 n = _mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m256 r = _mm256_sub_ps(a.v, n);
  __m256 p = _mm256_set1_ps(1.53458022e-4f);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.33999309e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(9.61848907e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.55032864e-2f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.240226462f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.693147182f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  p = _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
  p = _mm256_andnot_ps(_mm256_cmp_ps(a.v, _mm256_set1_ps(-126.0f), _CMP_LT_OQ), p);
  return {_mm256_blendv_ps(p, a.v, _mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q))};
}
REGATTA_INLINE Vec keep_lanes(Vec a, int begin, int end, Vec other) {
  const __m256i keep = _mm256_andnot_si256(lane_mask(begin), lane_mask(end));
  return {_mm256_blendv_ps(other.v, a.v, _mm256_castsi256_ps(keep))};
}
REGATTA_INLINE uint32_t ge_mask(Vec a, Vec b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_GE_OQ)));
}
REGATTA_INLINE Vec where_ge(Vec a, Vec b, Vec x) {
  return {_mm256_and_ps(_mm256_cmp_ps(a.v, b.v, _CMP_GE_OQ), x.v)};
}
// Magnitudes compare as integers, and a NaN's bits are above those of infinity.
REGATTA_INLINE Vec max_magnitude(Vec m, Vec a) {
  const __m256i bits = _mm256_and_si256(_mm256_castps_si256(a.v), _mm256_set1_epi32(0x7fffffff));
  return {_mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(m.v), bits))};
}
REGATTA_INLINE float reduce_magnitude(Vec m) {
  const __m256i bits = _mm256_castps_si256(m.v);
  __m128i x = _mm_max_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
  x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0x4e));
  x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0xb1));
  return _mm_cvtss_f32(_mm_castsi128_ps(x));
}
REGATTA_INLINE int32_t store_int8(const Vec* a, int8_t* p) {
  __m256i whole[4];
  for (int v = 0; v < 4; ++v) {
    const __m256 limited =
        _mm256_min_ps(_mm256_max_ps(a[v].v, _mm256_set1_ps(-127.0f)), _mm256_set1_ps(127.0f));
    whole[v] = _mm256_cvtps_epi32(limited);
  }
  const __m256i total =
      _mm256_add_epi32(_mm256_add_epi32(whole[0], whole[1]), _mm256_add_epi32(whole[2], whole[3]));
  // Packing works within 128-bit halves; the permutation puts the groups of four back in order.
  const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]),
                                           _mm256_packs_epi32(whole[2], whole[3]));
  _mm256_storeu_si256(
      reinterpret_cast<__m256i*>(p),
      _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
  __m128i x = _mm_add_epi32(_mm256_castsi256_si128(total), _mm256_extracti128_si256(total, 1));
  x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
  x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1));
  return _mm_cvtsi128_si32(x);
}

}  // namespace regatta::cpu::REGATTA_ISA
