// What adapters add to a product of the composed operators: launches ahead of it, and the memory
// that these need. Host code alone.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "cuda/adapters/low_rank.h"
#include "cuda/product.h"

namespace regatta::cuda {

// Memory for the widest of some linears: first `count` each, then `take`.
struct AddingScratch {
  float* sums = nullptr;
  float* squares = nullptr;
  void* added = nullptr;  // [T, N]: what adapters add to a product, and its residual
  SortedRows sorted;

  // Of a linear of these rows, where they may have adapters. residual: of the product, whose
  // columns are as many; 0 without.
  void count(const AdapterRows& adapters, int64_t rows, int64_t in_features, int64_t parts,
             int64_t residual) {
    if (adapters.ids == nullptr) return;
    const int64_t pieces = rows * shrink_splits(in_features);
    num_sums_ = std::max(num_sums_, pieces * parts * adapters.max_pages * kPageRanks);
    num_squares_ = std::max(num_squares_, pieces);
    num_added_ = std::max(num_added_, rows * residual);
    num_words_ = std::max(num_words_, tile_words(rows, adapters.max_pages));
    sorted.stride = static_cast<int>(tile_stride(adapters.max_pages));
  }

  void take(Arena& arena, DType dtype) {
    const auto values = [&](int64_t count, int64_t size) {
      return count == 0 ? nullptr : arena.take(count * size);
    };
    sums = static_cast<float*>(values(num_sums_, 4));
    squares = static_cast<float*>(values(num_squares_, 4));
    added = values(num_added_, dtype_size(dtype));
    sorted.tiles = static_cast<int32_t*>(values(num_words_, 4));
  }

 private:
  int64_t num_sums_ = 0, num_squares_ = 0, num_added_ = 0, num_words_ = 0;
};

// What adapters do to a linear's products: the sums of its rows, and what is made of them.
struct Adding {
  ShrinkParams down;
  ExpandParams up;
};

// Of `product`. part_sizes: a size of 0 is no part. x: [rows, in_features] it multiplies, behind an
// RMS norm of this weight unless that is null. ready: rows.ids are not of the launches ahead. Rows
// that take tiles must be in scratch.sorted.
inline Adding adding_to(const Product& product, const LowRankWeights& weights,
                        const AdapterRows& rows, Adapted which,
                        std::initializer_list<int64_t> part_sizes, const void* x,
                        const void* norm_weight, bool ready, DType dtype,
                        const AddingScratch& scratch) {
  Adding adding;
  ShrinkParams& down = adding.down;
  ExpandParams& up = adding.up;
  int64_t end = 0;
  up.num_parts = 0;
  for (const int64_t size : part_sizes) {
    if (size > 0) up.part_ends[up.num_parts++] = end += size;
  }
  down.x = x;
  down.norm_weight = norm_weight;
  down.rows = rows;
  down.ready = ready;
  down.sorted = scratch.sorted;
  down.which = which;
  down.weights = weights;
  down.num_rows = product.num_rows;
  down.in_features = product.in_features;
  down.num_parts = up.num_parts;
  down.sums = scratch.sums;
  down.squares = scratch.squares;
  down.dtype = dtype;
  static_cast<LowRankSums&>(up) = down;
  if (norm_weight == nullptr) up.squares = nullptr;
  up.epsilon = product.epsilon;
  up.out_features = product.out_features;
  return adding;
}

// What adapters add, and `residual` or null, becomes the product's residual.
inline Status add_ahead(Product& product, Adding& adding, const void* residual,
                        const AddingScratch& scratch, const Launch& launch_on) {
  adding.up.residual = residual;
  adding.up.out = scratch.added;
  product.residual = adding.up.out;
  REGATTA_RETURN_IF_ERROR(shrink(adding.down, launch_on));
  return expand(adding.up, launch_on);
}

}  // namespace regatta::cuda
