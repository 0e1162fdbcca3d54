// gemm_sm90 of 8-bit codes: e4m3 and int8.
#include "gemm_sm90.cuh"

namespace regatta::cuda {

Status gemm_codes_sm90(const GemmParams& p, const GemmTile& tile, CUstream_st* stream) {
  const bool is_bfloat16 = p.dtype == DType::kBFloat16;
  if (p.operands == GemmOperands::kFp8) {
    return is_bfloat16 ? run_gemm_sm90<__nv_fp8_e4m3, __nv_bfloat16>(p, tile, stream)
                       : run_gemm_sm90<__nv_fp8_e4m3, __half>(p, tile, stream);
  }
  return is_bfloat16 ? run_gemm_sm90<int8_t, __nv_bfloat16>(p, tile, stream)
                     : run_gemm_sm90<int8_t, __half>(p, tile, stream);
}

}  // namespace regatta::cuda
