// The experts of a decoder layer, in two regions of a few phases each:
//
//   hidden -> norm -> x | x . router -> logits | scores -> choice
//   x by expert -> packed rows | gate, up -> function(gate) * up -> packed rows | down -> products
//                              | sum of a row's products by its weights -> norms, residual
//
// Between the regions rows are sorted by expert. From there on an expert that was chosen is an MLP
// with rows of its own, and the shared MLP one more, with all rows: what each phase multiplies is
// one list of products, whose panels are shared out by what they cost (gemm_groups.h). So both
// threads read weights to the end whether one row goes to six experts or all rows to one, and an
// expert without rows is not read. x is rounded to the activations' dtype before the router reads
// it; activations between the products are rounded as in the MLP block.
//
// A row's bits depend on the row alone: its products do (gemm.h), and they are added in the order
// in which the router chose, the shared MLP last.
//
// Rows are taken at once as far as what they need fits into some tens of MB, several hundred at
// least: the more rows an expert has, the less often its weights are read. The products of all
// choices would be larger than L3, so that down goes over its columns in stripes.
//
// Bound: the bytes of the chosen experts' weights (few rows), the multiplier (many).
#include <algorithm>

#include "blocks/experts/block.h"
#include "blocks/experts/routes.h"
#include "cpu/dispatch.h"
#include "cpu/gemm.h"
#include "cpu/gemm_groups.h"
#include "regatta/sum_of_ranks.h"

#define REGATTA_INL "blocks/experts/cpu.inl"
#include "cpu/foreach_isa.h"

namespace regatta::cpu {

REGATTA_OPERATOR(expert_block, ExpertBlockParams)

}  // namespace regatta::cpu
