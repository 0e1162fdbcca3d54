// max(x, 0) squared, row by row. Bound: memory (or the call itself).
#include "regatta/relu_squared.h"

#include "dispatch.h"
#include "thread_pool.h"

#define REGATTA_INL "relu_squared.inl"
#include "foreach_isa.h"

namespace regatta::cpu {

REGATTA_OPERATOR(relu_squared, ReluSquaredParams)

}  // namespace regatta::cpu
