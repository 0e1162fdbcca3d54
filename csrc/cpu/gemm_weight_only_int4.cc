// Scheme "weight_only_int4": 4-bit weights, groups of 32, 64, 128, ... values of K, or all of a
// channel, with a scale each, symmetric (zero point 8) or with a zero point each. As
// gemm_weight_only_int8.cc, with two values of k per byte: one load, two ANDs and a shift make the
// operands of two vpdpbusd. Zero points take one more multiply-add per group, with the sum of the
// activations.
#include <utility>

#include "gemm_quantized.h"

#define REGATTA_FOREACH_VNNI
#define REGATTA_INL "gemm_int8.inl"
#include "foreach_isa.h"

namespace regatta::cpu {
namespace {

constexpr SchemeId kId = SchemeId::kWeightOnlyInt4;

// packed, scales, a [1] that weight-only schemes do not read, perm.
Status check(const Weight& weight, DType) {
  Status status = check_quantized(kId, weight);
  return status.ok() ? check_per_input(kId, weight, 3, "perm", DType::kInt32) : status;
}

const GemmKernels* kernels(Isa isa, DType dtype, const Weight& weight) {
  const bool zeros = quantized_layout(kId, weight).has_zeros;
  return REGATTA_QUANTIZED_KERNELS(isa, 4, false, dtype, zeros);
}

RowTransform transform(const Weight& weight, DType) {
  RowTransform result;
  result.perm = per_input<int32_t>(weight, 3);
  result.offset = quantized_layout(kId, weight).has_zeros ? 0 : 8;
  return result;
}

constexpr Scheme kScheme = {kId, check, kernels, transform};
const SchemeEntry kEntry(&kScheme);

}  // namespace
}  // namespace regatta::cpu
