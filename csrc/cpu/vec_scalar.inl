// Vec of one lane: what every other ISA is tested against. See vec.h.
namespace regatta::cpu::REGATTA_ISA {

struct Vec {
  static constexpr int kLanes = 1;
  float v;
};

REGATTA_INLINE Vec zero() { return {0.0f}; }
REGATTA_INLINE Vec set1(float x) { return {x}; }
template <class T>
REGATTA_INLINE Vec load(const T* p) {
  return {to_float(*p)};
}
template <class T>
REGATTA_INLINE Vec load_n(const T* p, int n) {
  return {n > 0 ? to_float(*p) : 0.0f};
}
template <class T>
REGATTA_INLINE void store(T* p, Vec a) {
  from_float(a.v, p);
}
template <class T>
REGATTA_INLINE void store_n(T* p, Vec a, int n) {
  if (n > 0) from_float(a.v, p);
}
REGATTA_INLINE void load_2k(const bf16* p, Vec& even, Vec& odd) {
  even.v = to_float(p[0]);
  odd.v = to_float(p[1]);
}

REGATTA_INLINE Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
REGATTA_INLINE Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
REGATTA_INLINE Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
REGATTA_INLINE Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
REGATTA_INLINE Vec max(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }
REGATTA_INLINE Vec min(Vec a, Vec b) { return {a.v < b.v ? a.v : b.v}; }
REGATTA_INLINE Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
REGATTA_INLINE Vec fnma(Vec a, Vec b, Vec c) { return {c.v - a.v * b.v}; }
REGATTA_INLINE Vec sqrt(Vec a) { return {__builtin_sqrtf(a.v)}; }
REGATTA_INLINE Vec exp(Vec a) { return {__builtin_expf(a.v)}; }
REGATTA_INLINE Vec sigmoid(Vec a) { return {1.0f / (1.0f + __builtin_expf(-a.v))}; }
REGATTA_INLINE Vec silu(Vec a) { return a * sigmoid(a); }
REGATTA_INLINE float reduce_add(Vec a) { return a.v; }
REGATTA_INLINE float reduce_max(Vec a) { return a.v; }
REGATTA_INLINE void prefetch(const void*) {}
REGATTA_INLINE void prefetch_l2(const void*) {}

REGATTA_INLINE void transpose(Vec*) {}
REGATTA_INLINE Vec exp2_below0(Vec a) { return {a.v < -126.0f ? 0.0f : __builtin_exp2f(a.v)}; }
REGATTA_INLINE Vec keep_lanes(Vec a, int begin, int end, Vec other) {
  return begin <= 0 && end > 0 ? a : other;
}
REGATTA_INLINE uint32_t ge_mask(Vec a, Vec b) { return a.v >= b.v; }
REGATTA_INLINE Vec where_ge(Vec a, Vec b, Vec x) { return {a.v >= b.v ? x.v : 0.0f}; }
REGATTA_INLINE Vec max_magnitude(Vec m, Vec a) {
  const float magnitude = __builtin_fabsf(a.v);
  return {magnitude <= m.v || m.v != m.v ? m.v : magnitude};
}
REGATTA_INLINE float reduce_magnitude(Vec m) { return m.v; }
REGATTA_INLINE int32_t store_int8(const Vec* a, int8_t* p) {
  int32_t sum = 0;
  for (int i = 0; i < 32; ++i) {
    const float limited = a[i].v > 127.0f ? 127.0f : a[i].v >= -127.0f ? a[i].v : -127.0f;
    // Adding 1.5 * 2^23 leaves no fraction bits: the adder rounds, to even on ties.
    const float shifted = limited + 12582912.0f;
    int32_t bits;
    __builtin_memcpy(&bits, &shifted, 4);
    p[i] = static_cast<int8_t>(bits - 0x4b400000);
    sum += p[i];
  }
  return sum;
}

}  // namespace regatta::cpu::REGATTA_ISA
