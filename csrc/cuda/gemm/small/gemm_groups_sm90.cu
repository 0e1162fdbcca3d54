// gemm_sm90 of groups of rows that have a weight each (experts).
//
// Algorithm: its stages and instructions (gemm_sm90.cu), by blocks that stay.
//   1. As many blocks as multiprocessors, or twice as many, share out the tiles: rows of a group by
//      features. A block finds its tiles from the groups' ends, which it adds up once.
//   2. One warp asks for the stages of one tile behind those of another: bytes are in flight while
//      sums are finished, and ahead of a tile nothing is waited for. With a block for each tile a
//      down product of 768 columns (e4m3: 98 KB of 128 features) was under way for as long as it
//      read: 2.4 to 2.8 TB/s.
//   3. Another warp lays scales and biases of the next tile ready.
//   4. Each warp finishes its own 16 rows of weight, without waiting for others.
//   5. k is never split: a row has the same bits whatever is beside it.
// Where the ends are ready, weights are asked for while the launch ahead ends: stages take less
// than half of a multiprocessor's memory, so that both products' blocks are there together. Groups
// without rows cost nothing. Bound: memory: the weights of groups that have rows, once where a tile
// has a group whole. Source: own.
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
