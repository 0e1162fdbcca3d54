// silu(gate) * up, row by row. Bound: memory (or the call itself).
#include "regatta/silu_mul.h"

#include "dispatch.h"
#include "thread_pool.h"

#define REGATTA_INL "silu_mul.inl"
#include "foreach_isa.h"

namespace regatta::cpu {
namespace {
const OpTable<SiluMulParams> kSiluMul("silu_mul", {REGATTA_CANDIDATES(run_silu_mul)});
}

Status silu_mul(const SiluMulParams& params) { return kSiluMul.run(params); }

}  // namespace regatta::cpu
