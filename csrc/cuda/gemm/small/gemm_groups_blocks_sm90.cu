// gemm_sm90 of groups of rows and e4m3 codes with scales of blocks of 128 columns.
#include "gemm_groups_sm90.cuh"

namespace regatta::cuda {

Status gemm_groups_blocks_sm90(const GemmParams& p, const GemmTile& tile, CUstream_st* stream) {
  return p.dtype == DType::kBFloat16
             ? run_groups_sm90<__nv_fp8_e4m3, __nv_bfloat16, true>(p, tile, stream)
             : run_groups_sm90<__nv_fp8_e4m3, __half, true>(p, tile, stream);
}

}  // namespace regatta::cuda
