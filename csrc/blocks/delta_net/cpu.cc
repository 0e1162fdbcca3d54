// The delta net between its products, in one region of three phases:
//
//   convolution and SiLU of queries, keys, values | the state, head by head, token after token |
//   norm and gate
//
// All of it in float. A head's state lies in its new slot from the first token on. Tokens go one by
// one in the order of their request, whatever the step: cuts of a prompt change no bit. Bound: the
// states' bytes (decode), the multiplier of vectors (prompts).
#include "blocks/delta_net/block.h"
#include "cpu/dispatch.h"
#include "cpu/thread_pool.h"

#define REGATTA_INL "blocks/delta_net/cpu.inl"
#include "cpu/foreach_isa.h"

namespace regatta::cpu {

REGATTA_OPERATOR(delta_net, DeltaNetBlockParams)

}  // namespace regatta::cpu
