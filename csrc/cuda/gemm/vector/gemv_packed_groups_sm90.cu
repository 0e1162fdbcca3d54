// gemv_packed_sm90 of groups of rows that have a weight each (experts).
#include "gemv_packed_sm90.cuh"

namespace regatta::cuda {

Status gemv_packed_groups_sm90(const GemmParams& p, const GemvTile& tile, CUstream_st* stream) {
  return p.dtype == DType::kBFloat16 ? run_gemv_packed<__nv_bfloat16, true>(p, tile, stream)
                                     : run_gemv_packed<__half, true>(p, tile, stream);
}

}  // namespace regatta::cuda
