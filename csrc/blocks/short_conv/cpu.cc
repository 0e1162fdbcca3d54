// c * conv(b * x), in float, between a block's products. Bound: memory (or the call itself).
#include "blocks/short_conv/block.h"
#include "cpu/dispatch.h"
#include "cpu/thread_pool.h"

#define REGATTA_INL "blocks/short_conv/cpu.inl"
#include "cpu/foreach_isa.h"

namespace regatta::cpu {

REGATTA_OPERATOR(short_conv, ShortConvBlockParams)

}  // namespace regatta::cpu
