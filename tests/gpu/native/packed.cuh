// Random packed weights, and what they stand for.
#pragma once

#include "product.cuh"

namespace regatta::native {

// Codes from `first` on. One draw seeds them all: a check's time would go into millions of draws.
inline std::vector<int8_t> random_codes(int64_t n, int first, int count, Random& random) {
  std::vector<int8_t> codes(n);
  uint64_t state = random.engine();
  for (int8_t& v : codes) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    v = static_cast<int8_t>(first + static_cast<int>((state >> 40) * count >> 24));
  }
  return codes;
}

// (code - zero) * scale of codes [n, k], scale and zero [n, groups].
inline std::vector<float> dequantized(const std::vector<int8_t>& codes,
                                      const std::vector<float>& scale,
                                      const std::vector<float>& zero) {
  std::vector<float> values(codes.size());
  const size_t columns = codes.size() / scale.size();
  for (size_t g = 0; g < scale.size(); ++g) {
    for (size_t i = g * columns; i < (g + 1) * columns; ++i) {
      values[i] = (codes[i] - zero[g]) * scale[g];
    }
  }
  return values;
}

// The values of e2m1 codes [n, k] times scale [n, groups].
inline std::vector<float> e2m1_dequantized(const std::vector<int8_t>& codes,
                                           const std::vector<float>& scale) {
  constexpr float kMagnitudes[8] = {0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f};
  std::vector<float> values(codes.size());
  const size_t columns = codes.size() / scale.size();
  for (size_t i = 0; i < codes.size(); ++i) {
    const float magnitude = kMagnitudes[codes[i] & 7] * scale[i / columns];
    values[i] = codes[i] & 8 ? -magnitude : magnitude;
  }
  return values;
}

// As MXFP4 has them.
inline float random_power(Random& random) { return std::ldexp(1.f, random.below(8) - 10); }

// Groups of 32 (of kWeightInt4, and all of kWeightMxfp4), 64 or 128 columns, or one.
inline int64_t random_groups(GemmOperands operands, int64_t k, Random& random) {
  if (operands == GemmOperands::kWeightMxfp4) return k / 32;
  const int64_t size = (operands == GemmOperands::kWeightInt4 ? 32 : 64) << random.below(3);
  return size <= 128 && k % size == 0 ? k / size : 1;
}

// A scale of kW4A8 as pack_weight() stores it: without the last eight bits.
inline float w4a8_rounded(float scale) {
  uint32_t bits;
  std::memcpy(&bits, &scale, 4);
  bits = (bits + 0x80) & ~0xffu;
  std::memcpy(&scale, &bits, 4);
  return scale;
}

constexpr GemmOperands kFormats[] = {GemmOperands::kWeightInt8, GemmOperands::kWeightInt4,
                                     GemmOperands::kWeightInt8Groups, GemmOperands::kWeightMxfp4,
                                     GemmOperands::kW4A8};
inline const char* name_of(GemmOperands operands) {
  return operands == GemmOperands::kDense              ? "dense"
         : operands == GemmOperands::kWeightInt8       ? "8 bits"
         : operands == GemmOperands::kWeightInt4       ? "4 bits"
         : operands == GemmOperands::kWeightInt8Groups ? "8 bits in groups"
         : operands == GemmOperands::kWeightMxfp4      ? "mxfp4"
                                                       : "w4a8";
}

// The columns of a case: MXFP4 has whole groups of 32.
inline int64_t columns_of(GemmOperands operands, int64_t k) {
  return operands == GemmOperands::kWeightMxfp4 ? (k + 31) / 32 * 32 : k;
}

}  // namespace regatta::native
