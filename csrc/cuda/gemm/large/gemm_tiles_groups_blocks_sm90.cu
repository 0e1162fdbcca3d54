// gemm_tiles_sm90 of groups of rows and e4m3 codes with scales of blocks of 128 x 128.
#include "gemm_tiles_sm90.cuh"

namespace regatta::cuda {

Status gemm_tiles_groups_blocks_sm90(const GemmParams& p, CUstream_st* stream) {
  return p.dtype == DType::kBFloat16 ? run_blocks<__nv_bfloat16, true>(p, stream)
                                     : run_blocks<__half, true>(p, stream);
}

}  // namespace regatta::cuda
