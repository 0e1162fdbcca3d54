// gemm_tiles_sm90 of e4m3 codes with scales of blocks of 128 x 128.
#include <cuda_fp8.h>

#include "gemm_tiles_sm90.cuh"

namespace regatta::cuda {
namespace {

template <class Out>
Status run_blocks(const GemmParams& p, cudaStream_t stream) {
  return p.gated ? run<__nv_fp8_e4m3, Out, 128, true, true>(p, stream)
                 : run<__nv_fp8_e4m3, Out, 128, false, true>(p, stream);
}

}  // namespace

Status gemm_tiles_blocks_sm90(const GemmParams& p, CUstream_st* stream) {
  return p.dtype == DType::kBFloat16 ? run_blocks<__nv_bfloat16>(p, stream)
                                     : run_blocks<__half>(p, stream);
}

}  // namespace regatta::cuda
