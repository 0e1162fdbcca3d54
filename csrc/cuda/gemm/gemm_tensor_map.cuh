// Tensor maps of the operands of a product, for the copy engine. Host code.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/tensor_map.cuh"
#include "regatta/gemm.h"

namespace regatta::cuda {

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

// How a tensor map reads elements of T.
template <class T>
constexpr DType kMapType = sizeof(T) == 1                     ? DType::kUInt8
                           : std::is_same_v<T, __nv_bfloat16> ? DType::kBFloat16
                                                              : DType::kFloat16;

// The weight of a product, [rows, columns], or those of its groups [groups, rows, columns], in
// boxes of `box_rows` rows: of one group, whose rows behind the last are zeros, and not the next
// group's. Gated, [2 I, columns] with gates first: eight rows of gates and the eight rows of their
// ups take turns in a box, so that one thread's sums hold both.
template <class T, bool kGated, bool kGrouped>
Status encode_weight_map(CUtensorMap* map, const GemmParams& p, int box_rows) {
  const auto n = static_cast<cuuint64_t>(p.out_features);
  const auto k = static_cast<cuuint64_t>(p.in_features);
  const auto groups = static_cast<cuuint64_t>(p.num_groups);
  constexpr cuuint32_t kWidth = 128 / sizeof(T);
  const auto rows = static_cast<cuuint32_t>(box_rows);
  if constexpr (kGated) {
    const cuuint64_t sizes[] = {k, 8, 2, n / 16, groups};
    const cuuint64_t strides[] = {k, n / 2 * k, 8 * k, n * k};
    const cuuint32_t box[] = {kWidth, 8, 2, rows / 16, 1};
    return encode_tensor_map(map, kMapType<T>, p.weight, kGrouped ? 5 : 4, sizes, strides, box);
  } else {
    const cuuint64_t sizes[] = {k, n, groups};
    const cuuint64_t strides[] = {k, n * k};
    const cuuint32_t box[] = {kWidth, rows, 1};
    return encode_tensor_map(map, kMapType<T>, p.weight, kGrouped ? 3 : 2, sizes, strides, box);
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

// A packed weight (packed_weight.cuh) in pieces of `piece_bytes`; gated, gates' slabs first, then
// as many of their ups. A box is `pieces` of `box_bytes` at the start of a piece each, of
// `box_slabs` slabs, gated of as many of both; its place is bytes / 8 into the piece, piece, slab,
// and the group of rows, gated twice that.
inline Status encode_pieces_map(CUtensorMap* map, const GemmParams& p, int64_t piece_bytes,
                                int64_t num_pieces, int box_bytes, int pieces, int box_slabs) {
  const auto piece = static_cast<cuuint64_t>(piece_bytes);
  const auto count = static_cast<cuuint64_t>(num_pieces);
  const cuuint64_t slabs = packed_slabs(p);
  const cuuint64_t sizes[] = {piece / 8, count, slabs, packed_parts(p)};
  const cuuint64_t stride_bytes[] = {piece, piece * count, piece * count * slabs};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_bytes / 8), static_cast<cuuint32_t>(pieces),
                            static_cast<cuuint32_t>(box_slabs), p.gated ? 2u : 1u};
  return encode_map(map, CU_TENSOR_MAP_DATA_TYPE_INT64, p.weight, 4, sizes, stride_bytes, box,
                    CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

// Boxes of `halves` halves of units. One instruction asks for a box: one for each slab took a
// copying warp longer than the products of a stage.
inline Status encode_packed_map(CUtensorMap* map, const GemmParams& p, int unit_bytes,
                                int box_slabs, int halves = 2) {
  return encode_pieces_map(map, p, unit_bytes / 2, packed_units(p.in_features) * 2, unit_bytes / 2,
                           halves, box_slabs);
}

// Boxes of `part_bytes` of one unit.
inline Status encode_packed_part_map(CUtensorMap* map, const GemmParams& p, int unit_bytes,
                                     int part_bytes, int box_slabs) {
  return encode_pieces_map(map, p, unit_bytes, packed_units(p.in_features), part_bytes, 1,
                           box_slabs);
}

}  // namespace regatta::cuda
