// Tensor maps, as the copy engine reads them. Host code.
#pragma once

#include <cuda.h>

#include "cuda/common.cuh"

namespace regatta::cuda {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's encoder, found through the runtime so that nothing links to libcuda.
inline EncodeTiled find_tensor_map_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &result);
#else
  const cudaError_t error =
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<EncodeTiled>(function);
}

// Sizes and box innermost first, strides in bytes from the second dimension on.
inline Status encode_map(CUtensorMap* map, CUtensorMapDataType type, const void* data, int rank,
                         const cuuint64_t* sizes, const cuuint64_t* stride_bytes,
                         const cuuint32_t* box, CUtensorMapSwizzle swizzle,
                         CUtensorMapL2promotion promotion) {
  static const EncodeTiled encoder = find_tensor_map_encoder();
  if (encoder == nullptr) {
    return Status::error(
        "tensor map: the driver has no cuTensorMapEncodeTiled (CUDA 12 or newer needed)");
  }
  const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
  const CUresult result =
      encoder(map, type, rank, const_cast<void*>(data), sizes, stride_bytes, box, ones,
              CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return Status::error("tensor map: cuTensorMapEncodeTiled failed with code " +
                         std::to_string(static_cast<int>(result)));
  }
  return {};
}

}  // namespace regatta::cuda
