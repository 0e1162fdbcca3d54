// gemv_packed_groups_sm90 of fp16 x.
#include "gemv_packed_sm90.cuh"

namespace regatta::cuda {

Status gemv_packed_groups_fp16_sm90(const GemmParams& p, const GemvTile& tile,
                                    CUstream_st* stream) {
  return run_gemv_packed<__half, true>(p, tile, stream);
}

}  // namespace regatta::cuda
