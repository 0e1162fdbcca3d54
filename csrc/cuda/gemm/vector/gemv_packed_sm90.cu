// y = epilogue(x w^T) of 1 .. 8 rows, or of rows in groups with a weight each, with weights of 8
// or 4 bits, activations of 16, or of 4 bits, activations of 8.
//
// Input: x [M, K] bf16 or fp16, or int8; weights as pack_weight() leaves them (packed_weight.cuh).
// Architectures: sm_90.
// Algorithm
//   1. One block per multiprocessor owns neighbouring slabs of 16 rows of weight and takes two at a
//      time over all of k. One lane keeps a ring of stages full in half of shared memory: the next
//      launch's block fits beside it.
//   2. A warp turns a lane's codes into the left operand of mma m16n8k16 (codes of x: m16n8k32) by
//      bit operations; x is the right operand. Scales and zero points go to sums of groups.
//   3. The warps' sums meet in shared memory, where one more warp adds them in their order and
//      finishes them while the others are at the next slabs.
//   4. Of groups, blocks share the slabs of all rows (groups.cuh), row after row.
// Source: own; Marlin showed that the tensor cores are the place for few rows, too.
//
// Bound: memory. Copies asked for late bind it, warps at barriers, and an output's residual,
// norm and scales unless they are asked for ahead of the products.
#include "gemv_packed_sm90.cuh"

namespace regatta::cuda {
namespace {

// Blocks of a cluster share copies of x where there are many, or where x and codes of 8 bits leave
// room for two stages alone.
GemvTile choose_tile(const GemmParams& p) {
  const bool large = code_bits(p.operands) == 8 && p.num_rows > 4;
  const bool passes = p.out_features > 2 * kUnitRows * num_multiprocessors();  // several
  GemvTile tile;
  tile.kilobytes = packed_shared_budget(p) / 1024;
  if (p.num_groups == 0) tile.cluster = p.gated || (large && passes) ? 2 : 1;
  tile.trigger = p.gated ? 4 : 3;  // earlier, the next launch's copies delay this one's
  return tile;
}

}  // namespace

Status gemv_packed_sm90(const GemmParams& p, const GemvTile& tile, CUstream_st* stream) {
  REGATTA_RETURN_IF_ERROR(refusal("gemv_packed_sm90", gemv_packed_sm90_refuses(p)));
  if (p.num_rows == 0) return {};
  if (p.num_groups > 0) return gemv_packed_groups_sm90(p, tile, stream);
  return p.dtype == DType::kBFloat16 ? run_gemv_packed<__nv_bfloat16, false>(p, tile, stream)
                                     : gemv_packed_fp16_sm90(p, tile, stream);
}

Status gemv_packed_sm90(const GemmParams& p, CUstream_st* stream) {
  return gemv_packed_sm90(p, choose_tile(p), stream);
}

}  // namespace regatta::cuda
