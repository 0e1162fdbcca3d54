// y = epilogue(x w^T) for many rows: prefill. Bound by the tensor cores.
//
// Input: as GemmParams says: bf16 or fp16, weights [N, K] as checkpoints have them; K and the
// output's width are multiples of 8.
// Architectures: sm_90a.
// Algorithm
//   1. A block makes 128 tokens by 128, 192 or 256 rows of weight: two warpgroups with 64 tokens
//      each, fed by one thread with tensor copies through a ring of four or more stages. Blocks are
//      persistent; while one tile is finished, the next one's operands arrive.
//   2. Two blocks of a cluster share the rows of weight: each fetches half of them for both, so a
//      multiprocessor takes a third less out of L2.
//   3. Tiles are ordered so that the blocks at work share operands in L2: 16 tiles of tokens, then
//      along the weight.
//   4. Row scale, bias, SiLU * up, residual, sums of squares happen on the accumulators. Lanes of a
//      quad transpose pairs by shuffles, so that each writes 16 bytes of a row. A gated tile
//      interleaves 8 gate rows and 8 up rows (a 4-D tensor map of the plain matrix), so a thread
//      holds both halves of a product.
// Source: own; the shape of the main loop is that of CUTLASS's cooperative kernels.
//
// Bound: tensor cores, and from some 1,000 rows on the device's power limit.
#include "gemm_tiles_sm90.cuh"

namespace regatta::cuda {

// The width whose last wave wastes least; a narrower tile needs more of L2 per product, hence the
// weights (measured on an H200).
int choose_gemm_columns(const GemmParams& p, int num_multiprocessors) {
  constexpr int kWidths[] = {256, 192, 128};
  constexpr double kCost[] = {256., 192. * 1.04, 128. * 1.12};  // of a tile
  int best = 0;
  double best_cost = 1e30;
  for (int i = 0; i < 3; ++i) {
    const int64_t tiles =
        ceil_div(p.num_rows, kCluster * kTokens) * ceil_div(p.out_features, kWidths[i]);
    const double cost = ceil_div(tiles, num_multiprocessors / kCluster) * kCost[i];
    if (cost < best_cost) best_cost = cost, best = kWidths[i];
  }
  return best;
}

const char* gemm_tiles_sm90_refuses(const GemmParams& p) {
  if (const char* reason = gemm_sm90_refuses(p)) return reason;
  const int64_t width = p.gated ? p.out_features / 2 : p.out_features;
  if (width % 8 != 0) return "the output's width must be a multiple of 8";
  if (p.scale_rows != 0 && (p.scale_rows != kScaleBlock || (p.gated && width % kScaleBlock != 0))) {
    return "scales must be of whole blocks of 128 rows";
  }
  if (p.gated && p.out_dtype != p.dtype) return "a gated product has no float32 output";
  for (const void* pointer : {p.residual, p.bias, static_cast<const void*>(p.out)}) {
    if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) {
      return "bias, residual and out must be aligned to 16 bytes";
    }
  }
  if (p.sumsq_out != nullptr && gemm_sumsq_columns(p.num_rows) != 64) {
    return "sumsq_out of few rows";
  }
  return nullptr;
}

Status gemm_tiles_sm90(const GemmParams& p, int columns, CUstream_st* stream) {
  if (const char* reason = gemm_tiles_sm90_refuses(p)) {
    return Status::error(std::string("gemm_tiles_sm90: ") + reason);
  }
  if (p.num_rows == 0) return {};
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
