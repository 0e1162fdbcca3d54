// gemm_tiles_sm90 of groups of rows that have a weight each (experts).
//
// Algorithm: as there, and
//   1. A block counts what lies ahead of each group once, and finds its tiles by bisection.
//   2. The two blocks of a cluster work for one group. Of more than 128 rows they take two tiles of
//      tokens and share weights; of fewer, or of what is left, two tiles of weights and share
//      tokens: 40 KB out of L2 for a stage of 128 x 256 of 16 bits, where a block takes 48 alone.
//   3. A warpgroup whose 64 tokens all lie behind the group's end multiplies nothing, and nobody
//      fetches them. Weights that one tile of tokens reads leave L2 first.
// Bound: with 64 rows of a group memory, which reads a weight once; from some 128 on tensor cores.
#include "gemm_tiles_sm90.cuh"

namespace regatta::cuda {

Status gemm_tiles_groups_sm90(const GemmParams& p, int columns, CUstream_st* stream) {
  if (p.scale_rows != 0) return gemm_tiles_groups_blocks_sm90(p, stream);
  if (p.operands != GemmOperands::kDense) return gemm_tiles_groups_codes_sm90(p, columns, stream);
  return p.dtype == DType::kBFloat16
             ? run_gemm_tiles<__nv_bfloat16, __nv_bfloat16, true>(p, columns, stream)
             : run_gemm_tiles<__half, __half, true>(p, columns, stream);
}

}  // namespace regatta::cuda
