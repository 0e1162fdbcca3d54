// What adapters add to a linear's products (regatta/adapters.h), in two launches: each row's few
// sums x A^T, then their products with B, which the linear takes as its residual, or which are
// added to what it made. T rows, K input and N output features, R pages of the largest adapter. All
// memory is the device's.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/host.h"
#include "regatta/activate.h"
#include "regatta/adapters.h"
#include "regatta/cuda_ops.h"
#include "regatta/gemm.h"

namespace regatta::cuda {

constexpr int kMaxAdaptedParts = 3;
constexpr int kTileRows = 16;  // of one adapter, that are multiplied together

// A call's rows by their adapters, in tiles: what sort_rows() leaves. A tile is one record, so that
// a kernel waits for memory once before it asks for the adapter's pages:
//   [0]                         rows of it; 0: there are no more tiles
//   [kTileFirstRow + i]         row i, a row of the call for those that it has not
//   [kTileFirstRow + kTileRows + which * R + n]   page n for a linear, below 0: no more of them
constexpr int kTileFirstRow = 2;
struct SortedRows {
  int32_t* tiles = nullptr;
  int stride = 0;  // of records
};

constexpr int64_t tile_stride(int64_t max_pages) {
  return round_up(kTileFirstRow + kTileRows + kNumAdapted * max_pages, 32);
}

// Blocks for the tiles of T rows: enough for rows of a few adapters. Of more they take several.
inline int64_t num_tile_blocks(int64_t num_rows) {
  constexpr int64_t kAdapters = 8;
  return std::min(num_rows, ceil_div(num_rows, kTileRows) + kAdapters);
}

// Words of SortedRows::tiles: records for as many tiles as there may be, and for every block's
// last.
inline int64_t tile_words(int64_t num_rows, int64_t max_pages) {
  return (num_rows + num_tile_blocks(num_rows)) * tile_stride(max_pages);
}

struct SortRowsParams {
  AdapterRows rows;
  int64_t num_rows = 0;
  SortedRows sorted;
};
Status sort_rows(const SortRowsParams& params, const Launch& launch);

// The sums that shrink() makes and expand() takes.
struct LowRankSums {
  AdapterRows rows;
  bool ready = false;  // rows.ids are not of the launches ahead
  SortedRows sorted;
  Adapted which = Adapted::kQkv;
  LowRankWeights weights;
  int64_t num_rows = 0, in_features = 0, num_parts = 1;
  float* sums = nullptr;     // [T, shrink_splits(K), parts, R, kPageRanks]
  float* squares = nullptr;  // [T, shrink_splits(K)] of x; of expand() null: without a norm
  DType dtype = DType::kBFloat16;
};

// sums = x A^T of each row's pages, in parts of K that expand() adds up.
struct ShrinkParams : LowRankSums {
  const void* x = nullptr;            // [T, K]
  const void* norm_weight = nullptr;  // [K] of an RMS norm of x, whose factor expand() takes; null
  // Of the linear's own product: with `codes` not null it also does what quantize_rows() does.
  QuantizeRowsParams quantize;
};
int64_t shrink_splits(int64_t in_features);
// Whether shrink() of these also makes the codes that `quantize` asks for: of few rows.
bool shrink_quantizes(const ShrinkParams& params, const QuantizeRowsParams& quantize);
Status shrink(const ShrinkParams& params, const Launch& launch);

// out = residual + what the adapters add; or a function of it.
struct ExpandParams : LowRankSums {
  float epsilon = 0.f;
  int64_t out_features = 0;
  int64_t part_ends[kMaxAdaptedParts] = {};  // of columns
  const void* residual = nullptr;            // [T, N] or null
  // Not null: `out` is this plain function of the sums. Gated, gates are the first half of columns.
  const Activation* activation = nullptr;
  void* out = nullptr;  // [T, N], gated [T, N / 2]
};
Status expand(const ExpandParams& params, const Launch& launch);

// Whether shrink() and expand() read `sorted`, of so many rows. Rows of tiles get other bits than
// rows alone.
inline bool takes_tiles(DType dtype, int64_t num_rows) {
  constexpr int64_t kFewRows = 16;
  return dtype != DType::kFloat32 && (is_batch_invariant || num_rows > kFewRows);
}

}  // namespace regatta::cuda
