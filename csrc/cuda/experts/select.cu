// The candidates for what stands around and within the products of experts. Host code alone: any
// C++ compiler takes it.
#include "cuda/candidates.h"
#include "cuda/experts/select.h"
#include "cuda/integers.h"

namespace regatta::cuda {
namespace {

constexpr int64_t kMostRouterBytes = 16 << 20;  // of weights that all tiles of tokens read
constexpr int64_t kMostColumns = 10240;         // of `down`: on an H200, 6,144 gain and 11,264 lose

std::string refuses_norm(const ExpertProblem& p) {
  return p.has_norm && !p.has_shared_gate ? "" : "a shared gate reads rows, or there is no norm";
}

std::string refuses_one_token(const ExpertProblem& p) {
  if (p.weights == ExpertWeights::kOther) return "weights are neither dense nor e4m3 by rows";
  if (p.has_post_norm) return "a norm is behind the sum";
  if (p.dtype == DType::kFloat32) return "takes bfloat16 and float16";
  if (!p.gated) return "there is no gate";
  if (p.num_groups > 32) return "more than 32 groups of experts";
  // Columns of down, of all choices: sums of more are faster by many warps.
  if (p.shared_size + p.top_k * p.intermediate_size > kMostColumns) return "too many columns";
  const bool codes = p.weights == ExpertWeights::kCodes;
  for (const int64_t width : {p.hidden_size, p.intermediate_size, p.shared_size}) {
    if (width % (codes ? 16 : 8) != 0) return "rows are no whole vectors";
  }
  if (codes && (p.shared_size > 0 || p.hidden_size > kOneTokenCodes)) {
    return "of codes, rows are kept whole, and none is shared";
  }
  return "";
}

std::string refuses_together(const ExpertProblem& p) {
  if (p.num_tokens * p.top_k > kFewPairs) return "too many pairs";
  return p.hidden_size * dtype_size(p.dtype) % 16 == 0 ? "" : "rows are no whole vectors";
}

// Name, kernel, architectures, refusals, whether it is alike, tokens.
using R = RouterKernel;
constexpr Candidate<ExpertProblem, R> kRouters[] = {
    // By tensor cores, from so many tokens on.
    {"step", R::kStep, 90, 90, route_step_sm90_refuses, false, 3},
    // Fewer have their logits beside the norm, in as few blocks as there are multiprocessors.
    {"norm", R::kNormAndProduct, 0, kAllArchitectures, refuses_norm, false, 25},
    {"norm", R::kRouteAndProduct, 0, kAllArchitectures, nullptr, false, 25},
    {"route", R::kRoute, 0, kAllArchitectures, nullptr, true},
};

using E = ExpertKernel;
constexpr Candidate<ExpertProblem, E> kExperts[] = {
    {"one_token", E::kOneToken, 0, kAllArchitectures, refuses_one_token, false, 0, 1},
    {"sorted", E::kSorted, 0, kAllArchitectures, nullptr, true},
};

using S = SortKernel;
constexpr Candidate<ExpertProblem, S> kSorts[] = {
    // With 128 tokens, one launch is as slow as two or slower.
    {"together", S::kTogether, 90, 90, refuses_together, true, 0, 64},
    {"together", S::kTogether, 0, kAllArchitectures, refuses_together, true, 0, kTokensOfBlock},
    {"apart", S::kApart, 0, kAllArchitectures, nullptr, true},
};

}  // namespace

std::string route_step_sm90_refuses(const ExpertProblem& p) {
  if (!p.has_plain_norm) return "takes an RMS norm without a bias";
  if (p.dtype == DType::kFloat32) return "takes bfloat16 and float16";
  if (p.hidden_size % 8 != 0 || p.hidden_size > kRouteStepColumns) {
    return "hidden_size " + std::to_string(p.hidden_size) + " (allowed: multiples of 8 up to " +
           std::to_string(kRouteStepColumns) + ")";
  }
  if (p.num_tokens > 256) return "more than 256 tokens";
  const int64_t bytes = p.num_experts * p.hidden_size * dtype_size(p.dtype);
  return ceil_div(p.num_tokens, kRouteStepTokens) * bytes <= kMostRouterBytes
             ? ""
             : "its tiles read too much";
}

// The last row of each table takes all.
RouterKernel select_router(const ExpertProblem& problem, int architecture) {
  return select(kRouters, problem, architecture)->kernel;
}
ExpertKernel select_experts(const ExpertProblem& problem, int architecture) {
  return select(kExperts, problem, architecture)->kernel;
}
SortKernel select_sort(const ExpertProblem& problem, int architecture) {
  return select(kSorts, problem, architecture)->kernel;
}

}  // namespace regatta::cuda
