// gemm_sm90 of groups of rows that have a weight each (experts).
//
// Algorithm: as there; a block's second index is a tile of rows over all groups, which a warp finds
// from their ends. Where those are ready its weights are asked for while the launch ahead ends, as
// without groups. Groups without rows cost nothing.
// Bound: memory: the weights of groups that have rows, once where a tile has a group whole.
#include "gemm_sm90.cuh"

namespace regatta::cuda {

Status gemm_groups_sm90(const GemmParams& p, const GemmTile& tile, CUstream_st* stream) {
  if (p.scale_rows != 0) return gemm_groups_blocks_sm90(p, tile, stream);
  if (p.operands != GemmOperands::kDense) return gemm_groups_codes_sm90(p, tile, stream);
  return p.dtype == DType::kBFloat16
             ? run_gemm_sm90<__nv_bfloat16, __nv_bfloat16, false, true>(p, tile, stream)
             : run_gemm_sm90<__half, __half, false, true>(p, tile, stream);
}

}  // namespace regatta::cuda
