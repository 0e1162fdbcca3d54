// Final norm of the chosen rows, and the LM head, without rounding in between to the weights' dtype
// of the products. Bound: the head's bytes (a quarter of a small model's weights).
#include "regatta/logits.h"

#include <algorithm>
#include <string>

#include "dispatch.h"
#include "gemm.h"

#define REGATTA_INL "logits.inl"
#include "foreach_isa.h"

namespace regatta::cpu {
namespace {
const OpTable<LogitsParams> kLogits("logits", {REGATTA_CANDIDATES(run_logits)});
}

Status logits(const LogitsParams& params) { return kLogits.run(params); }

}  // namespace regatta::cpu
