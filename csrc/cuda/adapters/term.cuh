// What adapters add to a product, for kernels of products that add it themselves.
#pragma once

#include "cuda/adapters/tiles.cuh"

namespace regatta::cuda {
namespace {

// Asks for the 128 bytes around `p`, into L2.
__device__ __forceinline__ void prefetch_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// ExpandParams, as kernels take it.
struct LowRankTerm {
  const float* sums;
  const float* squares;  // null: factors are 1
  const int32_t* ids;
  PageTables tables;
  const void* b;
  float epsilon, inverse_width;
  int num_parts, splits, out_features;
  int part_ends[kMaxAdaptedParts - 1];
  bool ready;  // ids may be read ahead of pdl_wait()

  __device__ __forceinline__ int part_of(int column) const {
    return (column >= part_ends[0]) + (column >= part_ends[1]);
  }
  // Sum number `rank`, counted over all pages, of a row and part: its pieces in their order.
  __device__ __forceinline__ float sum_of(int64_t row, int part, int rank) const {
    float sum = 0.f;
#pragma unroll 8
    for (int split = 0; split < splits; ++split) {
      const int64_t piece = (row * splits + split) * num_parts + part;
      sum += __ldcg(sums + piece * tables.max_pages * kRanks + rank);
    }
    return sum;
  }
  // By which a row's sums are to be multiplied.
  __device__ __forceinline__ float factor_of(int64_t row) const {
    if (squares == nullptr) return 1.f;
    float square = 0.f;
#pragma unroll 8
    for (int split = 0; split < splits; ++split) square += __ldcg(squares + row * splits + split);
    return rsqrtf(square * inverse_width + epsilon);
  }
  // B of a rank of a page, from `column` on.
  template <class T>
  __device__ __forceinline__ const T* b_of(int page, int rank, int column) const {
    const int64_t row = static_cast<int64_t>(page) * kRanks + rank;
    return static_cast<const T*>(b) + row * out_features + column;
  }
};

inline LowRankTerm make_term(const ExpandParams& p) {
  LowRankTerm t = {};
  t.sums = p.sums;
  t.squares = p.squares;
  t.ids = p.rows.ids;
  t.tables = tables_of(p.rows, p.which, p.weights.num_pages);
  t.b = p.weights.b;
  t.epsilon = p.epsilon;
  t.inverse_width = 1.f / static_cast<float>(p.in_features);
  t.num_parts = static_cast<int>(p.num_parts);
  t.splits = static_cast<int>(shrink_splits(p.in_features));
  t.out_features = static_cast<int>(p.out_features);
  for (int i = 0; i + 1 < kMaxAdaptedParts; ++i) {
    t.part_ends[i] = static_cast<int>(i < p.num_parts ? p.part_ends[i] : p.out_features);
  }
  t.ready = p.ready;
  return t;
}

}  // namespace
}  // namespace regatta::cuda
