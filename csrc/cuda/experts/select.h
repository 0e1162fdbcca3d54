// Which kernels route, sort and multiply for experts: a function of the block and of the GPU alone.
//
// No CUDA and no device calls: any C++ compiler takes this file and select.cu, and
// tests/csrc/test_select_kernels.py asks them on a CPU.
#pragma once

#include <string>

#include "regatta/types.h"

namespace regatta::cuda {

constexpr int64_t kRouteStepTokens = 16;     // of a tile of route_step_sm90
constexpr int64_t kRouteStepColumns = 8192;  // that its cluster has room for
constexpr int64_t kFewPairs = 4096;          // up to which every block counts all ids itself
constexpr int64_t kTokensOfBlock = 8;        // for which it chooses at once, without losing time
constexpr int64_t kOneTokenCodes = 8192;     // columns of a row of codes, which is kept whole

// What the linears of a block are, the shared ones with them.
enum class ExpertWeights : uint8_t {
  kDense,
  kCodes,  // e4m3, with a scale for each row
  kOther,
};

// A block as far as the choice depends on it.
struct ExpertProblem {
  DType dtype = DType::kBFloat16;
  int64_t num_tokens = 1, hidden_size = 2048, intermediate_size = 768, shared_size = 0;
  int64_t num_experts = 128, top_k = 8, num_groups = 1;
  ExpertWeights weights = ExpertWeights::kDense;
  bool has_norm = true, has_plain_norm = true;  // plain: RMS, no bias
  bool has_shared_gate = false, has_post_norm = false, gated = true;
  // A row has the same bits whatever rows are beside it.
  bool is_batch_invariant = false;
};

// How rows are normed and the router's logits made.
enum class RouterKernel : uint8_t { kStep, kNormAndProduct, kRouteAndProduct, kRoute };
// What the experts make of them.
enum class ExpertKernel : uint8_t { kOneToken, kSorted };
enum class SortKernel : uint8_t { kTogether, kApart };

// architecture: experts_capability().
RouterKernel select_router(const ExpertProblem& problem, int architecture);
ExpertKernel select_experts(const ExpertProblem& problem, int architecture);
SortKernel select_sort(const ExpertProblem& problem, int architecture);

// Why route_step() cannot on the GPUs that it is for, or "".
std::string route_step_sm90_refuses(const ExpertProblem& problem);

}  // namespace regatta::cuda
