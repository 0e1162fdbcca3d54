// What stands around the products of an expert block: the router's choice, rows sorted by expert,
// and the sum of what the experts made. T tokens, H hidden size, E experts, K chosen for each
// token, P = T * K pairs of a token and an expert. All memory is the device's.
#pragma once

#include <cstdint>

#include "blocks/experts/block.h"
#include "regatta/cuda_ops.h"
#include "regatta/gemm.h"

namespace regatta::cuda {

// normed = norm(x); logits of the router, but for its bias; shared_gate_out = sigmoid(normed .
// shared_gate).
struct RouteParams {
  const void* x = nullptr;  // [T, H]
  Norm norm;                // none: normed is x
  NormWeights norm_weights;
  void* normed = nullptr;             // [T, H]
  const void* weight = nullptr;       // [E, H] of dtype
  const void* shared_gate = nullptr;  // [H] or null
  float* logits = nullptr;            // [T, E] or null: another product makes them
  float* shared_gate_out = nullptr;   // [T]
  int64_t num_tokens = 0, hidden_size = 0, num_experts = 0;
  DType dtype = DType::kBFloat16;
};
Status route(const RouteParams& params, const Launch& launch);

// The same of a step's tokens, by tensor cores: of normed rows as they are rounded.
Status route_step(const RouteParams& params, const Launch& launch);

// The choice that the logits make, as predict/nn/blocks.py has it. A row with a NaN goes to experts
// 0, 1, ... with shares of NaN, so that it spoils nothing but itself.
struct ChooseArgs {
  Router router;
  const float* logits = nullptr;      // [T, E]
  const float* bias = nullptr;        // [E] of the logits, or null
  const float* correction = nullptr;  // [E] or null
  int32_t* ids = nullptr;             // [T, K]: the best first; null of a single token
  float* shares = nullptr;            // [T, K]; alike
  int num_tokens = 0;
  // Experts whose weights are here, as many from the first on: `ids` count from that, and wrap
  // around, so that those of others lie behind.
  int first_expert = 0, num_own = 0;
};

// The choice, and its pairs sorted by expert, and by token among those of one. ends: as
// GemmParams::group_ends. Pairs of experts that are not here have no place and no row.
struct ChooseAndSortParams {
  ChooseArgs choose;
  const void* x = nullptr;    // [T, H]
  void* sorted = nullptr;     // [P, H]: each pair's row of x
  int32_t* ends = nullptr;    // [E]
  int32_t* places = nullptr;  // [T, K]: where each pair went; -1: nowhere
  int32_t* counts = nullptr;  // sort_counts(): room
  int64_t hidden_size = 0;
  DType dtype = DType::kBFloat16;
};
// A single token's experts, shared ones with them: the choice, both products, the sum of what they
// make by the shares, and the residual; of experts that are not here nothing. Of two tokens sorted
// rows are faster (measured on an H200).
struct OneTokenParams {
  ChooseArgs choose;
  const void* x = nullptr;             // [H]: normed
  const void* gate_up = nullptr;       // [E, 2 I, H] of dtype, or e4m3 codes where there are scales
  const void* gate_up_bias = nullptr;  // [E, 2 I] or null
  const float* gate_up_scale = nullptr;  // [E, 2 I], of codes
  const float* gate_up_act = nullptr;    // [1], of codes: as QuantizeRowsParams::static_scale
  const void* down = nullptr;            // [E, H, I], alike
  const void* down_bias = nullptr;       // [E, H] or null
  const float* down_scale = nullptr;     // [E, H]
  const float* down_act = nullptr;       // [1]
  const void* shared_gate_up = nullptr;  // [2 S, H], where S is not 0
  const void* shared_down = nullptr;     // [H, S]
  const float* shared_gate = nullptr;    // [1] or null
  void* inner = nullptr;                 // [S + K I]: room
  const void* source = nullptr;          // [H]; null: 0
  void* out = nullptr;                   // [H] = source_scale * source + made_scale * sum
  float* sumsq_out = nullptr;            // as GemmParams::sumsq_out, or null
  float source_scale = 1.f, made_scale = 1.f;
  int64_t hidden_size = 0, intermediate_size = 0, shared_size = 0;
  Activation activation;
  DType dtype = DType::kBFloat16;
};
Status one_token(const OneTokenParams& params, const Launch& launch);

// Values of ChooseAndSortParams::counts.
int64_t sort_counts(int64_t num_pairs, int64_t num_experts);
Status choose_and_sort(const ChooseAndSortParams& params, const Launch& launch);

// Whether one launch does all of it; else choose_and_sort() takes two, or of many pairs three. The
// second form takes them where told to; the lists are the same.
bool sorts_together(const ChooseAndSortParams& params);
Status choose_and_sort(const ChooseAndSortParams& params, bool together, const Launch& launch);

}  // namespace regatta::cuda
