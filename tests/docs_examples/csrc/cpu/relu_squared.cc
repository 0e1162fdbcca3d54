// max(x, 0) squared, row by row. Bound: memory (or the call itself).
#include "regatta/relu_squared.h"

#include "dispatch.h"
#include "thread_pool.h"

#define REGATTA_INL "relu_squared.inl"
#include "foreach_isa.h"

namespace regatta::cpu {
namespace {
const OpTable<ReluSquaredParams> kReluSquared("relu_squared",
                                              {REGATTA_CANDIDATES(run_relu_squared)});
}

Status relu_squared(const ReluSquaredParams& params) { return kReluSquared.run(params); }

}  // namespace regatta::cpu
