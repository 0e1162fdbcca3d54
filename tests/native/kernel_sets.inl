// What vec.h promises of numbers that are none, of ends of ranges and of rests, as each set gives
// it: numbers that scalar's are compared with. See kernel_sets.cc.
namespace regatta::cpu::REGATTA_ISA {

constexpr int kProbes = 48;   // a multiple of all sets' lanes
constexpr int kAnswers = 16;  // for each

// out: [kAnswers][kProbes], of x and y [kProbes].
inline void probe(const float* x, const float* y, float* out) {
  constexpr int kLanes = Vec::kLanes;
  for (int i = 0; i < kProbes; i += kLanes) {
    const Vec a = load(x + i), b = load(y + i);
    Vec magnitude = max_magnitude(max_magnitude(zero(), a), b);
    const Vec answers[] = {max(a, b),
                           min(a, b),
                           exp(a),
                           exp2_below0(min(a, zero())),
                           sigmoid(a),
                           where_ge(a, b, set1(3.0f)),
                           magnitude,
                           fma(a, b, a),
                           fnma(a, b, a),
                           sqrt(a),
                           keep_lanes(a, 0, kLanes, b),
                           a / b};
    for (int k = 0; k < 12; ++k) store(out + k * kProbes + i, answers[k]);
    bf16 halves[kLanes];
    fp16 others[kLanes];
    store(halves, a);
    store(others, a);
    store(out + 12 * kProbes + i, load(halves));
    store(out + 13 * kProbes + i, load(others));
    const uint32_t mask = ge_mask(a, b);
    for (int j = 0; j < kLanes; ++j) out[14 * kProbes + i + j] = static_cast<float>(mask >> j & 1);
    float wrong = 0.0f;  // of rests: what is behind them is not written, and 0 where it is loaded
    for (int n = 0; n <= kLanes; ++n) {
      float rest[kLanes] = {}, whole[kLanes];
      store_n(rest, a, n);
      store(whole, load_n(x + i, n));
      for (int j = 0; j < kLanes; ++j) {
        const float expected = j < n ? x[i + j] : 0.0f;
        wrong += __builtin_memcmp(rest + j, &expected, 4) != 0;
        wrong += __builtin_memcmp(whole + j, &expected, 4) != 0;
      }
    }
    for (int j = 0; j < kLanes; ++j) out[15 * kProbes + i + j] = wrong;
  }
}

// Sums of rests, which lanes must not change: 33 numbers.
inline float probe_sum(const float* x) {
  Vec sum = zero(), most = set1(-1e30f);
  for (int i = 0; i < 33; i += Vec::kLanes) {
    const int n = 33 - i < Vec::kLanes ? 33 - i : Vec::kLanes;
    const Vec value = load_n(x + i, n);
    sum = sum + value;
    most = max(most, keep_lanes(value, 0, n, most));
  }
  return reduce_add(sum) + reduce_max(most);
}

// 32 numbers as int8, and their sum.
inline int32_t probe_int8(const float* x, int8_t* out) {
  Vec values[32 / Vec::kLanes];
  for (int v = 0; v < 32 / Vec::kLanes; ++v) values[v] = load(x + v * Vec::kLanes);
  return store_int8(values, out);
}

}  // namespace regatta::cpu::REGATTA_ISA
