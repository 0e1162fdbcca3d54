// gemm_packed_groups_sm90 of bf16 x, and what chooses its tiles.
#include "gemm_packed_groups_sm90.cuh"

namespace regatta::cuda {

PackedGroupsTile choose_packed_groups_tile(const GemmParams& p) {
  GemmProblem problem(p);
  problem.is_batch_invariant = is_batch_invariant;
  return choose_packed_groups_tile(problem, num_multiprocessors());
}

Status gemm_packed_groups_sm90(const GemmParams& p, const PackedGroupsTile& tile,
                               CUstream_st* stream) {
  REGATTA_RETURN_IF_ERROR(refusal("gemm_packed_groups_sm90", gemm_packed_sm90_refuses(p)));
  if (p.num_groups == 0 || p.num_groups > kMaxGroups) {
    return Status::error("gemm_packed_groups_sm90: num_groups must be 1 to 512, got " +
                         std::to_string(p.num_groups));
  }
  if (p.num_rows == 0) return {};
  return p.dtype == DType::kBFloat16 ? run_packed_groups<__nv_bfloat16>(p, tile, stream)
                                     : gemm_packed_groups_fp16_sm90(p, tile, stream);
}

}  // namespace regatta::cuda
