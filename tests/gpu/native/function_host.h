// The functions of an MLP in float64.
#pragma once

#include <algorithm>
#include <cmath>

#include "regatta/activate.h"

namespace regatta::native {

inline double function_of(Function function, double x) {
  switch (function) {
    case Function::kSilu:
      return x / (1 + std::exp(-x));
    case Function::kGelu:
      return x / 2 * (1 + std::erf(x / std::sqrt(2.)));
    case Function::kGeluTanh:
      return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Function::kRelu:
      return std::max(x, 0.);
    case Function::kReluSquared:
      return std::max(x, 0.) * std::max(x, 0.);
  }
  return NAN;
}

}  // namespace regatta::native
