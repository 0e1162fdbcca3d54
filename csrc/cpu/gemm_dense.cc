// Scheme "dense": weights stored in the activations' dtype, in panels of 32 output columns.
//
//   float32, float16   [ceil(N/32), K, 32]
//   bfloat16           [ceil(N/32), ceil(K/2), 32, 2]     pairs along K, as vdpbf16ps wants them
//
// zero padded, the same on every ISA.
//
// A microkernel keeps a tile of rows times a panel (12 x 32 on AVX-512, 3 x 32 on AVX2) in
// registers and walks K once: per unit of k it loads the panel's 32 values and broadcasts one per
// row.
//  * Few rows (decode): one tile; every weight byte is read once, prefetched 8 KiB ahead over all
//    streams, from two panels at a time where registers allow. Bound: memory.
//  * Many rows (prefill): a slab of the panel stays in L1 while up to 96 rows pass over it, and
//    each tile prefetches its part of the next slab. Bound: multipliers.
//  * bfloat16 multiplies pairs (vdpbf16ps) where the CPU can. Else it and float16 become float: in
//    registers for a tile or two, once into an L1 buffer for more.
//  * Where float's multiply-adds are faster than pairs (pairs_are_slow()), many rows of bfloat16
//    are multiplied as float. A few rows wait for memory, and are multiplied as pairs. The sums are
//    the same: vdpbf16ps adds the products of odd k first, each with one rounding, and takes
//    denormals for zeros.
//
// Where a stream goes, and how far ahead (streams_into_l2()). On Zen 4 software prefetches into L1
// keep its own prefetcher from running ahead: into L2 instead, 2 KiB ahead in each of two streams
// or 6 KiB in one.
#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>

#include "gemm.h"

#define REGATTA_INL "gemm_dense.inl"
#include "foreach_isa.h"

namespace regatta::cpu {
namespace {

Status check(const Weight& weight, DType dtype) {
  const int64_t panels = weight.num_panels();
  const bool pairs = dtype == DType::kBFloat16;
  const int64_t expected[4] = {panels, pairs ? (weight.in_features + 1) / 2 : weight.in_features,
                               kPanel, 2};
  const int rank = pairs ? 4 : 3;
  TensorView wanted;
  wanted.rank = rank;
  std::copy(expected, expected + rank, wanted.shape);
  if (weight.num_tensors != 1) {
    return Status::error("scheme 'dense' takes 1 weight tensor, got " +
                         std::to_string(weight.num_tensors));
  }
  const TensorView& tensor = weight.tensors[0];
  if (tensor.dtype != dtype) {
    return Status::error(std::string("dense weight is ") + dtype_name(tensor.dtype) +
                         " but the activations are " + dtype_name(dtype) +
                         "; pack it with regatta_pack_dense(dtype=...)");
  }
  if (tensor.rank != rank || !std::equal(expected, expected + rank, tensor.shape)) {
    return Status::error("packed dense weight has shape " + shape_string(tensor) + ", expected " +
                         shape_string(wanted) + " for " + std::to_string(weight.in_features) +
                         " inputs and " + std::to_string(weight.out_features) +
                         " outputs; pack it with regatta_pack_dense");
  }
  return {};
}

const GemmKernels* kernels(Isa isa, DType dtype, const Weight&) {
  return REGATTA_IN_ISA(isa, dense::kernels(isa, dtype));
}

constexpr Scheme kDense = {SchemeId::kDense, check, kernels};
const SchemeEntry kEntry(&kDense);

}  // namespace
}  // namespace regatta::cpu
