// What adapters add to a linear's products (regatta/adapters.h), in two launches: each row's few
// sums x A^T, then their products with B, which the linear takes as its residual. T rows, K input
// and N output features, R pages of the largest adapter. All memory is the device's.
#pragma once

#include <cstdint>

#include "regatta/adapters.h"
#include "regatta/cuda_ops.h"

namespace regatta::cuda {

constexpr int kMaxAdaptedParts = 3;

// sums = x A^T of each row's pages, in parts of K that expand() adds up.
struct ShrinkParams {
  const void* x = nullptr;            // [T, K]
  const void* norm_weight = nullptr;  // [K] of an RMS norm of x, whose factor expand() takes; null
  AdapterRows rows;
  Adapted which = Adapted::kQkv;
  LowRankWeights weights;
  int64_t num_rows = 0, in_features = 0, num_parts = 1;
  float* sums = nullptr;     // [T, shrink_splits(K), parts, R, kPageRanks]
  float* squares = nullptr;  // [T, shrink_splits(K)] of x; with a norm
  DType dtype = DType::kBFloat16;
};
int64_t shrink_splits(int64_t in_features);
Status shrink(const ShrinkParams& params, const Launch& launch);

// out = residual + what the adapters add. The first fields are those of shrink().
struct ExpandParams {
  const float* sums = nullptr;
  const float* squares = nullptr;  // null: without a norm
  float epsilon = 0.f;
  AdapterRows rows;
  Adapted which = Adapted::kQkv;
  LowRankWeights weights;
  int64_t num_rows = 0, in_features = 0, out_features = 0, num_parts = 1;
  int64_t part_ends[kMaxAdaptedParts] = {};  // of columns
  const void* residual = nullptr;            // [T, N] or null
  void* out = nullptr;                       // [T, N]
  DType dtype = DType::kBFloat16;
};
Status expand(const ExpandParams& params, const Launch& launch);

}  // namespace regatta::cuda
