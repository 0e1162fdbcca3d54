// Normalisation, row by row; sums in float. Bound: memory (or the call itself).
#include "regatta/norm.h"

#include "dispatch.h"
#include "thread_pool.h"

#define REGATTA_INL "norm.inl"
#include "foreach_isa.h"

namespace regatta::cpu {
namespace {
const OpTable<NormParams> kNorm("norm", {REGATTA_CANDIDATES(run_norm)});
}

Status norm(const NormParams& params) { return kNorm.run(params); }

}  // namespace regatta::cpu
