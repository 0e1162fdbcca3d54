// A row of activations to codes by 256 threads: what quantize_rows() does for each row, and
// gemm_stream_codes_sm90() for its only one. One routine, so that a row has the same codes
// everywhere.
#pragma once

#include <cuda_fp8.h>

#include "cuda/common.cuh"
#include "cuda/hopper.cuh"
#include "regatta/gemm.h"

namespace regatta::cuda {

constexpr int kQuantizeThreads = 256;
constexpr float kFp8Max = 448.f, kInt8Max = 127.f;

// What happens to a row before its codes.
enum class RowKind {
  kPlain,  // nothing
  kNorm,   // a norm with its weight
  kAny,    // all that QuantizeRowsParams has
};

inline RowKind row_kind(const QuantizeRowsParams& p) {
  if (p.shift != nullptr || p.smooth != nullptr) return RowKind::kAny;
  if (p.normalize != (p.norm_weight != nullptr)) return RowKind::kAny;
  return p.normalize ? RowKind::kNorm : RowKind::kPlain;
}

struct QuantizeScratch {  // shared memory, by warp
  float squares[kQuantizeThreads / kWarp], largest[1024 / kWarp];
};

template <bool kFp8>
__device__ __forceinline__ uint32_t four_codes(const float* v, float factor) {
  if constexpr (kFp8) {
    const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(v[0] * factor, v[1] * factor),
                                                  __NV_SATFINITE, __NV_E4M3);
    const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(v[2] * factor, v[3] * factor),
                                                   __NV_SATFINITE, __NV_E4M3);
    return low | high << 16;
  }
  uint32_t packed = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int code = __float2int_rn(fminf(fmaxf(v[j] * factor, -kInt8Max), kInt8Max));
    packed |= static_cast<uint32_t>(code & 0xff) << (j * 8);
  }
  return packed;
}

// Largest magnitude of so many times eight values.
template <class T, int kCount>
__device__ __forceinline__ float largest_of(const Vec16<T> (&x)[kCount]) {
  using Pair = typename Traits<T>::Pair;
  Pair pair = bit_cast<Pair>(0u);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const uint4 bits = bit_cast<uint4>(x[i]);
    pair = __hmax2(
        pair, __hmax2(__hmax2(__habs2(bit_cast<Pair>(bits.x)), __habs2(bit_cast<Pair>(bits.y))),
                      __hmax2(__habs2(bit_cast<Pair>(bits.z)), __habs2(bit_cast<Pair>(bits.w)))));
  }
  const float2 both = Traits<T>::to_float2(pair);
  return fmaxf(both.x, both.y);
}

// Keeps the compiler from keeping pieces as floats from one pass to the next: they would not fit
// into the registers.
template <class T, int kCount>
__device__ __forceinline__ void forget_floats(Vec16<T> (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    uint4 bits = bit_cast<uint4>(x[i]);
    asm volatile("" : "+r"(bits.x), "+r"(bits.y), "+r"(bits.z), "+r"(bits.w));
    x[i] = bit_cast<Vec16<T>>(bits);
  }
}

// What values are multiplied by, and the scale of their codes. divisor: of the values, applied
// here.
struct CodeScale {
  float factor, scale;
};

// fixed: above 0 the scale itself; below 0 its opposite bounds the largest value, divisor and all,
// and what is larger saturates.
template <bool kFp8>
__device__ __forceinline__ CodeScale code_scale(float fixed, float largest, float divisor) {
  if (fixed > 0.f) return {divisor / fixed, fixed};
  if (fixed < 0.f) largest = fminf(largest, -fixed / divisor);
  // x / rms has the codes of x: the root mean square goes into the scale alone.
  const float own = largest > 0.f ? largest / (kFp8 ? kFp8Max : kInt8Max) : 1.f;
  return {1.f / own, own * divisor};
}

// A row as 256 (or, of kPlain, more) threads hold it: piece i of thread t is eight values, at
// (i * kThreads + t) * 8.
template <class T, RowKind kKind, int kVectors, int kThreads>
struct Row {
  // The order of a sum of squares, hence the scale, must not depend on who computes it.
  static_assert(kKind == RowKind::kPlain || kThreads == kQuantizeThreads);
  // Registers for the norm's weight.
  static constexpr bool kKeepsWeight = kKind == RowKind::kNorm && kVectors <= 2;
  static constexpr int kNumWeights = kKeepsWeight ? kVectors : 1;

  static __device__ __forceinline__ int column(int i) {
    return (i * kThreads + static_cast<int>(threadIdx.x)) * 8;
  }
  template <int kCount>
  static __device__ __forceinline__ void load(const void* from, int width, Vec16<T> (&to)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      to[i] = column(i) < width ? load16(static_cast<const T*>(from) + column(i))
                                : bit_cast<Vec16<T>>(make_uint4(0, 0, 0, 0));
    }
  }
};

// Codes of a row that the block's threads 0 .. kThreads - 1 hold; they meet at named barrier
// `barrier`. weight: of the norm, where Row keeps it. store(at, codes) takes eight codes. Returns
// the row's scale. scratch is free again behind the next call with another one.
template <class T, bool kFp8, RowKind kKind, int kVectors, int kThreads, class Store>
__device__ __forceinline__ float quantize_row(
    const QuantizeRowsParams& p, Vec16<T> (&x)[kVectors],
    const Vec16<T> (&weight)[Row<T, kKind, kVectors, kThreads>::kNumWeights], float fixed,
    QuantizeScratch& scratch, int barrier, Store&& store) {
  using R = Row<T, kKind, kVectors, kThreads>;
  const int width = static_cast<int>(p.width);
  const auto column = [](int i) { return R::column(i); };
  const bool shifted = kKind == RowKind::kAny && p.shift != nullptr;
  // Piece i as it is coded, but for the norm's divisor where nothing is added behind it.
  const auto value_of = [&](int i, float norm, float (&v)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = x[i].get(j);
    if (kKind == RowKind::kNorm || (kKind == RowKind::kAny && p.norm_weight != nullptr)) {
      const Vec16<T> w = R::kKeepsWeight ? weight[R::kKeepsWeight ? i : 0]
                                         : load16(static_cast<const T*>(p.norm_weight) + column(i));
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] *= w.get(j);
    }
    if constexpr (kKind == RowKind::kAny) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (shifted) v[j] = v[j] * norm + p.shift[column(i) + j];
        if (p.smooth != nullptr) v[j] *= p.smooth[column(i) + j];
      }
    }
  };
  const bool dynamic = !(fixed > 0.f);
  const bool normalize = kKind == RowKind::kNorm || (kKind == RowKind::kAny && p.normalize);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  // One pass over the pieces for both.
  const auto reduce = [&](bool want_squares, bool want_largest, float norm) {
    float squares = 0.f, largest = 0.f;
    if constexpr (kKind == RowKind::kPlain) {
      largest = largest_of(x);
    } else {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (column(i) >= width) continue;
        if (want_squares) {
#pragma unroll
          for (int j = 0; j < 8; ++j) squares += x[i].get(j) * x[i].get(j);
        }
        if (want_largest) {
          float v[8];
          value_of(i, norm, v);
#pragma unroll
          for (int j = 0; j < 8; ++j) largest = fmaxf(largest, fabsf(v[j]));
        }
      }
    }
    if (want_squares) squares = warp_sum(squares);
    if (want_largest) largest = warp_max(largest);
    if (lane == 0 && want_squares) scratch.squares[warp] = squares;
    if (lane == 0 && want_largest) scratch.largest[warp] = largest;
    named_barrier_sync(barrier, kThreads);
  };
  float norm = 1.f;
  if (normalize || (dynamic && !shifted)) reduce(normalize, dynamic && !shifted, 1.f);
  if (normalize) {
    float sum = 0.f;
    for (int w = 0; w < kQuantizeThreads / kWarp; ++w) sum += scratch.squares[w];
    norm = rsqrtf(sum / static_cast<float>(width) + p.epsilon);
  }
  if (dynamic && shifted) reduce(false, true, norm);
  forget_floats(x);
  const float divisor = shifted ? 1.f : norm;  // what value_of() leaves out
  const float largest =
      dynamic ? warp_max(lane < kThreads / kWarp ? scratch.largest[lane] : 0.f) : 0.f;
  const CodeScale by = code_scale<kFp8>(fixed, largest, divisor);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (column(i) >= width) continue;
    float v[8];
    value_of(i, norm, v);
    store(column(i),
          make_uint2(four_codes<kFp8>(v, by.factor), four_codes<kFp8>(v + 4, by.factor)));
  }
  return by.scale;
}

}  // namespace regatta::cuda
