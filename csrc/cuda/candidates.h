// Tables of kernels, and the choice among them: a function of a problem and of the GPU alone. No
// CUDA: any C++ compiler takes it. (Products have a table of their own kind: gemm/select.h.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace regatta::cuda {

constexpr int kAllArchitectures = 999;
constexpr int64_t kAnyTokens = int64_t{1} << 62;

// A row of a table. Problem has num_tokens and is_batch_invariant.
template <class Problem, class Kernel>
struct Candidate {
  const char* name;  // what REGATTA_KERNEL calls it
  Kernel kernel;
  int min_arch, max_arch;                  // compute capability * 10
  std::string (*refuses)(const Problem&);  // why it cannot, or ""; null: it does not refuse
  // A row has the same bits whatever rows are beside it: these alone serve the batch-invariant
  // mode.
  bool is_alike = false;
  int64_t min_tokens = 0, max_tokens = kAnyTokens;  // for which it is the best choice

  std::string reason_against(const Problem& p, int architecture) const {
    if (architecture < min_arch || architecture > max_arch) {
      const bool later = max_arch == kAllArchitectures;
      return "needs sm_" + std::to_string(min_arch) + (later ? " or later" : "");
    }
    if (p.is_batch_invariant && !is_alike) return "not batch-invariant";
    if (p.num_tokens < min_tokens || p.num_tokens > max_tokens) {
      return "not for this number of tokens";
    }
    return refuses == nullptr ? "" : refuses(p);
  }
};

// The first row that takes it; null where none does. force: the name of the only ones to consider,
// unless empty. reasons, unless null: what each said that did not.
template <class Problem, class Kernel, size_t kCount>
const Candidate<Problem, Kernel>* select(const Candidate<Problem, Kernel> (&table)[kCount],
                                         const Problem& problem, int architecture,
                                         const std::string& force = "",
                                         std::string* reasons = nullptr) {
  for (const Candidate<Problem, Kernel>& row : table) {
    if (!force.empty() && force != row.name) continue;
    const std::string reason = row.reason_against(problem, architecture);
    if (reason.empty()) return &row;
    if (reasons != nullptr) *reasons += std::string("\n  ") + row.name + ": " + reason;
  }
  return nullptr;
}

}  // namespace regatta::cuda
