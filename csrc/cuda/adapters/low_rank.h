// What adapters add to a linear's products (regatta/adapters.h), in two launches: each row's few
// sums x A^T, then their products with B, which the linear takes as its residual, or which are
// added to what it made. T rows, K input and N output features, R pages of the largest adapter. All
// memory is the device's.
#pragma once

#include <algorithm>
#include <cstdint>

#include "regatta/activate.h"
#include "regatta/adapters.h"
#include "regatta/cuda_ops.h"

namespace regatta::cuda {

constexpr int kMaxAdaptedParts = 3;
constexpr int kTileRows = 16;  // of one adapter, that are multiplied together

// Rows of one adapter, or of none: `count` of SortedRows::order from `first` on.
struct alignas(16) RowTile {
  int32_t adapter, first, count, unused;
};

// A call's rows by their adapters: what sort_rows() leaves.
struct SortedRows {
  int32_t* order = nullptr;      // [T] rows
  RowTile* tiles = nullptr;      // [T]: there are as many at most
  int32_t* num_tiles = nullptr;  // [1]
};

// Tiles of T rows, at most.
inline int64_t max_row_tiles(int64_t num_rows, int64_t num_adapters) {
  const int64_t used = std::min(num_rows, num_adapters + 1);
  return used + (num_rows - used) / kTileRows;
}

struct SortRowsParams {
  AdapterRows rows;
  int64_t num_rows = 0;
  SortedRows sorted;
};
Status sort_rows(const SortRowsParams& params, const Launch& launch);

// sums = x A^T of each row's pages, in parts of K that expand() adds up.
struct ShrinkParams {
  const void* x = nullptr;            // [T, K]
  const void* norm_weight = nullptr;  // [K] of an RMS norm of x, whose factor expand() takes; null
  AdapterRows rows;
  SortedRows sorted;
  Adapted which = Adapted::kQkv;
  LowRankWeights weights;
  int64_t num_rows = 0, in_features = 0, num_parts = 1;
  float* sums = nullptr;     // [T, shrink_splits(K), parts, R, kPageRanks]
  float* squares = nullptr;  // [T, shrink_splits(K)] of x; with a norm
  DType dtype = DType::kBFloat16;
};
int64_t shrink_splits(int64_t in_features);
Status shrink(const ShrinkParams& params, const Launch& launch);

// out = residual + what the adapters add; or a function of it. The first fields are those of
// shrink().
struct ExpandParams {
  const float* sums = nullptr;
  const float* squares = nullptr;  // null: without a norm
  float epsilon = 0.f;
  AdapterRows rows;
  SortedRows sorted;
  Adapted which = Adapted::kQkv;
  LowRankWeights weights;
  int64_t num_rows = 0, in_features = 0, out_features = 0, num_parts = 1;
  int64_t part_ends[kMaxAdaptedParts] = {};  // of columns
  const void* residual = nullptr;            // [T, N] or null
  // Not null: `out` is this function of the sums; and they are of `made`, in the residual's place,
  // which may be overwritten. Gated, gates are the first half of the columns.
  const Activation* activation = nullptr;
  void* made = nullptr;  // [T, N]
  void* out = nullptr;   // [T, N], gated [T, N / 2]
  DType dtype = DType::kBFloat16;
};
Status expand(const ExpandParams& params, const Launch& launch);

// Both in one launch, for few rows: whether it can be, on an sm_90, and that. What rows get then
// differs in bits from what two launches make.
bool adds_at_once_sm90(const ShrinkParams& down, const ExpandParams& up);
Status add_adapters_sm90(const ShrinkParams& down, const ExpandParams& up, const Launch& launch);

// Both, in one launch or two.
Status add_adapters(const ShrinkParams& down, const ExpandParams& up, const Launch& launch);

// Whether shrink() and expand() read `sorted`.
constexpr bool takes_tiles(DType dtype) { return dtype != DType::kFloat32; }

}  // namespace regatta::cuda
