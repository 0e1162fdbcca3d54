// gemm_sm90 of groups of rows that have a weight each (experts).
//
// Algorithm: its stages and instructions (gemm_sm90.cu), by blocks that stay.
//   1. Blocks share out the tiles, rows of a group by features, which they find from the groups'
//      ends, added up once. k is never split: a row has the same bits whatever is beside it.
//   2. One warp asks for the stages of one tile behind those of another: bytes are in flight while
//      sums are finished; another lays scales and biases of the next tile ready.
//   3. Each warp finishes its own 16 rows of weight, without waiting for others.
// Where the ends are ready, weights are asked for while the launch ahead ends: stages take less
// than half of a multiprocessor's memory. Groups without rows cost nothing. Source: own.
// Bound: memory: the weights of groups that have rows, once where a tile has a group whole.
#include "gemm_groups_sm90.cuh"

namespace regatta::cuda {

Status gemm_groups_sm90(const GemmParams& p, const GemmTile& tile, CUstream_st* stream) {
  if (p.scale_rows != 0) return gemm_groups_blocks_sm90(p, tile, stream);
  if (p.operands != GemmOperands::kDense) return gemm_groups_codes_sm90(p, tile, stream);
  return p.dtype == DType::kBFloat16
             ? run_groups_sm90<__nv_bfloat16, __nv_bfloat16>(p, tile, stream)
             : run_groups_sm90<__half, __half>(p, tile, stream);
}

}  // namespace regatta::cuda
