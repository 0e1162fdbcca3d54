// The key or value cache as the tensor copy engine sees it.
#pragma once

#include <cuda.h>

#include "attention.cuh"

namespace regatta::cuda {

using EncodeTensorMap = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                     const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                     const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                     CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's encoder, without linking libcuda.
inline EncodeTensorMap tensor_map_encoder() {
  static const EncodeTensorMap encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &found);
#else
    const cudaError_t error =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess
               ? reinterpret_cast<EncodeTensorMap>(function)
               : nullptr;
  }();
  return encoder;
}

// The cache as a matrix [rows, head_dim], in boxes of [box_tokens, 64].
inline Status encode_cache(CUtensorMap* map, const void* cache, DType dtype, int64_t rows,
                           int head_dim, int box_tokens) {
  if (tensor_map_encoder() == nullptr) {
    return Status::error(
        "paged_attention: the driver has no cuTensorMapEncodeTiled (needs CUDA 12)");
  }
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(head_dim), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(head_dim) * 2};
  const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(box_tokens)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result =
      tensor_map_encoder()(map,
                           dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                     : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                           2, const_cast<void*>(cache), sizes, strides, box, steps,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  return Status::error("paged_attention: cuTensorMapEncodeTiled failed with code " +
                       std::to_string(static_cast<int>(result)) + " for a cache of " +
                       std::to_string(rows) + " rows of " + std::to_string(head_dim));
}

}  // namespace regatta::cuda
