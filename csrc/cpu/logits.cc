// Final norm of the chosen rows, and the LM head, without rounding in between to the weights' dtype
// of the products. Bound: the head's bytes (a quarter of a small model's weights).
#include "regatta/logits.h"

#include <algorithm>
#include <string>

#include "dispatch.h"
#include "gemm.h"
#include "regatta/sum_of_ranks.h"

#define REGATTA_INL "logits.inl"
#include "foreach_isa.h"

namespace regatta::cpu {

REGATTA_OPERATOR(logits, LogitsParams)

}  // namespace regatta::cpu
