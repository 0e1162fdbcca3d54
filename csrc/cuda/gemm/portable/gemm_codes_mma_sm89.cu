// The kernels of gemm_codes_mma.cuh for e4m3.
//
// Input, algorithm: see gemm_codes_mma.cu. Architectures: sm_89 and later.
#include "gemm_codes_mma.cuh"

namespace regatta::cuda {

Status gemm_codes_mma_sm89(const GemmParams& p, const MmaTile& tile, CUstream_st* stream) {
  // A library built for sm_80 runs on sm_89 too, where it has no code of this file.
  static const bool built = [] {
    cudaFuncAttributes attributes = {};
    return cudaFuncGetAttributes(&attributes, mma_tile_kernel<true>) == cudaSuccess &&
           attributes.binaryVersion >= 89;
  }();
  if (!built) {
    cudaGetLastError();
    return Status::error(
        "gemm_codes_mma: float8 is not in the CUDA library for this GPU; build it again: "
        "python csrc/setup_cuda.py install --arch 89");
  }
  return run_codes<true>(p, tile, stream);
}

}  // namespace regatta::cuda
