// The sum of two tensors with a factor each. Bound: memory (or the call itself).
#include "regatta/add.h"

#include "dispatch.h"
#include "thread_pool.h"

#define REGATTA_INL "add.inl"
#include "foreach_isa.h"

namespace regatta::cpu {
namespace {
const OpTable<AddParams> kAdd("add", {REGATTA_CANDIDATES(run_add)});
}

Status add(const AddParams& params) { return kAdd.run(params); }

}  // namespace regatta::cpu
