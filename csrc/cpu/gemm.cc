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

Status find_gemm(const std::string& scheme, const Weight& weight, DType activation_dtype, Isa isa,
                 Gemm* gemm) {
  std::string known;
  for (const Scheme* candidate : schemes()) {
    if (scheme != candidate->name) {
      known += (known.empty() ? "" : ", ") + std::string(candidate->name);
      continue;
    }
    Status status = candidate->check(weight, activation_dtype);
    if (!status.ok()) return status;
    gemm->weight = weight;
    gemm->kernels = candidate->kernels(isa, activation_dtype, weight);
    if (candidate->transform) gemm->transform = candidate->transform(weight, activation_dtype);
    if (gemm->kernels) return {};
    return Status::error("scheme '" + scheme + "' has no " + isa_name(isa) + " kernel for " +
                         dtype_name(activation_dtype) + " activations");
  }
  return Status::error("scheme '" + scheme + "' is not known (known: " + known + ")");
}

std::string scheme_at(const std::string& schemes, int index, int count) {
  if (schemes.find(',') == std::string::npos) return schemes;
  size_t begin = 0;
  int i = 0;
  std::string found;
  for (;; ++i) {
    const size_t end = std::min(schemes.find(',', begin), schemes.size());
    if (i == index) found = schemes.substr(begin, end - begin);
    if (end == schemes.size()) break;
    begin = end + 1;
  }
  return i + 1 == count ? found : schemes;
}

}  // namespace regatta::cpu
