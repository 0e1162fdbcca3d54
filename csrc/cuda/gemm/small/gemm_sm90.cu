// y = epilogue(x w^T) for few rows: decode. The weights are streamed once, at memory speed.
//
// Input: as GemmParams says: weights as checkpoints have them, [N, K] row-major bf16 or fp16, so
// that cuBLASLt (many rows) and an embedding lookup (tied weights) can use the same copy. K is a
// multiple of 8. Architectures: sm_90a.
// Algorithm
//   1. Weights take the M side of wgmma (64 features), tokens the N side (8 .. 128): one row of x
//      wastes a cheap dimension. Both come by tensor copies, 128-byte swizzled.
//   2. Two or three blocks fit a multiprocessor: the next kernel's fill their stages with weights
//      while this one ends. `trigger` lets them in when a block has asked for most of its own.
//   3. Products with few tiles split k over a cluster, whose ranks add up in order: sums depend on
//      N, K and the number of rows rounded up to `tokens` alone.
//   4. A gated tile interleaves 8 gate rows and 8 up rows (a 4-D tensor map of the plain matrix).
// Source: own; unlike Marlin, FlashInfer, DeepGEMM: no repacking, and PDL instead of persistence.
//
// Bound: memory; from 64 rows on reads of x from L2 are the likely limit. Sums of e4m3 products are
// 0.0003 of their size from exact ones (root mean square) where they go to a float every 512
// columns, else 0.0013 with 4,096 columns and 0.0029 with 14,336.
#include "cuda/gemm/select.h"
#include "cuda/gemm/tiles.h"
#include "gemm_sm90.cuh"

namespace regatta::cuda {

namespace {

// The same of codes and 32 rows or more as measured in a chain of whole layers, with the
// quantization between products.
GemmTile choose_codes_tile(const GemmParams& p, GemmTile tile) {
  const int64_t tiles = ceil_div(p.out_features, 64);
  const bool deep = p.in_features >= 8192, more = tiles > num_multiprocessors();
  if (p.scale_rows != 0) tile.tokens = std::min(tile.tokens, 64);
  const int full = tile.tokens;
  int budget = 102;  // KB of stages
  if (tiles >= 1024) {
    tile.features = 128;
    budget = 100;
  } else if (tiles >= 256 || (more && full == 128)) {
    tile.features = 128;
    if (full == 128) tile.trigger = -1;
  } else {
    tile.split = p.in_features >= 1024 && !more ? 2 : 1;
    if (full == 128 && !deep) {
      // Twice the blocks, whose weights come out of L2 the second time.
      tile.tokens = 64;
      budget = tiles < 80 ? 96 : 64;
      if (tiles < 80) tile.trigger = -1;
    } else if (deep) {
      budget = full == 32 ? 192 : 216;
      if (full == 32) tile.trigger = -1;
    } else {
      budget = full == 32 ? 96 : 98;
    }
    if (tiles * tile.split < 64 && p.in_features >= 4096) tile.split = 4;
  }
  const int most = full == 32 ? kMaxStages : 9;
  tile.stages = std::min(most, budget * 1024 / ((tile.features + tile.tokens) * kRowBytes));
  return tile;
}

// From measurements on an H200 of all five products of a Llama-3-8B decode step.
// Wide products have tiles for every multiprocessor; narrow ones split k. Few rows: small blocks,
// so that the next kernel's fit beside them and fetch weights early. Many rows: large tiles,
// because then activations come out of L2 less often, and L2 is what limits. Between the two, as
// gate and up of one of two ranks are, all blocks run at once: two of a multiprocessor, or of many
// rows as many as there are multiprocessors, about (by counting, not by measurements).
GemmTile choose_fast_tile(const GemmParams& p) {
  GemmTile tile;
  tile.tokens = 8;
  while (tile.tokens < p.num_rows && tile.tokens < 128) tile.tokens *= 2;
  if (p.operands != GemmOperands::kDense && tile.tokens >= 32) return choose_codes_tile(p, tile);
  const int64_t tiles = ceil_div(p.out_features, 64);
  const bool wide = tiles >= 256;
  const bool narrow = tiles < 80;
  const int64_t width = p.in_features * (p.operands == GemmOperands::kDense ? 2 : 1);  // bytes
  const bool deep = width >= 16384;
  int budget = 146;  // KB of stages
  if (wide) {
    const bool huge = tiles >= 1024;
    tile.features = tile.tokens == 128 && !huge ? 256 : tile.tokens <= 16 && huge ? 64 : 128;
    budget = tile.features == 256 ? 192 : huge ? 100 : tile.tokens == 64 ? 216 : 102;
  } else if (narrow) {
    const bool few = tile.tokens <= 32 && !deep, dense = p.operands == GemmOperands::kDense;
    // Twice the blocks, whose weights come out of L2 the second time.
    const int64_t times = tile.tokens == 128 && !deep ? 2 : 1;
    if (times == 2) tile.tokens = 64;
    // As many blocks as multiprocessors, about. Of few rows 256, which end sooner: of 16 bits where
    // each has 16 steps, as adding up among more costs more than it saves.
    const int64_t steps = ceil_div(width, kRowBytes);
    const auto splits = [&] {
      const int64_t blocks = tiles * times * tile.split;
      if (few && blocks < 256 && steps >= (dense ? 32 : 8) * tile.split) return true;
      return blocks < (deep || !dense ? 128 : 100) && steps >= 8 * tile.split;
    };
    while (tile.split < 8 && splits()) tile.split *= 2;
    if (few && (!dense || tiles * tile.split > num_multiprocessors())) budget = 66;
    if (tile.tokens >= 64) budget = 216;
  } else {
    const bool more = tiles > num_multiprocessors();
    if (tile.tokens == 128) tile.features = 128, tile.split = more ? 1 : 2;
    if (tile.tokens == 64 && more) tile.features = 128;
    if (more) budget = 102;
    if (tile.tokens >= 64) budget = 216;
  }
  tile.stages = std::min(kMaxStages, budget * 1024 / ((tile.features + tile.tokens) * kRowBytes));
  return tile;
}

// Rows of a tile, at most. Sums of blocks have no registers for 128, and of e4m3 codes are not kept
// as exactly (kPromote).
int most_tokens(const GemmParams& p) {
  if (p.scale_rows != 0) return 64;
  return is_batch_invariant && p.operands != GemmOperands::kDense ? 64 : 128;
}

// Of groups, where k is never split: the mode makes no difference. From measurements on an H200 of
// both products of Qwen3-30B-A3B, DeepSeek-V2-Lite and Mixtral-8x7B with 8, 32 and 128 tokens. Of
// 16 bits one block of a multiprocessor; of codes, whose tiles take half the time, one finishes its
// sums while another reads.
GemmTile choose_group_tile(const GemmParams& p) {
  GemmTile tile;
  tile.tokens = choose_group_tokens(p.num_rows, p.num_groups, 8, 64);
  const bool dense = p.operands == GemmOperands::kDense;
  const int64_t tiles =
      ceil_div(p.out_features, 128) * max_group_tiles(p.num_rows, p.num_groups, tile.tokens);
  if (dense && tiles >= num_multiprocessors()) tile.features = 128;
  tile.blocks = dense ? 1 : 2;
  const int budget = dense ? 148 : 66;  // KB of stages
  tile.stages =
      std::clamp(budget * 1024 / ((tile.features + tile.tokens) * kRowBytes), 3, kMaxStages);
  return tile;
}

// k split as for 64 rows.
GemmTile choose_invariant_tile(const GemmParams& p) {
  GemmParams q = p;
  q.num_rows = 64;
  GemmTile tile = choose_fast_tile(q);
  const int most = most_tokens(p);
  tile.tokens = 8;
  while (tile.tokens < p.num_rows && tile.tokens < most) tile.tokens *= 2;
  tile.stages = std::min(tile.stages, 216 * 1024 / ((tile.features + tile.tokens) * kRowBytes));
  return tile;
}

}  // namespace

GemmTile choose_gemm_tile(const GemmParams& p) {
  if (p.num_groups > 0) return choose_group_tile(p);
  return is_batch_invariant ? choose_invariant_tile(p) : choose_fast_tile(p);
}

Status gemm_sm90(const GemmParams& p, const GemmTile& tile, CUstream_st* stream) {
  REGATTA_RETURN_IF_ERROR(refusal("gemm_sm90", gemm_sm90_refuses(p)));
  if (p.num_rows == 0) return {};
  if (p.num_groups > 0) return gemm_groups_sm90(p, tile, stream);
  if (p.scale_rows != 0) return gemm_blocks_sm90(p, tile, stream);
  if (p.operands != GemmOperands::kDense) return gemm_codes_sm90(p, tile, stream);
  return p.dtype == DType::kBFloat16 ? run_gemm_sm90<__nv_bfloat16, __nv_bfloat16>(p, tile, stream)
                                     : run_gemm_sm90<__half, __half>(p, tile, stream);
}

Status gemm_sm90(const GemmParams& p, CUstream_st* stream) {
  return gemm_sm90(p, choose_gemm_tile(p), stream);
}

}  // namespace regatta::cuda
