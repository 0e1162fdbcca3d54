#include "gemm.h"

#include <vector>

namespace regatta::cpu {
namespace {

std::vector<const Scheme*>& schemes() {
  static std::vector<const Scheme*> table;
  return table;
}

}  // namespace

SchemeEntry::SchemeEntry(const Scheme* scheme) { schemes().push_back(scheme); }

Status find_gemm(const std::string& scheme, const Weight& weight, DType activation_dtype, Isa isa,
                 const GemmKernels** kernels) {
  std::string known;
  for (const Scheme* candidate : schemes()) {
    if (scheme != candidate->name) {
      known += (known.empty() ? "" : ", ") + std::string(candidate->name);
      continue;
    }
    Status status = candidate->check(weight, activation_dtype);
    if (!status.ok()) return status;
    *kernels = candidate->kernels(isa, activation_dtype);
    if (*kernels) return {};
    return Status::error("scheme '" + scheme + "' has no " + isa_name(isa) + " kernel for " +
                         dtype_name(activation_dtype) + " activations");
  }
  return Status::error("scheme '" + scheme + "' is not known (known: " + known + ")");
}

}  // namespace regatta::cpu
