// The functions of an MLP (regatta/activate.h) on single values.
#pragma once

#include "regatta/activate.h"

namespace regatta::cuda {

template <Function kFunction>
__device__ __forceinline__ float apply(float x) {
  if constexpr (kFunction == Function::kSilu) return x / (1.f + __expf(-x));
  if constexpr (kFunction == Function::kGelu) return 0.5f * x * (1.f + erff(x * 0.70710678f));
  if constexpr (kFunction == Function::kGeluTanh) {
    // (1 + tanh(u)) / 2 is 1 / (1 + exp(-2u)), which loses nothing where tanh(u) is near -1.
    return x / (1.f + __expf(-1.59576912f * x * fmaf(0.044715f * x, x, 1.f)));
  }
  if constexpr (kFunction == Function::kRelu) return fmaxf(x, 0.f);
  if constexpr (kFunction == Function::kReluSquared) return fmaxf(x, 0.f) * fmaxf(x, 0.f);
}

// Of a function known at run time, on several values: the same branch for all of them.
template <int kCount>
__device__ __forceinline__ void apply(Function function, float (&x)[kCount]) {
  const auto each = [&](auto&& of) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = of(x[i]);
  };
  switch (function) {
    case Function::kSilu:
      return each([](float v) { return apply<Function::kSilu>(v); });
    case Function::kGelu:
      return each([](float v) { return apply<Function::kGelu>(v); });
    case Function::kGeluTanh:
      return each([](float v) { return apply<Function::kGeluTanh>(v); });
    case Function::kRelu:
      return each([](float v) { return apply<Function::kRelu>(v); });
    case Function::kReluSquared:
      return each([](float v) { return apply<Function::kReluSquared>(v); });
  }
}

// function(gate) * up with a clamp, a slope and an offset (regatta/activate.h). A NaN stays.
template <Function kFunction>
__device__ __forceinline__ float gated(const Activation& of, float gate, float up) {
  if (of.clamp != 0.f) {
    if (gate > of.clamp) gate = of.clamp;
    if (up > of.clamp) up = of.clamp;
    if (up < -of.clamp) up = -of.clamp;
  }
  const float y = kFunction == Function::kSilu ? gate / (1.f + __expf(-of.slope * gate))
                                               : apply<kFunction>(gate);
  return y * (up + of.up_offset);
}

}  // namespace regatta::cuda
