// Schemes "weight_only_int8" and "weight_only_int4". int8: weights with a scale for each output
// channel, or for each group of K; zero points where a group has them. Packed as
// regatta/pack_quantized.h says.
//
// Activations: float32 is multiplied as it is, and so are others where `act` is not 0
// (gemm_codes.cc). Else bfloat16 and float16 become int8 in blocks of 32 values with a float scale
// each (as llama.cpp's Q8_0 does): eight vpdpbusd, then one conversion and one multiply-add with
// the block's scale. The weights' scales come in once per group, or every 512 values of K. Stored
// codes are unsigned (w + 128); the integer sum starts at -128 * sum(x).
//
// Tiles of AMX multiply bfloat16 faster than blocks of int8 with a scale each: there it stays as it
// is, whatever `act` says.
//
// What rounding activations to int8 costs: 0.5 % of a product of normal numbers (root mean square;
// rounding the result to bfloat16 costs 0.17 %). On a small language model's held-out text,
// together with the rounding of the weights: a perplexity 1.0005 times that of bfloat16.
//
// Rows: 6 in a tile, so that integer and float sums both stay in registers. Bound: memory for few
// rows, vpdpbusd for many.
//
// int4: groups of 32, 64, 128, ... values of K, or all of a channel, with a scale each, symmetric
// (zero point 8) or with a zero point each. Two values of k lie in a byte: one load, two ANDs and a
// shift make the operands of two vpdpbusd. Zero points take one more multiply-add per group, with
// the sum of the activations.
#include <string>
#include <utility>

#include "gemm_quantized.h"

#define REGATTA_FOREACH_VNNI
#define REGATTA_INL "gemm_int8.inl"
#include "foreach_isa.h"

namespace regatta::cpu {
namespace {

template <int kBits>
struct WeightOnly {
  static constexpr SchemeId kId =
      kBits == 8 ? SchemeId::kWeightOnlyInt8 : SchemeId::kWeightOnlyInt4;

  // packed, scales, act [1]: whether activations stay in floating point, perm.
  static Status check(const Weight& weight, DType) {
    Status status = check_quantized(kId, weight);
    if (!status.ok()) return status;
    const TensorView& act = weight.tensors[2];
    if (act.dtype != DType::kFloat32 || act.rank != 1 || act.shape[0] != 1) {
      return Status::error(std::string("act of the ") + scheme_info(kId).name + " weight is " +
                           dtype_name(act.dtype) + " " + shape_string(act) +
                           ", expected float32 [1]: 0 rounds activations to int8");
    }
    return check_per_input(kId, weight, 3, "perm", DType::kInt32);
  }

  static const GemmKernels* kernels(Isa isa, DType dtype, const Weight& weight) {
    const bool zeros = quantized_layout(kId, weight).has_zeros;
    constexpr CodeKind kKind = kBits == 8 ? CodeKind::kInt8 : CodeKind::kInt4;
    const bool rounds = *static_cast<const float*>(weight.tensors[2].data) == 0.0f;
    const bool by_tiles = has_tiles(isa) && dtype == DType::kBFloat16;
    if (!rounds || by_tiles || dtype == DType::kFloat32) {
      return float_row_kernels(kKind, isa, dtype, zeros);
    }
    return REGATTA_QUANTIZED_KERNELS(isa, kBits, false, dtype, zeros);
  }

  static RowTransform transform(const Weight& weight, DType) {
    RowTransform result;
    result.perm = per_input<int32_t>(weight, 3);
    result.offset = quantized_layout(kId, weight).has_zeros ? 0 : 1 << (kBits - 1);
    return result;
  }

  static constexpr Scheme kScheme = {kId, check, kernels, transform};
};

const SchemeEntry kInt8(&WeightOnly<8>::kScheme);
const SchemeEntry kInt4(&WeightOnly<4>::kScheme);

}  // namespace
}  // namespace regatta::cpu
