// The key or value cache as the tensor copy engine sees it.
#pragma once

#include "attention.cuh"
#include "cuda/tensor_map.cuh"

namespace regatta::cuda {

// The cache as a matrix [rows, head_dim], in boxes of [box_tokens, 64].
inline Status encode_cache(CUtensorMap* map, const void* cache, DType dtype, int64_t rows,
                           int head_dim, int box_tokens) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(head_dim), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(head_dim) * 2};
  const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(box_tokens)};
  return encode_map(map,
                    dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                              : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                    cache, 2, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_128B,
                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

}  // namespace regatta::cuda
