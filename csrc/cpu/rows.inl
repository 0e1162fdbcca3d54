// Arithmetic on single rows, and how rows are shared out. Included by block.inl and by small ops.
namespace regatta::cpu::REGATTA_ISA {

// All lanes, known to the compiler: load_n() and store_n() take it for a number of lanes.
struct AllLanes {};
template <class T>
REGATTA_INLINE Vec load_n(const T* from, AllLanes) {
  return load(from);
}
template <class T>
REGATTA_INLINE void store_n(T* to, Vec a, AllLanes) {
  store(to, a);
}

// fn(index i, n) over a row: whole vectors with n = AllLanes, then the rest with n an int.
template <class Fn>
REGATTA_INLINE void for_lanes(int64_t width, Fn&& fn) {
  int64_t i = 0;
  for (; i + Vec::kLanes <= width; i += Vec::kLanes) fn(i, AllLanes());
  if (i < width) fn(i, static_cast<int>(width - i));
}

REGATTA_INLINE Vec tanh(Vec a) { return fma(set1(2.0f), sigmoid(a + a), set1(-1.0f)); }

// softcap * tanh(x / softcap)
REGATTA_INLINE Vec capped(Vec x, float softcap) {
  return tanh(x * set1(1.0f / softcap)) * set1(softcap);
}

inline int lanes_left(int64_t left) {
  return static_cast<int>(left < Vec::kLanes ? left : Vec::kLanes);
}

// out = a, converted.
template <class From, class To>
inline void copy_row(const From* a, To* out, int64_t width) {
  for_lanes(width, [&](int64_t i, auto n)
                       REGATTA_LAMBDA_INLINE { store_n(out + i, load_n(a + i, n), n); });
}

// out = a + b
template <class T>
inline void add_row(const T* a, const T* b, T* out, int64_t width) {
  for_lanes(width, [&](int64_t i, auto n) REGATTA_LAMBDA_INLINE {
    store_n(out + i, load_n(a + i, n) + load_n(b + i, n), n);
  });
}

// out[i] = x[i] / sqrt(mean(x^2) + epsilon) * weight[i], in float.
template <class In, class T>
inline void rms_norm_row(const In* x, const T* weight, float* out, int64_t width, float epsilon) {
  constexpr int kLanes = Vec::kLanes;
  Vec sums[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) {
      const Vec value = load(x + i + j * kLanes);
      sums[j] = fma(value, value, sums[j]);
    }
  }
  for (; i < width; i += kLanes) {
    const Vec value =
        width - i >= kLanes ? load(x + i) : load_n(x + i, static_cast<int>(width - i));
    sums[0] = fma(value, value, sums[0]);
  }
  const float sum = reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
  const Vec scale = set1(1.0f / __builtin_sqrtf(sum / static_cast<float>(width) + epsilon));
  for_lanes(width, [&](int64_t j, auto n) REGATTA_LAMBDA_INLINE {
    store_n(out + j, load_n(x + j, n) * scale * load_n(weight + j, n), n);
  });
}

// A norm of any kind (regatta/norm.h).
template <class T>
struct RowNorm {
  const T* weight;
  const T* bias;  // or null
  float epsilon;
  bool centered;  // the mean is taken off first
  bool plus_one;  // the factor is 1 + weight
};

// As rms_norm_row, of any kind.
template <class In, class T>
inline void norm_row(const In* x, const RowNorm<T>& norm, float* out, int64_t width) {
  if (!norm.centered && !norm.plus_one && !norm.bias) {
    return rms_norm_row(x, norm.weight, out, width, norm.epsilon);
  }
  float mean = 0.0f;
  if (norm.centered) {
    Vec sum = zero();
    for (int64_t i = 0; i < width; i += Vec::kLanes) {
      sum = sum + load_n(x + i, lanes_left(width - i));
    }
    mean = reduce_add(sum) / static_cast<float>(width);
  }
  const Vec center = set1(mean);
  Vec squares = zero();
  for_lanes(width, [&](int64_t i, auto n) REGATTA_LAMBDA_INLINE {
    Vec value = load_n(x + i, n) - center;
    if constexpr (std::is_same_v<decltype(n), int>) {
      value = keep_lanes(value, 0, n, zero());  // lanes past the end are not center below 0
    }
    squares = fma(value, value, squares);
  });
  const float variance = reduce_add(squares) / static_cast<float>(width);
  const Vec scale = set1(1.0f / __builtin_sqrtf(variance + norm.epsilon));
  const Vec one = set1(norm.plus_one ? 1.0f : 0.0f);
  for (int64_t i = 0; i < width; i += Vec::kLanes) {
    const int n = lanes_left(width - i);
    const Vec factor = load_n(norm.weight + i, n) + one;
    Vec value = (load_n(x + i, n) - center) * scale * factor;
    if (norm.bias) value = value + load_n(norm.bias + i, n);
    store_n(out + i, value, n);
  }
}

// Multiplicands of attention: float, or bf16 in pairs that one vdpbf16ps multiplies and adds.
#if REGATTA_HAS_BF16_DOT
constexpr bool kHasDot = true;
#else
constexpr bool kHasDot = false;
#endif
template <bool kDot>
struct Factor {
  using Type = float;
  static constexpr int kPerStep = 1;  // values of k per step and column
};
template <>
struct Factor<true> {
  using Type = bf16;
  static constexpr int kPerStep = 2;
};

template <class T>
constexpr bool uses_dot() {
  return kHasDot && std::is_same<T, bf16>::value;
}

// What queries are multiplied as, where activations are T.
template <class T>
using QueryOf = typename Factor<uses_dot<T>()>::Type;

// Rows a thread takes at a time from a loop over rows: few claims, still balanced.
inline int64_t rows_per_claim(const Team& team, int64_t num_rows) {
  const int64_t share = num_rows / (4 * team.num_threads());
  return share < 1 ? 1 : share;
}

// fn(row) for each row, shared out over the team. No barrier at the end.
template <class Fn>
inline void for_rows(Team& team, int64_t num_rows, Fn&& fn) {
  team.for_chunks(num_rows, rows_per_claim(team, num_rows), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) fn(row);
  });
}

// A second thread costs about a microsecond: small jobs stay on the caller's.
inline int threads_for_bytes(int64_t bytes) {
  constexpr int64_t kBytesPerThread = 64 << 10;
  return static_cast<int>(bytes / kBytesPerThread + 1);
}

}  // namespace regatta::cpu::REGATTA_ISA
