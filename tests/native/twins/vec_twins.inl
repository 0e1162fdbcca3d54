// Vec of two lanes in plain C++. See vec.h.
namespace regatta::cpu::REGATTA_ISA {

struct Vec {
  static constexpr int kLanes = 2;
  float v[2];
};

// f of each lane.
template <class Fn>
REGATTA_INLINE Vec each(Fn&& f) {
  return {{f(0), f(1)}};
}

REGATTA_INLINE Vec zero() { return {{0.0f, 0.0f}}; }
REGATTA_INLINE Vec set1(float x) { return {{x, x}}; }
template <class T>
REGATTA_INLINE Vec load(const T* p) {
  return {{to_float(p[0]), to_float(p[1])}};
}
template <class T>
REGATTA_INLINE Vec load_n(const T* p, int n) {
  return {{n > 0 ? to_float(p[0]) : 0.0f, n > 1 ? to_float(p[1]) : 0.0f}};
}
template <class T>
REGATTA_INLINE void store_n(T* p, Vec a, int n) {
  for (int i = 0; i < n; ++i) from_float(a.v[i], p + i);
}
template <class T>
REGATTA_INLINE void store(T* p, Vec a) {
  store_n(p, a, 2);
}
REGATTA_INLINE void load_2k(const bf16* p, Vec& even, Vec& odd) {
  even = {{to_float(p[0]), to_float(p[2])}};
  odd = {{to_float(p[1]), to_float(p[3])}};
}

REGATTA_INLINE Vec operator+(Vec a, Vec b) { return {{a.v[0] + b.v[0], a.v[1] + b.v[1]}}; }
REGATTA_INLINE Vec operator-(Vec a, Vec b) { return {{a.v[0] - b.v[0], a.v[1] - b.v[1]}}; }
REGATTA_INLINE Vec operator*(Vec a, Vec b) { return {{a.v[0] * b.v[0], a.v[1] * b.v[1]}}; }
REGATTA_INLINE Vec operator/(Vec a, Vec b) { return {{a.v[0] / b.v[0], a.v[1] / b.v[1]}}; }
REGATTA_INLINE Vec max(Vec a, Vec b) {
  return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
REGATTA_INLINE Vec min(Vec a, Vec b) {
  return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
REGATTA_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
REGATTA_INLINE Vec fnma(Vec a, Vec b, Vec c) { return c - a * b; }
REGATTA_INLINE Vec sqrt(Vec a) {
  return each([&](int i) { return __builtin_sqrtf(a.v[i]); });
}
REGATTA_INLINE Vec exp(Vec a) {
  return each([&](int i) { return __builtin_expf(a.v[i]); });
}
REGATTA_INLINE Vec sigmoid(Vec a) { return set1(1.0f) / (set1(1.0f) + exp(zero() - a)); }
REGATTA_INLINE Vec silu(Vec a) { return a * sigmoid(a); }
REGATTA_INLINE float reduce_add(Vec a) { return a.v[0] + a.v[1]; }
REGATTA_INLINE float reduce_max(Vec a) { return a.v[0] > a.v[1] ? a.v[0] : a.v[1]; }
REGATTA_INLINE void prefetch(const void*) {}
REGATTA_INLINE void prefetch_l2(const void*) {}
REGATTA_INLINE void transpose(Vec* rows) {
  const float above = rows[0].v[1];
  rows[0].v[1] = rows[1].v[0];
  rows[1].v[0] = above;
}
REGATTA_INLINE Vec exp2_below0(Vec a) {
  return each([&](int i) { return a.v[i] < -126.0f ? 0.0f : __builtin_exp2f(a.v[i]); });
}
REGATTA_INLINE Vec keep_lanes(Vec a, int begin, int end, Vec other) {
  return each([&](int i) { return i >= begin && i < end ? a.v[i] : other.v[i]; });
}
REGATTA_INLINE uint32_t ge_mask(Vec a, Vec b) {
  return static_cast<uint32_t>(a.v[0] >= b.v[0]) | static_cast<uint32_t>(a.v[1] >= b.v[1]) << 1;
}
REGATTA_INLINE Vec where_ge(Vec a, Vec b, Vec x) {
  return each([&](int i) { return a.v[i] >= b.v[i] ? x.v[i] : 0.0f; });
}
REGATTA_INLINE Vec max_magnitude(Vec m, Vec a) {
  return each([&](int i) {
    const float magnitude = __builtin_fabsf(a.v[i]);
    return magnitude <= m.v[i] || m.v[i] != m.v[i] ? m.v[i] : magnitude;
  });
}
REGATTA_INLINE float reduce_magnitude(Vec m) {
  const float a = m.v[0], b = m.v[1];
  return a != a || a >= b ? a : b;
}
REGATTA_INLINE int32_t store_int8(const Vec* a, int8_t* p) {
  int32_t sum = 0;
  for (int i = 0; i < 32; ++i) {
    const float x = a[i / 2].v[i % 2];
    p[i] = static_cast<int8_t>(__builtin_rintf(x > 127.0f ? 127.0f : x >= -127.0f ? x : -127.0f));
    sum += p[i];
  }
  return sum;
}

}  // namespace regatta::cpu::REGATTA_ISA
