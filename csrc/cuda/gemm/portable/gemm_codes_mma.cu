// y = epilogue(x w^T) with int8 or e4m3 codes on both sides, on any GPU.
//
// Input: codes [M, K] and [N, K] row-major with a scale per row of each, or of e4m3 with scales of
// blocks of 128 columns (GemmParams::scale_rows); K is a multiple of 16.
// Architectures: sm_75 and later, e4m3 (gemm_codes_mma_sm89.cu) sm_89 and later.
// Algorithm
//   1. Few rows: gemm_mma.cuh. A lane reads 16 bytes of a row of weight, and 16 of a row of x: two
//      steps of the instruction with k in another order, in both operands alike.
//   2. Many rows without groups: blocks of 128 rows of weight by 128 tokens, warps of 64 by 32.
//   3. int8 sums are exact. e4m3 sums go to a float every 128 columns, with the blocks' scales if
//      there are any: the instruction itself keeps 13 bits of mantissa (SageAttention2, on sm_89).
// Source: own; the tile and its swizzle are CUTLASS's usual ones.
// Bound: memory for few rows (a byte per value of weight), the tensor cores for many.
#include "cuda/gemm/select.h"
#include "gemm_codes_mma.cuh"

namespace regatta::cuda {
namespace {

// Large tiles where they leave a block for every multiprocessor, or rows are many anyway.
MmaTile choose_tile(const GemmParams& p, int num_multiprocessors) {
  const int64_t tiles = ceil_div(num_mma_pairs(p), kTilePairs) * ceil_div(p.num_rows, kTileTokens);
  if (!is_batch_invariant && p.num_groups == 0 && p.num_rows > 64 &&
      (tiles >= num_multiprocessors || p.num_rows >= 4 * kTileTokens)) {
    return {kTileTokens, kTilePairs};
  }
  return choose_mma_tile(p, num_multiprocessors);
}

}  // namespace

Status gemm_codes_mma(const GemmParams& p, const MmaTile& tile, CUstream_st* stream) {
  const char* reason = gemm_codes_mma_refuses(p);
  const bool known = tile.tokens == kTileTokens ? tile.pairs == kTilePairs && p.num_groups == 0
                                                : mma_tile_is_known(p, tile);
  if (reason == nullptr && !known) reason = "no kernel of this tile";
  if (reason != nullptr) return Status::error(std::string("gemm_codes_mma: ") + reason);
  if (p.num_rows == 0) return {};
  return p.operands == GemmOperands::kFp8 ? gemm_codes_mma_sm89(p, tile, stream)
                                          : run_codes<false>(p, tile, stream);
}

Status gemm_codes_mma(const GemmParams& p, CUstream_st* stream) {
  return gemm_codes_mma(p, choose_tile(p, num_multiprocessors()), stream);
}

}  // namespace regatta::cuda
