// The functions of an MLP (regatta/activate.h) on vectors; behind rows.inl.
namespace regatta::cpu::REGATTA_ISA {

// x / 2 * (1 + erf(x / sqrt(2))). The error function by Abramowitz and Stegun's 7.1.26, whose
// absolute error is at most 1.5e-7.
REGATTA_INLINE Vec gelu(Vec x) {
  const Vec size = max(x, zero() - x), z = size * set1(0.70710678f);
  const Vec t = set1(1.0f) / fma(set1(0.3275911f), z, set1(1.0f));
  Vec p = fma(set1(1.061405429f), t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  // Half of what erf lacks to 1: of the normal distribution, what lies beyond |x|.
  const Vec beyond = p * t * exp(zero() - z * z) * set1(0.5f);
  return fnma(size, beyond, max(x, zero()));
}

REGATTA_INLINE Vec gelu_tanh(Vec x) {
  const Vec cubic = fma(set1(0.044715f) * x * x, x, x);
  return x * sigmoid(cubic * set1(1.59576912f));  // 2 sqrt(2 / pi)
}

REGATTA_INLINE Vec relu(Vec x) { return max(x, zero()); }

template <Function kFunction>
REGATTA_INLINE Vec apply(Vec x) {
  if constexpr (kFunction == Function::kSilu) return silu(x);
  if constexpr (kFunction == Function::kGelu) return gelu(x);
  if constexpr (kFunction == Function::kGeluTanh) return gelu_tanh(x);
  if constexpr (kFunction == Function::kRelu) return relu(x);
  if constexpr (kFunction == Function::kReluSquared) return relu(x) * relu(x);
}

template <Function kFunction>
struct FunctionTag {
  static constexpr Function value = kFunction;
};

// body(FunctionTag) for a function that is known at run time.
template <class Body>
REGATTA_INLINE auto with_function(Function function, Body&& body) {
  switch (function) {
    case Function::kGelu:
      return body(FunctionTag<Function::kGelu>());
    case Function::kGeluTanh:
      return body(FunctionTag<Function::kGeluTanh>());
    case Function::kRelu:
      return body(FunctionTag<Function::kRelu>());
    case Function::kReluSquared:
      return body(FunctionTag<Function::kReluSquared>());
    case Function::kSilu:
      break;
  }
  return body(FunctionTag<Function::kSilu>());
}

// The smaller of x and `most`; a NaN of x stays.
REGATTA_INLINE Vec at_most(Vec x, Vec most) { return zero() - max(zero() - most, zero() - x); }

// function(gate) * up with a clamp, a slope and an offset (regatta/activate.h).
template <Function kFunction>
REGATTA_INLINE Vec gated(const Activation& of, Vec gate, Vec up) {
  if (of.clamp != 0.0f) {
    const Vec most = set1(of.clamp);
    gate = at_most(gate, most);
    up = max(zero() - most, at_most(up, most));
  }
  const Vec y =
      kFunction == Function::kSilu ? gate * sigmoid(set1(of.slope) * gate) : apply<kFunction>(gate);
  return y * (up + set1(of.up_offset));
}

// out = function(x), times up where there is one.
template <Function kFunction, class From, class To>
inline void activate_row(const From* x, const From* up, To* out, int64_t width) {
  for_lanes(width, [&](int64_t i, auto n) REGATTA_LAMBDA_INLINE {
    const Vec y = apply<kFunction>(load_n(x + i, n));
    store_n(out + i, up ? y * load_n(up + i, n) : y, n);
  });
}

// The same of any activation.
template <Function kFunction, class From, class To>
inline void activate_row(const Activation& of, const From* x, const From* up, To* out,
                         int64_t width) {
  if (of.is_plain()) return activate_row<kFunction>(x, up, out, width);
  for_lanes(width, [&](int64_t i, auto n) REGATTA_LAMBDA_INLINE {
    store_n(out + i, gated<kFunction>(of, load_n(x + i, n), load_n(up + i, n)), n);
  });
}

}  // namespace regatta::cpu::REGATTA_ISA
