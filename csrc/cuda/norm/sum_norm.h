// How a block ends where its last product cannot do it, and how the next one begins.
#pragma once

#include "regatta/blocks.h"
#include "regatta/cuda_ops.h"

namespace regatta::cuda {

// What experts made: row t is the sum over j < top_k of shares[t, j] times row places[t, j] of
// `made` (of place -1: 0), in that order, plus shared_gate[t] (or 1) times row t of `shared`;
// rounded.
struct MadeOfParts {
  const int32_t* places = nullptr;  // [num_rows, top_k]; null: there are no parts
  const float* shares = nullptr;    // [num_rows, top_k]
  int64_t top_k = 0;
  const void* shared = nullptr;        // [num_rows, width] or null
  const float* shared_gate = nullptr;  // [num_rows] or null
  bool ready = false;                  // all but `made` may be read ahead of pdl_wait(), and source
};

// Of several ranks `made`, of parts too, is first summed over them and rounded.
// total = source_scale * source + made_scale * made, where `post_norm` is of made or of the sum.
// out = total; normed = next_norm(out).
struct SumNormParams {
  const void* made = nullptr;  // [num_rows, width]; with parts of `places`
  MadeOfParts parts;
  bool over_ranks = false;
  void* summed = nullptr;  // [num_rows, width], over ranks: scratch; may be made without parts
  const void* source = nullptr;  // [num_rows, width]; null: nothing is added
  float source_scale = 1.0f, made_scale = 1.0f;
  Norm post_norm;
  NormWeights post_weights;
  Placement post_norm_of = Placement::kOutput;
  void* out = nullptr;  // [num_rows, width]; may be made or source
  Norm next_norm;
  NormWeights next_weights;
  void* normed = nullptr;  // [num_rows, width], if there is a next norm
  int64_t num_rows = 0, width = 0;
  DType dtype = DType::kBFloat16;
};

Status sum_norm(const SumNormParams& params, const Launch& launch);

}  // namespace regatta::cuda
