// Scheme "weight_only_int8": int8 weights with a scale for each output channel, or for each group of
// K; zero points where a group has them. Packed as regatta/pack_quantized.h says.
//
// Activations: float32 is multiplied exactly, by weights that become float in L1. bfloat16 and
// float16 become int8 in blocks of 32 values with a float scale each (as llama.cpp's Q8_0 does):
// eight vpdpbusd, then one conversion and one multiply-add with the block's scale. The weights'
// scales come in once per group, or at the end. Stored codes are unsigned (w + 128); the integer
// sum starts at -128 * sum(x).
//
// @MEASURED@
#include <utility>

#include "gemm_quantized.h"

#define REGATTA_FOREACH_VNNI
#define REGATTA_INL "gemm_int8.inl"
#include "foreach_isa.h"

namespace regatta::cpu {
namespace {

constexpr char kName[] = "weight_only_int8";

// packed, scales, a [1] that weight-only schemes do not read, perm.
Status check(const Weight& weight, DType) {
  Status status = check_quantized(kName, weight, 4);
  return status.ok() ? check_per_input(kName, weight, 3, "perm", DType::kInt32) : status;
}

const GemmKernels* kernels(Isa isa, DType dtype, const Weight& weight) {
  const bool zeros = quantized_layout(kName, weight).has_zeros;
  return REGATTA_QUANTIZED_KERNELS(isa, int8::kernels<8, false>(dtype, zeros));
}

RowTransform transform(const Weight& weight, DType) {
  RowTransform result;
  result.perm = per_input<int32_t>(weight, 3);
  result.offset = quantized_layout(kName, weight).has_zeros ? 0 : 128;
  return result;
}

constexpr Scheme kScheme = {kName, check, kernels, transform};
const SchemeEntry kEntry(&kScheme);

}  // namespace
}  // namespace regatta::cpu
