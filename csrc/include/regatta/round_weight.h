// A float matrix as codes and scales: the rules of predict/schemes/_rounding.py, bit for bit.
//
// N out_features, K in_features, G groups of columns.
#pragma once

#include <cstdint>

#include "regatta/types.h"

struct CUstream_st;

namespace regatta {

enum class RoundingRule : uint8_t {
  kInt8,  // -127..127, scale = absmax / 127
  kInt4,  // 0..15 around 8, the scale of six that has the least squared error
  kE4M3,  // bits of e4m3, scale = absmax / 448
};

struct RoundWeightParams {
  const void* weight = nullptr;  // [N, K]
  uint8_t* codes = nullptr;      // [N, K]; int8 of kInt8 and kInt4
  float* scale = nullptr;        // [N, G]; with block_rows > 1 [ceil(N / block_rows), G]
  float* zero = nullptr;         // [N, G] of kInt4: 8
  int64_t out_features = 0, in_features = 0;
  int64_t group_size = 0;  // columns that share a scale; with block_rows 1 it divides K
  int64_t block_rows = 1;  // rows that do; more than 1 of kE4M3 alone
  RoundingRule rule = RoundingRule::kInt8;
  DType dtype = DType::kBFloat16;  // of weight: float32, bfloat16 or float16
};

namespace cuda {
Status round_weight(const RoundWeightParams& params, CUstream_st* stream);
}

}  // namespace regatta
