// y = epilogue(x w^T) for any dtype, shape and alignment, by float multiply-adds.
//
// Input: as GemmParams says. Architectures: sm_75 and later.
// Algorithm: a block makes 16 tokens by 64 outputs (gated: 32 outputs from 64 rows of weight).
// Slices of 32 values of k of both operands go to shared memory as floats; a thread keeps one
// token's eight sums (gated: eight gates and eight ups) and finishes them itself. Source: the
// definition. Expected bound: shared-memory reads, about 1 TFLOP/s (not measured); it is the
// candidate for fp32 and for shapes that the others refuse, and their twin in tests.
#include "cuda/gemm/gemm_epilogue.cuh"
#include "cuda/gemm/groups.cuh"
#include "cuda/gemm/select.h"
#include "cuda/gemm/tiles.h"
#include "regatta/gemm.h"

namespace regatta::cuda {
namespace {

constexpr int kTokens = 16;
constexpr int kRows = 64;  // of weight
constexpr int kSlice = 32;
constexpr int kThreads = 128;

template <class T, bool kGrouped>
__global__ void __launch_bounds__(kThreads)
    gemm_generic_kernel(const T* __restrict__ all_weights, const T* __restrict__ x,
                        const Epilogue epilogue, const int all_rows, const int in_features,
                        const Groups groups) {
  __shared__ float w_slice[kRows][kSlice + 1];
  __shared__ float x_slice[kTokens][kSlice + 1];
  __shared__ float row_scale[kTokens];
  GroupTile own = {0, static_cast<int>(blockIdx.y) * kTokens, all_rows};
  if constexpr (kGrouped) {
    if (!groups.ready) pdl_wait();
    own = find_group_tile<kTokens>(groups, blockIdx.y);
    if (own.group < 0) return;
  }
  const int token0 = own.first, num_rows = own.end;
  const auto& p = epilogue_of<T, kGrouped>(epilogue, own.group);
  const T* weight = all_weights + static_cast<int64_t>(own.group) * p.out_features * in_features;
  const int chunks = p.gated ? 4 : 8;
  const int width = p.gated ? p.out_features / 2 : p.out_features;
  const int outputs = chunks * 8;
  const int first = blockIdx.x * outputs;
  const int t = threadIdx.x / chunks;  // 0..31 when gated: the upper half only helps to load
  const int chunk = threadIdx.x % chunks;
  pdl_trigger();
  pdl_wait();
  float v[16] = {};
  for (int k0 = 0; k0 < in_features; k0 += kSlice) {
    __syncthreads();
    for (int i = threadIdx.x; i < kRows * kSlice; i += kThreads) {
      const int r = i / kSlice;
      const int k = k0 + i % kSlice;
      // Gated: rows 0..31 are gates, 32..63 their ups.
      const int n = p.gated ? first + r % 32 : first + r;
      const int64_t row = p.gated && r >= 32 ? width + n : n;
      w_slice[r][i % kSlice] =
          n < width && k < in_features ? Traits<T>::to_float(weight[row * in_features + k]) : 0.f;
    }
    for (int i = threadIdx.x; i < kTokens * kSlice; i += kThreads) {
      const int row = token0 + i / kSlice;
      const int k = k0 + i % kSlice;
      x_slice[i / kSlice][i % kSlice] =
          row < num_rows && k < in_features
              ? Traits<T>::to_float(x[static_cast<int64_t>(row) * in_features + k])
              : 0.f;
    }
    __syncthreads();
    if (t < kTokens) {
      for (int k = 0; k < kSlice; ++k) {
        const float xv = x_slice[t][k];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          v[i] = fmaf(xv, w_slice[chunk * 8 + i][k], v[i]);
          if (p.gated) v[8 + i] = fmaf(xv, w_slice[32 + chunk * 8 + i][k], v[8 + i]);
        }
      }
    }
  }
  if (threadIdx.x < kTokens && token0 + threadIdx.x < num_rows) {
    row_scale[threadIdx.x] = row_scale_of(p, token0 + threadIdx.x);
  }
  __syncthreads();
  if (t >= kTokens || token0 + t >= num_rows) return;
  const int n0 = first + chunk * 8;
  float squares = finish<T>(p, v, row_scale[t], token0 + t, n0, width);
  if (p.sumsq_out != nullptr) {
    const int lane = threadIdx.x % kWarp;
    const int lanes = p.sumsq_columns / 8;
    const unsigned mask = 0xffu << (lane & 24);
    for (int o = lanes / 2; o > 0; o /= 2) squares += __shfl_xor_sync(mask, squares, o);
    const int part = n0 / p.sumsq_columns;
    const int parts = (width + p.sumsq_columns - 1) / p.sumsq_columns;
    if (lane % lanes == 0 && part < parts) {
      p.sumsq_out[static_cast<int64_t>(token0 + t) * parts + part] = squares;
    }
  }
}

template <class T, bool kGrouped>
Status run(const GemmParams& p, cudaStream_t stream) {
  const int64_t width = p.gated ? p.out_features / 2 : p.out_features;
  const int64_t tiles =
      kGrouped ? max_group_tiles(p.num_rows, p.num_groups, kTokens) : ceil_div(p.num_rows, kTokens);
  return launch(
      gemm_generic_kernel<T, kGrouped>,
      {{stream, p.dependent_launch}, grid_of(ceil_div(width, p.gated ? 32 : 64), tiles), kThreads},
      "gemm_generic", static_cast<const T*>(p.weight), static_cast<const T*>(p.x), make_epilogue(p),
      static_cast<int>(p.num_rows), static_cast<int>(p.in_features), make_groups(p));
}

}  // namespace

Status gemm_generic(const GemmParams& p, CUstream_st* stream) {
  REGATTA_RETURN_IF_ERROR(refusal("gemm_generic", gemm_generic_refuses(p)));
  if (p.num_rows == 0) return {};
  return dispatch_dtype(p.dtype, "gemm_generic", [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return p.num_groups > 0 ? run<T, true>(p, stream) : run<T, false>(p, stream);
  });
}

}  // namespace regatta::cuda
