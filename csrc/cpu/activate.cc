// The function between an MLP's products, row by row. Bound: memory (or the call itself).
#include "regatta/activate.h"

#include "dispatch.h"
#include "thread_pool.h"

#define REGATTA_INL "activate.inl"
#include "foreach_isa.h"

namespace regatta::cpu {

REGATTA_OPERATOR(activate, ActivateParams)

}  // namespace regatta::cpu
