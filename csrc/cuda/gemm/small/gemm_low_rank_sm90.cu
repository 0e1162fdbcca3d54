// gemm_sm90 of few rows that adds what adapters do (cuda/adapters/low_rank.h).
//
// Algorithm: as there. One more warp of a block finds the pages of its rows and asks for their B of
// the block's columns while the launch ahead ends, then adds up the pieces of the rows' sums. Who
// finishes eight outputs of a row multiplies those by eight columns of B, a page at a time.
// Bound: memory: the weights, and B of the adapters that rows have.
#include "cuda/gemm/select.h"
#include "gemm_sm90.cuh"

namespace regatta::cuda {
namespace {

template <class T, int kFeatures, bool kGated>
Status run_adding(const GemmParams& p, const GemmTile& tile, const ExpandParams& term,
                  cudaStream_t stream) {
  switch (tile.tokens) {
    case 8:
      return run<T, T, kFeatures, 8, kGated, false, false, AddingParams>(p, tile, stream, &term);
    case 16:
      return run<T, T, kFeatures, 16, kGated, false, false, AddingParams>(p, tile, stream, &term);
    default:
      return run<T, T, kFeatures, 32, kGated, false, false, AddingParams>(p, tile, stream, &term);
  }
}

template <class T>
Status run_features(const GemmParams& p, const GemmTile& tile, const ExpandParams& term,
                    cudaStream_t stream) {
  if (tile.features == 64) {
    return p.gated ? run_adding<T, 64, true>(p, tile, term, stream)
                   : run_adding<T, 64, false>(p, tile, term, stream);
  }
  return p.gated ? run_adding<T, 128, true>(p, tile, term, stream)
                 : run_adding<T, 128, false>(p, tile, term, stream);
}

}  // namespace

Status gemm_low_rank_sm90(const GemmParams& p, const ExpandParams& term, CUstream_st* stream) {
  if (p.num_rows > kMostRowsAdding || term.rows.max_pages > kMostPagesAdding) {
    return Status::error("gemm_low_rank_sm90: too many rows or pages");
  }
  if (p.num_rows == 0) return {};
  GemmTile tile = choose_gemm_tile(p);
  tile.features = std::min(tile.features, 128);
  // Room for the rows' sums, out of the stages.
  constexpr int kTermBytes = 32 * static_cast<int>(kMostPagesAdding) *
                             (1 + kMaxAdaptedParts * static_cast<int>(kPageRanks)) * 4;
  const int stage = (tile.features + tile.tokens) * kRowBytes;
  tile.stages = std::min(tile.stages, (220 * 1024 - kTermBytes) / stage);
  return p.dtype == DType::kBFloat16 ? run_features<__nv_bfloat16>(p, tile, term, stream)
                                     : run_features<__half>(p, tile, term, stream);
}

}  // namespace regatta::cuda
