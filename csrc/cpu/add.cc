// The sum of two tensors with a factor each. Bound: memory (or the call itself).
#include "regatta/add.h"

#include "dispatch.h"
#include "thread_pool.h"

#define REGATTA_INL "add.inl"
#include "foreach_isa.h"

namespace regatta::cpu {

REGATTA_OPERATOR(add, AddParams)

}  // namespace regatta::cpu
