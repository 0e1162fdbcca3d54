// A weight as the products here read it: [out_features, in_features] row-major in one dtype.
//
// That is how checkpoints store a matrix, so there is no layout to make, only a dtype and, for
// [in_features, out_features], a transposition. For callers that treat all devices alike; loaders
// convert on the host and copy.
// Architectures: all. A block moves 32 x 32 values through shared memory, so that reads and writes
// both run along rows. Bound: bytes read and written; done once per weight.
#include "cuda/common.cuh"
#include "regatta/cuda_ops.h"

namespace regatta::cuda {
namespace {

constexpr int kTile = 32, kRows = 8;

// Blocks stride over tiles: a grid has at most 65,535 of them in y, a vocabulary more rows.
template <class From, class To>
__global__ void __launch_bounds__(kTile* kRows)
    pack_kernel(const From* __restrict__ weight, To* __restrict__ packed, int64_t in_features,
                int64_t out_features, bool transposed) {
  __shared__ float tile[kTile][kTile + 1];
  const int64_t k0 = static_cast<int64_t>(blockIdx.x) * kTile;
  for (int64_t n0 = static_cast<int64_t>(blockIdx.y) * kTile; n0 < out_features;
       n0 += static_cast<int64_t>(gridDim.y) * kTile) {
    for (int i = threadIdx.y; i < kTile; i += kRows) {
      const int64_t n = transposed ? n0 + i : n0 + threadIdx.x;
      const int64_t k = transposed ? k0 + threadIdx.x : k0 + i;
      if (n < out_features && k < in_features) {
        const int64_t at = transposed ? n * in_features + k : k * out_features + n;
        tile[i][threadIdx.x] = Traits<From>::to_float(weight[at]);
      }
    }
    __syncthreads();
    for (int i = threadIdx.y; i < kTile; i += kRows) {
      const int64_t n = n0 + i, k = k0 + threadIdx.x;
      if (n < out_features && k < in_features) {
        packed[n * in_features + k] =
            Traits<To>::from_float(transposed ? tile[i][threadIdx.x] : tile[threadIdx.x][i]);
      }
    }
    __syncthreads();
  }
}

}  // namespace

Status pack_dense(const PackDenseParams& p, const Launch& launch_on) {
  if (p.in_features == 0 || p.out_features == 0) return {};
  constexpr int64_t kMaxBlocksY = 65535;
  const int64_t tiles = ceil_div(p.out_features, kTile);
  // Not overlapped: the products behind may prefetch weights.
  LaunchConfig config({launch_on.stream}, grid_of(ceil_div(p.in_features, kTile),
                                                  tiles < kMaxBlocksY ? tiles : kMaxBlocksY));
  config.block = dim3(kTile, kRows);
  return dispatch_dtype(p.from, "pack_dense", [&](auto* from) {
    using From = std::remove_pointer_t<decltype(from)>;
    return dispatch_dtype(p.to, "pack_dense", [&](auto* to) {
      using To = std::remove_pointer_t<decltype(to)>;
      return launch(pack_kernel<From, To>, config, "pack_dense", static_cast<const From*>(p.weight),
                    static_cast<To*>(p.packed), p.in_features, p.out_features, p.transposed);
    });
  });
}

}  // namespace regatta::cuda
