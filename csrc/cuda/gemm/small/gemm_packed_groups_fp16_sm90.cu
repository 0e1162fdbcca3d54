// gemm_packed_groups_sm90 of fp16 x.
#include "gemm_packed_groups_sm90.cuh"

namespace regatta::cuda {

Status gemm_packed_groups_fp16_sm90(const GemmParams& p, const PackedGroupsTile& tile,
                                    CUstream_st* stream) {
  return run_packed_groups<__half>(p, tile, stream);
}

}  // namespace regatta::cuda
