// Quantized weights from their canonical form into the layout that the CPU's kernels read.
#pragma once

#include "regatta/scheme.h"
#include "regatta/types.h"

namespace regatta {

// How the CPU stores a quantized [K in_features, N out_features] matrix, in panels of 32 output
// columns; G groups of K share a scale. Values outside the matrix are zero.
//
//   packed, 8 bits   uint8 [ceil(N/32), ceil(K/32) * 8, 32, 4]    4 codes along K, plus 128
//   packed, 4 bits   uint8 [ceil(N/32), ceil(K/32) * 4, 32, 4]    byte j: k = j low, k = 4 + j high
//   packed, e2m1     the same, but bytes 0 and 1 hold k = 0, 2, 4, 6 and bytes 2 and 3 k = 1, 3, 5,
//   7,
//                    each the low bits first: pairs along K are 16 bits apart
//   scales           float32 [ceil(N/32), G, 32], or with zero points [ceil(N/32), G, 2, 32]:
//                    the scales, then scale * zero of the codes as stored
struct QuantizedLayout {
  int bits = 8;  // 8 or 4
  int64_t in_features = 0, out_features = 0;
  int64_t num_groups = 1;
  bool has_zeros = false;

  int64_t num_panels() const { return (out_features + 31) / 32; }
  int64_t num_blocks() const { return (in_features + 31) / 32; }  // of K
  int64_t block_bytes() const { return 128 * bits; }              // of a panel: 32 x 32 codes
  int64_t panel_bytes() const { return num_blocks() * block_bytes(); }
  int64_t panel_scales() const { return num_groups * (has_zeros ? 2 : 1) * 32; }
  int rank_of_scales() const { return has_zeros ? 4 : 3; }
  void packed_shape(int64_t (&shape)[4]) const;
  void scales_shape(int64_t (&shape)[4]) const;
  // Values of K in a group: K for one group, K / num_groups if that is a multiple of 32, else (the
  // last group is shorter) the power of two that makes num_groups of K. 0 when there is none.
  int64_t group_size() const;
};

// Bits of a code: 8, 4, or 0 for a scheme that is not quantized with integers.
constexpr int quantized_bits(const SchemeInfo& info) {
  return info.activations == Activations::kE4M3 ? 0 : info.code_bits;
}

// w[n, k] = (codes[n, k] - zero[n, group of k]) * scale[n, group of k]; of e2m1 codes their value
// times that scale.
struct PackQuantizedParams {
  SchemeId scheme = SchemeId::kDense;
  const int8_t* codes = nullptr;  // [N, K]: -128..127, or 0..15
  const float* scale = nullptr;   // [N, G]
  const float* zero = nullptr;    // [N, G] or null: 0, of 4-bit codes 8, of e2m1 none
  QuantizedLayout layout;
  uint8_t* packed = nullptr;  // outputs, of the layout's shapes
  float* scales = nullptr;
};

namespace cpu {

// Fills layout->bits and layout->has_zeros; zero points that are all the usual one are not stored.
// An error when the scheme, the group size, a scale or a code is not what a kernel can take.
Status plan_pack_quantized(const PackQuantizedParams& params, QuantizedLayout* layout);
Status pack_quantized(const PackQuantizedParams& params);

}  // namespace cpu
}  // namespace regatta
