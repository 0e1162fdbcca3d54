// gemm_tiles_sm90 of groups of rows and 8-bit codes: e4m3 and int8.
#include "gemm_tiles_sm90.cuh"

namespace regatta::cuda {
namespace {

template <class T>
Status run_codes(const GemmParams& p, int columns, cudaStream_t stream) {
  return p.dtype == DType::kBFloat16 ? run_gemm_tiles<T, __nv_bfloat16, true>(p, columns, stream)
                                     : run_gemm_tiles<T, __half, true>(p, columns, stream);
}

}  // namespace

Status gemm_tiles_groups_codes_sm90(const GemmParams& p, int columns, CUstream_st* stream) {
  return p.operands == GemmOperands::kFp8 ? run_codes<__nv_fp8_e4m3>(p, columns, stream)
                                          : run_codes<int8_t>(p, columns, stream);
}

}  // namespace regatta::cuda
