// Root mean square normalisation, row by row; sums in float. Bound: memory (or the call itself).
#include "regatta/rms_norm.h"

#include "dispatch.h"
#include "thread_pool.h"

#define REGATTA_INL "rms_norm.inl"
#include "foreach_isa.h"

namespace regatta::cpu {
namespace {
const OpTable<RmsNormParams> kRmsNorm("rms_norm", {REGATTA_CANDIDATES(run_rms_norm)});
}

Status rms_norm(const RmsNormParams& params) { return kRmsNorm.run(params); }

}  // namespace regatta::cpu
