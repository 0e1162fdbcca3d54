// y = epilogue(x w^T) for many rows: prefill.
//
// Input: as GemmParams says: bf16 or fp16, weights [N, K] as checkpoints have them; K and the
// output's width are multiples of 8. Architectures: sm_90a.
// Algorithm
//   1. A block makes 128 tokens by 128, 192 or 256 rows of weight: two warpgroups of 64 tokens, fed
//      by one thread through a ring. Blocks stay: while one tile is finished, the next one arrives.
//   2. Two blocks of a cluster share the rows of weight: each fetches half of them for both, so a
//      multiprocessor takes a third less out of L2. Tiles run over 16 tiles of tokens, then along
//      the weight, so that blocks at work share operands in L2.
//   3. The epilogue works on the accumulators; lanes of a quad transpose pairs by shuffles, so that
//      each writes 16 bytes of a row. A gated tile interleaves 8 gate rows and 8 up rows.
// Source: own; the shape of the main loop is that of CUTLASS's cooperative kernels.
// Bound: tensor cores, and from some 1,000 rows on the device's power limit.
#include "cuda/gemm/select.h"
#include "cuda/gemm/tiles.h"
#include "gemm_tiles_sm90.cuh"

namespace regatta::cuda {

Status gemm_tiles_sm90(const GemmParams& p, int columns, CUstream_st* stream) {
  REGATTA_RETURN_IF_ERROR(refusal("gemm_tiles_sm90", gemm_tiles_sm90_refuses(p)));
  if (p.num_rows == 0) return {};
  if (p.num_groups > 0) return gemm_tiles_groups_sm90(p, columns, stream);
  if (p.scale_rows != 0) return gemm_tiles_blocks_sm90(p, stream);
  if (p.operands != GemmOperands::kDense) return gemm_tiles_codes_sm90(p, columns, stream);
  return p.dtype == DType::kBFloat16
             ? run_gemm_tiles<__nv_bfloat16, __nv_bfloat16>(p, columns, stream)
             : run_gemm_tiles<__half, __half>(p, columns, stream);
}

Status gemm_tiles_sm90(const GemmParams& p, CUstream_st* stream) {
  return gemm_tiles_sm90(p, choose_gemm_columns(p, num_multiprocessors()), stream);
}

}  // namespace regatta::cuda
