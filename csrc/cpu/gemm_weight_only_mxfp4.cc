// Scheme "weight_only_mxfp4": e2m1 codes with a scale for each 32 values of K, a power of two in
// MXFP4 checkpoints (OCP Microscaling Formats 1.0). Packed as regatta/pack_quantized.h says.
// gemm_codes.cc multiplies.
//
// The nibbles of a pair along K are 16 bits apart, so that a shift puts both where the table is
// asked from.
#include "gemm_quantized.h"

namespace regatta::cpu {
namespace {

constexpr SchemeId kId = SchemeId::kWeightOnlyMxfp4;

// packed, scales, a [1] that weight-only schemes do not read, perm.
Status check(const Weight& weight, DType) {
  Status status = check_quantized(kId, weight);
  if (!status.ok()) return status;
  const QuantizedLayout layout = quantized_layout(kId, weight);
  if (layout.has_zeros || layout.num_groups != layout.num_blocks()) {
    return Status::error("scales of the weight_only_mxfp4 weight are " +
                         shape_string(weight.tensors[1]) + ", expected one for each 32 of " +
                         std::to_string(weight.in_features) + " inputs and no zero points");
  }
  return check_per_input(kId, weight, 3, "perm", DType::kInt32);
}

const GemmKernels* kernels(Isa isa, DType dtype, const Weight&) {
  return float_row_kernels(CodeKind::kE2m1, isa, dtype, false);
}

RowTransform transform(const Weight& weight, DType) {
  RowTransform result;
  result.perm = per_input<int32_t>(weight, 3);
  return result;
}

constexpr Scheme kScheme = {kId, check, kernels, transform};
const SchemeEntry kEntry(&kScheme);

}  // namespace
}  // namespace regatta::cpu
