// The MLP of a decoder layer in one region of three phases:
//
//   hidden -> norm -> packed rows | gate, up -> function(gate) * up -> packed rows | down + hidden
//
// and without a gate function(up).
//
// Between the phases activations stay in scratch, in the form that the next product reads (bf16 for
// bf16, where vdpbf16ps exists; float otherwise), and are rounded nowhere else. Gate and up are the
// halves of one weight, so a thread computes the same panel of both and applies the activation to
// the products while they are in L1. Bound: the weights' bytes (decode), the multiplier (prefill).
#include <algorithm>

#include "blocks/mlp/block.h"
#include "cpu/dispatch.h"
#include "cpu/gemm.h"
#include "regatta/sum_of_ranks.h"

#define REGATTA_INL "blocks/mlp/cpu.inl"
#include "cpu/foreach_isa.h"

namespace regatta::cpu {

REGATTA_OPERATOR(mlp_block, MlpBlockParams)

}  // namespace regatta::cpu
