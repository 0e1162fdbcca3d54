// Rows times a stored weight, plus bias, and what adapters add. The arithmetic is the scheme's
// (gemm_dense.cc).
#include "regatta/linear.h"

#include <algorithm>

#include "dispatch.h"
#include "gemm.h"
#include "regatta/blocks.h"
#include "regatta/sum_of_ranks.h"

#define REGATTA_INL "linear.inl"
#include "foreach_isa.h"

namespace regatta::cpu {

REGATTA_OPERATOR(linear, LinearParams)

}  // namespace regatta::cpu
