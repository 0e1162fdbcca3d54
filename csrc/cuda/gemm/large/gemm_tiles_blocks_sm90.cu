// gemm_tiles_sm90 of e4m3 codes with scales of blocks of 128 x 128.
#include "gemm_tiles_sm90.cuh"

namespace regatta::cuda {

Status gemm_tiles_blocks_sm90(const GemmParams& p, CUstream_st* stream) {
  return p.dtype == DType::kBFloat16 ? run_blocks<__nv_bfloat16, false>(p, stream)
                                     : run_blocks<__half, false>(p, stream);
}

}  // namespace regatta::cuda
