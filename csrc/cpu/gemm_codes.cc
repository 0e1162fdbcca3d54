// Codes of 4 or 8 bits times activations that stay in floating point: scheme "weight_only_mxfp4",
// and the other weight-only schemes for float32 activations and where act (gemm_weight_only.cc)
// says so.
//
// Products are those of the floats that codes and scales stand for; sums alone are rounded. A code
// becomes its value by a look into a table of 16, one instruction for 16 or 32 of them, or, of 8
// bits, by conversion. bfloat16 multiplies pairs (vdpbf16ps) where the CPU can: bf16 holds every
// code. Else it and float16 become float. Zero points take the sum of a row's values in a group,
// which a job finds once for its rows, and one more multiply-add per group.
//
// Rows: 12 in a tile (2 on AVX2), sums of a group in registers and those of all groups in L1.
// Bound: memory for few rows, the multipliers of bfloat16 for many (half as many products an
// instruction as of int8).
#include <algorithm>
#include <type_traits>
#include <utility>

#include "gemm_quantized.h"

#define REGATTA_INL "gemm_codes.inl"
#include "foreach_isa.h"

namespace regatta::cpu {
namespace {

template <CodeKind kKind, bool kZeros>
const GemmKernels* in_isa(Isa isa, DType dtype) {
  return REGATTA_IN_ISA(isa, codes::kernels<kKind, kZeros>(isa, dtype));
}

}  // namespace

const GemmKernels* float_row_kernels(CodeKind kind, Isa isa, DType dtype, bool zeros) {
  switch (kind) {
    case CodeKind::kE2m1:
      return in_isa<CodeKind::kE2m1, false>(isa, dtype);
    case CodeKind::kInt4:
      return (zeros ? in_isa<CodeKind::kInt4, true> : in_isa<CodeKind::kInt4, false>)(isa, dtype);
    case CodeKind::kInt8:
      return (zeros ? in_isa<CodeKind::kInt8, true> : in_isa<CodeKind::kInt8, false>)(isa, dtype);
  }
  return nullptr;
}

}  // namespace regatta::cpu
