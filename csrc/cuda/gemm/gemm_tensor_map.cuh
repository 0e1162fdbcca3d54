// Tensor maps of the operands of a product, for the copy engine. Host code.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <string>
#include <type_traits>

#include "cuda/common.cuh"
#include "regatta/gemm.h"

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
        "gemm: the driver has no cuTensorMapEncodeTiled (CUDA 12 or newer needed)");
  }
  const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
  const CUresult result =
      encoder(map, type, rank, const_cast<void*>(data), sizes, stride_bytes, box, ones,
              CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return Status::error("gemm: cuTensorMapEncodeTiled failed with code " +
                         std::to_string(static_cast<int>(result)));
  }
  return {};
}

// A tensor of 16-bit or 8-bit elements; sizes and box innermost first, strides in elements from the
// second dimension on; boxes are 128 bytes wide and swizzled.
inline Status encode_tensor_map(CUtensorMap* map, DType dtype, const void* data, int rank,
                                const cuuint64_t* sizes, const cuuint64_t* strides,
                                const cuuint32_t* box) {
  const int64_t size = dtype_size(dtype);
  cuuint64_t stride_bytes[5];
  for (int i = 0; i + 1 < rank; ++i) stride_bytes[i] = strides[i] * size;
  const CUtensorMapDataType type = size == 1                   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                               : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return encode_map(map, type, data, rank, sizes, stride_bytes, box, CU_TENSOR_MAP_SWIZZLE_128B,
                    CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

// A matrix [rows, columns] of such elements; boxes of `box_rows` rows.
inline Status encode_rows_map(CUtensorMap* map, DType dtype, const void* data, int64_t rows,
                              int64_t columns, int box_rows) {
  const auto width = static_cast<cuuint64_t>(columns);
  const cuuint64_t sizes[] = {width, static_cast<cuuint64_t>(rows)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(128 / dtype_size(dtype)),
                            static_cast<cuuint32_t>(box_rows)};
  return encode_tensor_map(map, dtype, data, 2, sizes, &width, box);
}

// The same; boxes of `box_rows` rows by `boxes` times 128 bytes, one behind the other. columns: a
// multiple of 128 bytes.
inline Status encode_boxes_map(CUtensorMap* map, DType dtype, const void* data, int64_t rows,
                               int64_t columns, int box_rows, int boxes) {
  const auto width = static_cast<cuuint64_t>(128 / dtype_size(dtype));
  const auto k = static_cast<cuuint64_t>(columns);
  const cuuint64_t sizes[] = {width, static_cast<cuuint64_t>(rows), k / width};
  const cuuint64_t strides[] = {k, width};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(width), static_cast<cuuint32_t>(box_rows),
                            static_cast<cuuint32_t>(boxes)};
  return encode_tensor_map(map, dtype, data, 3, sizes, strides, box);
}

// The weight [2 I, columns] of a gated product, gates first, likewise; eight rows of gates and the
// eight rows of their ups take turns in a box, so that one thread's sums hold both.
inline Status encode_gated_map(CUtensorMap* map, DType dtype, const void* data, int64_t rows,
                               int64_t columns, int box_rows) {
  const auto n = static_cast<cuuint64_t>(rows), k = static_cast<cuuint64_t>(columns);
  const cuuint64_t sizes[] = {k, 8, 2, n / 16};
  const cuuint64_t strides[] = {k, n / 2 * k, 8 * k};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(128 / dtype_size(dtype)), 8, 2,
                            static_cast<cuuint32_t>(box_rows / 16)};
  return encode_tensor_map(map, dtype, data, 4, sizes, strides, box);
}

// The same two of weights [groups, rows, columns], a box of one group: rows behind its last are
// zeros, and not the next group's.
inline Status encode_group_rows_map(CUtensorMap* map, DType dtype, const void* data, int64_t groups,
                                    int64_t rows, int64_t columns, int box_rows) {
  const auto n = static_cast<cuuint64_t>(rows), k = static_cast<cuuint64_t>(columns);
  const cuuint64_t sizes[] = {k, n, static_cast<cuuint64_t>(groups)};
  const cuuint64_t strides[] = {k, n * k};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(128 / dtype_size(dtype)),
                            static_cast<cuuint32_t>(box_rows), 1};
  return encode_tensor_map(map, dtype, data, 3, sizes, strides, box);
}

inline Status encode_group_gated_map(CUtensorMap* map, DType dtype, const void* data,
                                     int64_t groups, int64_t rows, int64_t columns, int box_rows) {
  const auto n = static_cast<cuuint64_t>(rows), k = static_cast<cuuint64_t>(columns);
  const cuuint64_t sizes[] = {k, 8, 2, n / 16, static_cast<cuuint64_t>(groups)};
  const cuuint64_t strides[] = {k, n / 2 * k, 8 * k, n * k};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(128 / dtype_size(dtype)), 8, 2,
                            static_cast<cuuint32_t>(box_rows / 16), 1};
  return encode_tensor_map(map, dtype, data, 5, sizes, strides, box);
}

// How a tensor map reads elements of T.
template <class T>
constexpr DType kMapType = sizeof(T) == 1                     ? DType::kUInt8
                           : std::is_same_v<T, __nv_bfloat16> ? DType::kBFloat16
                                                              : DType::kFloat16;

// The weight of a product, or those of its groups, in boxes of `box_rows` rows.
template <class T, bool kGated, bool kGrouped>
Status encode_weight_map(CUtensorMap* map, const GemmParams& p, int box_rows) {
  if constexpr (kGrouped) {
    constexpr auto kEncode = kGated ? encode_group_gated_map : encode_group_rows_map;
    return kEncode(map, kMapType<T>, p.weight, p.num_groups, p.out_features, p.in_features,
                   box_rows);
  } else {
    constexpr auto kEncode = kGated ? encode_gated_map : encode_rows_map;
    return kEncode(map, kMapType<T>, p.weight, p.out_features, p.in_features, box_rows);
  }
}

// How often the slabs of packed_slabs() follow each other in a packed weight: of every group of
// rows, gates' and, behind them, their ups'.
inline cuuint64_t packed_parts(const GemmParams& p) {
  return static_cast<cuuint64_t>(std::max<int64_t>(p.num_groups, 1) * (p.gated ? 2 : 1));
}
inline cuuint64_t packed_slabs(const GemmParams& p) {
  return static_cast<cuuint64_t>(packed_tiles(p.out_features) / (p.gated ? 2 : 1));
}

// A packed weight (packed_weight.cuh); gated, gates' slabs first, then as many of their ups. A box
// is `halves` halves of units of `box_slabs` slabs, gated of as many of both; its place is its half
// along k, slab, and the group of rows, gated twice that. One instruction asks for it: one for each
// slab took a copying warp longer than the products of a stage.
inline Status encode_packed_map(CUtensorMap* map, const GemmParams& p, int unit_bytes,
                                int box_slabs, int halves = 2) {
  const auto half = static_cast<cuuint64_t>(unit_bytes / 2);
  const auto halves_of_slab = static_cast<cuuint64_t>(packed_units(p.in_features) * 2);
  const cuuint64_t slabs = packed_slabs(p);
  const cuuint64_t sizes[] = {half / 8, halves_of_slab, slabs, packed_parts(p)};
  const cuuint64_t stride_bytes[] = {half, half * halves_of_slab, half * halves_of_slab * slabs};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(half / 8), static_cast<cuuint32_t>(halves),
                            static_cast<cuuint32_t>(box_slabs), p.gated ? 2u : 1u};
  return encode_map(map, CU_TENSOR_MAP_DATA_TYPE_INT64, p.weight, 4, sizes, stride_bytes, box,
                    CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

// The same packed weight; a box is `part_bytes` of one unit of `box_slabs` slabs, gated of as many
// of both; its place is bytes / 8 into the unit, unit, slab, and as above.
inline Status encode_packed_part_map(CUtensorMap* map, const GemmParams& p, int unit_bytes,
                                     int part_bytes, int box_slabs) {
  const auto unit = static_cast<cuuint64_t>(unit_bytes);
  const auto units = static_cast<cuuint64_t>(packed_units(p.in_features));
  const cuuint64_t slabs = packed_slabs(p);
  const cuuint64_t sizes[] = {unit / 8, units, slabs, packed_parts(p)};
  const cuuint64_t stride_bytes[] = {unit, unit * units, unit * units * slabs};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(part_bytes / 8), 1,
                            static_cast<cuuint32_t>(box_slabs), p.gated ? 2u : 1u};
  return encode_map(map, CU_TENSOR_MAP_DATA_TYPE_INT64, p.weight, 4, sizes, stride_bytes, box,
                    CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

}  // namespace regatta::cuda
