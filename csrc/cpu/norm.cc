// Normalisation, row by row; sums in float. Bound: memory (or the call itself).
#include "regatta/norm.h"

#include "dispatch.h"
#include "thread_pool.h"

#define REGATTA_INL "norm.inl"
#include "foreach_isa.h"

namespace regatta::cpu {

REGATTA_OPERATOR(norm, NormParams)

}  // namespace regatta::cpu
