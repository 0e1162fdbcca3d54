// What several of the plain loops do with a row of values or codes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "regatta/blocks.h"
#include "regatta/types.h"

namespace regatta::cuda {

constexpr float kFp8Max = 448.f;

inline float from_e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(mantissa), -9)
                              : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  if ((code & 127) == 127) return NAN;
  return code & 128 ? -magnitude : magnitude;
}

// Rounded to even; above the largest, the largest.
inline uint8_t to_e4m3(float x) {
  if (std::isnan(x)) return 127;
  const float magnitude = std::min(std::fabs(x), kFp8Max);
  int exponent = 0;  // magnitude in [2^(exponent - 1), 2^exponent)
  std::frexp(magnitude, &exponent);
  exponent = std::max(exponent, -5);
  // The mantissa's 8 is the exponent's lowest bit: what is rounded up carries into it.
  const auto mantissa = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 4 - exponent)));
  return static_cast<uint8_t>(((exponent + 5) * 8 + mantissa) | (std::signbit(x) ? 128 : 0));
}

inline float dot(const float* x, const float* y, int64_t size) {
  constexpr int kLanes = 16;  // sums side by side, for the compiler's vectors
  float sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] += x[i + lane] * y[i + lane];
  }
  float sum = 0.f;
  for (; i < size; ++i) sum += x[i] * y[i];
  for (const float each : sums) sum += each;
  return sum;
}

template <class T>
void read_row(const T* from, int64_t size, float* to) {
  for (int64_t i = 0; i < size; ++i) to[i] = to_float(from[i]);
}

template <class T>
void write_row(const float* from, int64_t size, T* to) {
  for (int64_t i = 0; i < size; ++i) from_float(from[i], to + i);
}

// The row as one that was written and read again.
template <class T>
void round_row(std::vector<float>* row) {
  for (float& x : *row) {
    T rounded;
    from_float(x, &rounded);
    x = to_float(rounded);
  }
}

template <class T>
void norm_row(const Norm& norm, const NormWeights& weights, std::vector<float>* row) {
  const auto* const weight = static_cast<const T*>(weights.weight);
  const auto* const bias = static_cast<const T*>(weights.bias);
  const auto width = static_cast<float>(row->size());
  float mean = 0.f, squares = 0.f;
  if (norm.kind == NormKind::kLayer) {
    for (float x : *row) mean += x / width;
  }
  for (float x : *row) squares += (x - mean) * (x - mean);
  const float scale = 1.f / std::sqrt(squares / width + norm.epsilon);
  for (size_t i = 0; i < row->size(); ++i) {
    const float factor = to_float(weight[i]) + (norm.plus_one ? 1.f : 0.f);
    (*row)[i] = ((*row)[i] - mean) * scale * factor + (bias == nullptr ? 0.f : to_float(bias[i]));
  }
}

}  // namespace regatta::cuda
