// The function between an MLP's products, row by row. Bound: memory (or the call itself).
#include "regatta/activate.h"

#include "dispatch.h"
#include "thread_pool.h"

#define REGATTA_INL "activate.inl"
#include "foreach_isa.h"

namespace regatta::cpu {
namespace {
const OpTable<ActivateParams> kActivate("activate", {REGATTA_CANDIDATES(run_activate)});
}

Status activate(const ActivateParams& params) { return kActivate.run(params); }

}  // namespace regatta::cpu
