// Weights into panels of 32 output columns (see gemm_dense.cc), converted on the way, rounding to
// nearest even. Done once per weight, at load time. Bound: memory.
#include "regatta/pack_dense.h"

#include <algorithm>
#include <type_traits>

#include "dispatch.h"
#include "gemm.h"
#include "thread_pool.h"

#define REGATTA_INL "pack_dense.inl"
#include "foreach_isa.h"

namespace regatta::cpu {

REGATTA_OPERATOR(pack_dense, PackDenseParams)

}  // namespace regatta::cpu
