// What the schemes with integer weights share: checks of their tensors, and the choice of a kernel.
#pragma once

#include <string>

#include "gemm.h"
#include "regatta/pack_quantized.h"

namespace regatta::cpu {

// Layout of a weight whose first two tensors are packed codes and scales; call after the check.
QuantizedLayout quantized_layout(SchemeId scheme, const Weight& weight);

// Checks the number of tensors, and the first two of them.
Status check_quantized(SchemeId scheme, const Weight& weight);

// Tensor `index`: [K] (then returned), or [1] where the linear has none (then null).
Status check_per_input(SchemeId scheme, const Weight& weight, int index, const char* name,
                       DType dtype);
template <class T>
const T* per_input(const Weight& weight, int index) {
  const TensorView& tensor = weight.tensors[index];
  // A linear of one input has a vector of one element either way: nothing to do in both cases.
  return tensor.shape[0] == weight.in_features && tensor.shape[0] > 1
             ? static_cast<const T*>(tensor.data)
             : nullptr;
}

// What stored codes stand for.
enum class CodeKind : uint8_t { kE2m1, kInt4, kInt8 };

// Kernels of rows that stay in floating point (gemm_codes.cc), or null.
const GemmKernels* float_row_kernels(CodeKind kind, Isa isa, DType dtype, bool zeros);

// int8::kernels<BITS, BY_TOKEN>(ISA, DTYPE, ZEROS) of the best namespace for `isa`.
#define REGATTA_QUANTIZED_KERNELS(ISA, BITS, BY_TOKEN, DTYPE, ZEROS) \
  REGATTA_IN_INT8_ISA(ISA, int8::kernels<BITS, BY_TOKEN>(ISA, DTYPE, ZEROS))

}  // namespace regatta::cpu
