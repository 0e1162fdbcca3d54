// gemm_sm90 of groups of rows and 8-bit codes: e4m3 and int8.
#include "gemm_groups_sm90.cuh"

namespace regatta::cuda {
namespace {

template <class T>
Status run_codes(const GemmParams& p, const GemmTile& tile, cudaStream_t stream) {
  return p.dtype == DType::kBFloat16 ? run_groups_sm90<T, __nv_bfloat16>(p, tile, stream)
                                     : run_groups_sm90<T, __half>(p, tile, stream);
}

}  // namespace

Status gemm_groups_codes_sm90(const GemmParams& p, const GemmTile& tile, CUstream_st* stream) {
  return p.operands == GemmOperands::kFp8 ? run_codes<__nv_fp8_e4m3>(p, tile, stream)
                                          : run_codes<int8_t>(p, tile, stream);
}

}  // namespace regatta::cuda
