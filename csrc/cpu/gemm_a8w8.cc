// Schemes "a8w8" and "w4a8": int8 activations with one scale for each token (or, a8w8, one for all,
// from calibration), times int8 weights with a scale for each output channel, or 4-bit weights
// whose groups of K have a scale. Sums are integers over 512 values of K or a group; they become
// float once, so the microkernel has no work beside vpdpbusd and holds 12 rows.
//
// A token's largest value is known when its row is complete: producers that fill rows by columns
// (the MLP's activation, attention) leave floats, and complete_rows() rounds them. What is rounded
// is (x + shift) * smooth where the linear has them (PaddleNLP's order).
#include <utility>

#include "gemm_quantized.h"

#define REGATTA_FOREACH_VNNI
#define REGATTA_INL "gemm_int8.inl"
#include "foreach_isa.h"

namespace regatta::cpu {
namespace {

// packed, scales, act [1], smooth, shift.
Status check_a8w8(const Weight& weight, DType) {
  Status status = check_quantized(SchemeId::kA8W8, weight);
  if (!status.ok()) return status;
  const TensorView& act = weight.tensors[2];
  if (act.dtype != DType::kFloat32 || act.rank != 1 || act.shape[0] != 1) {
    return Status::error(std::string("act of the a8w8 weight is ") + dtype_name(act.dtype) + " " +
                         shape_string(act) + ", expected float32 [1]: a scale, or 0 for dynamic");
  }
  status = check_per_input(SchemeId::kA8W8, weight, 3, "smooth", DType::kFloat32);
  return status.ok() ? check_per_input(SchemeId::kA8W8, weight, 4, "shift", DType::kFloat32)
                     : status;
}

// packed, scales, a [1] that is not read, perm.
Status check_w4a8(const Weight& weight, DType) {
  Status status = check_quantized(SchemeId::kW4A8, weight);
  if (!status.ok()) return status;
  if (quantized_layout(SchemeId::kW4A8, weight).has_zeros) {
    return Status::error("scheme 'w4a8' takes symmetric weights, got scales with zero points");
  }
  return check_per_input(SchemeId::kW4A8, weight, 3, "perm", DType::kInt32);
}

template <int kBits>
const GemmKernels* kernels(Isa isa, DType dtype, const Weight&) {
  return REGATTA_QUANTIZED_KERNELS(isa, kBits, true, dtype, false);
}

RowTransform transform_a8w8(const Weight& weight, DType) {
  RowTransform result;
  result.static_scale = *static_cast<const float*>(weight.tensors[2].data);
  result.smooth = per_input<float>(weight, 3);
  result.shift = per_input<float>(weight, 4);
  result.offset = 128;
  return result;
}

RowTransform transform_w4a8(const Weight& weight, DType) {
  RowTransform result;
  result.perm = per_input<int32_t>(weight, 3);
  result.offset = 8;
  return result;
}

constexpr Scheme kA8w8 = {SchemeId::kA8W8, check_a8w8, kernels<8>, transform_a8w8};
constexpr Scheme kW4a8 = {SchemeId::kW4A8, check_w4a8, kernels<4>, transform_w4a8};
const SchemeEntry kA8w8Entry(&kA8w8);
const SchemeEntry kW4a8Entry(&kW4a8);

}  // namespace
}  // namespace regatta::cpu
