// The delta net between its products, in one region of three phases:
//
//   convolution and SiLU of queries, keys, values | the state, head by head, token after token |
//   norm and gate
//
// All of it in float. Tokens go one by one in the order of their request, whatever the step: cuts
// of a prompt change no bit. A form by chunks of tokens (Yang et al. 2024) would save nothing here:
// of 64 tokens and heads of 128 it takes 90,000 multiplications and sums of a token and head, and
// one pass over a state takes 65,536. It pays where matrices multiply faster than vectors do.
// Bound: the states' bytes (decode), the multiplier of vectors (prompts).
#include "blocks/delta_net/block.h"
#include "cpu/dispatch.h"
#include "cpu/thread_pool.h"

#define REGATTA_INL "blocks/delta_net/cpu.inl"
#include "cpu/foreach_isa.h"

namespace regatta::cpu {

REGATTA_OPERATOR(delta_net, DeltaNetBlockParams)

}  // namespace regatta::cpu
