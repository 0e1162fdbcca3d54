// The kernels of gemm_codes_mma.cuh for e4m3.
//
// Input, algorithm: see gemm_codes_mma.cu. Architectures: sm_89 and later.
#include "gemm_codes_mma.cuh"

namespace regatta::cuda {

Status gemm_codes_mma_fp8(const GemmParams& p, const MmaTile& tile, CUstream_st* stream) {
  // Code for sm_80 runs on sm_89 too, and has no such instruction.
  static const int built_for = [] {
    cudaFuncAttributes attributes = {};
    cudaFuncGetAttributes(&attributes, mma_tile_kernel<true>);
    return attributes.binaryVersion;
  }();
  if (built_for < 89) {
    return Status::error(
        "gemm_codes_mma: float8 is not in kernels built for sm_" + std::to_string(built_for) +
        "; rebuild the CUDA library for this GPU: setup_cuda.py install --arch 89");
  }
  return run_codes<true>(p, tile, stream);
}

}  // namespace regatta::cuda
