#include "gemm.h"

#include <algorithm>
#include <vector>

namespace regatta::cpu {
namespace {

std::vector<const Scheme*>& schemes() {
  static std::vector<const Scheme*> table;
  return table;
}

}  // namespace

SchemeEntry::SchemeEntry(const Scheme* scheme) { schemes().push_back(scheme); }

Status find_gemm(SchemeId scheme, const Weight& weight, DType activation_dtype, Isa isa,
                 Gemm* gemm) {
  std::string known;
  for (const Scheme* candidate : schemes()) {
    if (scheme != candidate->id) {
      known += (known.empty() ? "" : ", ") + std::string(scheme_info(candidate->id).name);
      continue;
    }
    Status status = candidate->check(weight, activation_dtype);
    if (!status.ok()) return status;
    gemm->weight = weight;
    gemm->kernels = candidate->kernels(isa, activation_dtype, weight);
    if (candidate->transform) gemm->transform = candidate->transform(weight, activation_dtype);
    if (gemm->kernels) return {};
    return Status::error(std::string("scheme '") + scheme_info(scheme).name + "' has no " +
                         isa_name(isa) + " kernel for " + dtype_name(activation_dtype) +
                         " activations");
  }
  return Status::error(std::string("scheme '") + scheme_info(scheme).name +
                       "' is not known to the CPU (known: " + known + ")");
}

Gemm gemm_like(const Gemm& checked, SchemeId scheme, const TensorView* tensors,
               DType activation_dtype) {
  Gemm gemm = checked;
  gemm.weight.tensors = tensors;
  for (const Scheme* candidate : schemes()) {
    if (scheme != candidate->id || !candidate->transform) continue;
    gemm.transform = candidate->transform(gemm.weight, activation_dtype);
  }
  return gemm;
}

}  // namespace regatta::cpu
