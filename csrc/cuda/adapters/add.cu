// See low_rank.h: what adapters add to a linear, in one launch or two. Host code alone.
#include "cuda/adapters/low_rank.h"
#include "cuda/gemm/architecture.h"
#include "cuda/host.h"

namespace regatta::cuda {

Status add_adapters(const ShrinkParams& down, const ExpandParams& up, const Launch& launch_on) {
  if (!is_batch_invariant && current_architecture().compute_capability == 90 &&
      adds_at_once_sm90(down, up)) {
    return add_adapters_sm90(down, up, launch_on);
  }
  const Status status = shrink(down, launch_on);
  return status.ok() ? expand(up, launch_on) : status;
}

}  // namespace regatta::cuda
