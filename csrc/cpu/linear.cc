// Rows times a stored weight, plus bias, and what adapters add. The arithmetic is the scheme's
// (gemm_dense.cc).
#include "regatta/linear.h"

#include <algorithm>

#include "dispatch.h"
#include "gemm.h"
#include "regatta/blocks.h"

#define REGATTA_INL "linear.inl"
#include "foreach_isa.h"

namespace regatta::cpu {
namespace {
const OpTable<LinearParams> kLinear("linear", {REGATTA_CANDIDATES(run_linear)});
}

Status linear(const LinearParams& params) { return kLinear.run(params); }

}  // namespace regatta::cpu
