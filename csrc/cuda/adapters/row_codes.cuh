// What adds a row's low-rank products: its units of 16 bytes, and the codes that its linear's
// product takes.
#pragma once

#include <cstdint>

#include "cuda/adapters/tiles.cuh"
#include "cuda/common.cuh"
#include "cuda/gemm/quantize_row.cuh"

namespace regatta::cuda {
namespace {

constexpr int kRowThreads = kRanks * kWarp;  // a warp has a rank
static_assert(kRowThreads == kQuantizeThreads);

// 16 bytes of a row from `first` on, what lies past its end as 0.
template <bool kVector, class T>
__device__ __forceinline__ Vec16<T> load_unit(const T* row, int first, int width) {
  Vec16<T> unit = {};
  if (kVector) {
    if (first < width) unit = load16(row + first);
  } else {
#pragma unroll
    for (int i = 0; i < Vec16<T>::kSize; ++i) {
      if (first + i < width) unit.v[i] = row[first + i];
    }
  }
  return unit;
}

// Of A, times the norm's weight.
template <class T>
__device__ __forceinline__ void scale_unit(Vec16<T>& a, const Vec16<T>& norm) {
#pragma unroll
  for (int i = 0; i < Vec16<T>::kSize; ++i) a.set(i, a.get(i) * norm.get(i));
}

// Which codes. kVectors: pieces of a row that a thread has.
struct NoCodes {
  static constexpr int kVectors = 0;
};
template <bool kFp8Codes, RowKind kRowKind, int kPieces>
struct Codes {
  static constexpr bool kFp8 = kFp8Codes;
  static constexpr RowKind kKind = kRowKind;
  static constexpr int kVectors = kPieces;
};
constexpr int kFewVectors = 2, kMostVectors = 8;
constexpr int64_t kFewColumns = int64_t{kRowThreads} * 8 * kFewVectors;
constexpr int64_t kMostColumns = int64_t{kRowThreads} * 8 * kMostVectors;

// Those of a row, by a block.
template <class T, class C>
__device__ __forceinline__ void quantize(const QuantizeRowsParams& p, int64_t row) {
  using R = Row<T, C::kKind, C::kVectors, kRowThreads>;
  __shared__ QuantizeScratch scratch;
  const int64_t width = p.width;
  Vec16<T> x[C::kVectors], weight[R::kNumWeights] = {};
  if constexpr (R::kKeepsWeight) R::load(p.norm_weight, static_cast<int>(width), weight);
  const float fixed = p.static_scale != nullptr ? *p.static_scale : 0.f;
  pdl_wait();
  R::load(static_cast<const T*>(p.x) + row * width, static_cast<int>(width), x);
  uint8_t* codes = static_cast<uint8_t*>(p.codes) + row * width;
  const float scale = quantize_row<T, C::kFp8, C::kKind, C::kVectors, kRowThreads>(
      p, x, weight, fixed, scratch, 1,
      [&](int at, uint2 eight) { *reinterpret_cast<uint2*>(codes + at) = eight; });
  if (threadIdx.x == 0) p.scale[row] = scale;
}

// run(codes) with those that q asks for, of rows of up to kColumns values.
template <int64_t kColumns, class Run>
Status dispatch_codes(const QuantizeRowsParams& q, const Run& run) {
  constexpr int kVectors = static_cast<int>(kColumns / (kRowThreads * 8));
  if (q.codes == nullptr) return run(NoCodes());
  const bool plain = row_kind(q) == RowKind::kPlain;
  if (q.operands == GemmOperands::kFp8) {
    return plain ? run(Codes<true, RowKind::kPlain, kVectors>())
                 : run(Codes<true, RowKind::kNorm, kVectors>());
  }
  return plain ? run(Codes<false, RowKind::kPlain, kVectors>())
               : run(Codes<false, RowKind::kNorm, kVectors>());
}

}  // namespace
}  // namespace regatta::cuda
