// What gemm_sm90 and gemm_groups_sm90 share: stages of k in shared memory, their sums, and the
// kernel of a tile.
#pragma once

#include <cuda_fp8.h>

#include <type_traits>

#include "cuda/hopper.cuh"
#include "cuda/wgmma.cuh"
#include "regatta/gemm.h"

namespace regatta::cuda {
namespace {

constexpr int kGroup = 128;         // threads of a warpgroup: 64 features each
constexpr int kChunk = 16;          // features of a warp of it
constexpr int kHelperThreads = 64;  // one warp that copies, one that makes scales ready
constexpr int kMaxStages = 16;
constexpr int kRowBytes = 128;   // of k per stage: one swizzled row
constexpr int kWgmmaBytes = 32;  // of k per instruction
// Hopper keeps some 14 bits of a sum of e4m3 products: every so many stages, it goes to a float
// (but not with 128 tokens, which leave no registers for it).
constexpr int kPromoteStages = 4;

template <int kFeatures, int kTokens>
struct Stages {
  static constexpr int kWeightBytes = kFeatures * kRowBytes;
  static constexpr int kTokenBytes = kTokens * kRowBytes;
  static constexpr int kStageBytes = kWeightBytes + kTokenBytes;
};

// Of 64 features by kTokens, of a warpgroup. T: of x and weight. kBlocks: every stage has scales of
// its own.
template <class T, int kTokens, bool kBlocks>
struct StageSums {
  static constexpr bool kPromote = std::is_same_v<T, __nv_fp8_e4m3> && kTokens <= 64;
  static constexpr int kPromoteEvery = kBlocks ? 1 : kPromoteStages;
  static_assert(!kBlocks || (kPromote && kRowBytes / sizeof(T) == kScaleBlock));
  using Acc = std::conditional_t<std::is_same_v<T, int8_t>, int, float>;

  Acc acc[kTokens / 2];
  float total[kPromote ? kTokens / 2 : 1];

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) acc[i] = 0;
#pragma unroll
    for (float& x : total) x = 0.f;
  }

  // Asks for the products of stage `step`. Returns whether `acc` is to go to `total`; else at most
  // this stage's products are not done.
  __device__ __forceinline__ bool add(WgmmaTile weights, WgmmaTile tokens, int step, bool is_last) {
    wgmma_pin(acc);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kRowBytes / kWgmmaBytes; ++k) {
      Wgmma<T, kTokens>::run(acc, weights.at(k * kWgmmaBytes), tokens.at(k * kWgmmaBytes),
                             !kPromote || k > 0 || step % kPromoteEvery > 0);
    }
    wgmma_commit();
    wgmma_pin(acc);
    if (kPromote && (step % kPromoteEvery == kPromoteEvery - 1 || is_last)) {
      wgmma_wait<0>();
      wgmma_pin(acc);
      return true;
    }
    wgmma_wait<1>();
    return false;
  }

  __device__ __forceinline__ void promote() {
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) total[kPromote ? i : 0] += acc[i];
  }

  // The same with the scales of blocks: x_scale of the tile's tokens, aligned to 8 bytes or not,
  // and of this thread's rows of weight.
  template <bool kAligned>
  __device__ __forceinline__ void promote(const float* x_scale, float low, float high) {
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) {
      const float* at = x_scale + j * 8 + threadIdx.x % 4 * 2;
      const float2 x = kAligned ? *reinterpret_cast<const float2*>(at) : make_float2(at[0], at[1]);
      total[4 * j] += acc[4 * j] * (x.x * low);
      total[4 * j + 1] += acc[4 * j + 1] * (x.y * low);
      total[4 * j + 2] += acc[4 * j + 2] * (x.x * high);
      total[4 * j + 3] += acc[4 * j + 3] * (x.y * high);
    }
  }

  __device__ __forceinline__ void end() {
    wgmma_wait<0>();
    wgmma_pin(acc);
  }

  // to: of this warp's first feature, token by token, `stride` floats apart.
  __device__ __forceinline__ void store(float* to, int stride) const {
    const int lane = threadIdx.x % kWarp;
    to += lane % 4 * 2 * stride + lane / 4;
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j, to += 8 * stride) {
      const auto sum = [&](int i) {
        return kPromote ? total[kPromote ? 4 * j + i : 0] : static_cast<float>(acc[4 * j + i]);
      };
      to[0] = sum(0);
      to[stride] = sum(1);
      to[8] = sum(2);
      to[stride + 8] = sum(3);
    }
  }
};

// run(features, tokens) with those of a tile as constants; what is none of them counts as the most.
template <int kMostFeatures, int kMostTokens, class Run>
Status dispatch_tile(const GemmTile& tile, const Run& run) {
  const auto run_tokens = [&](auto features) {
    switch (tile.tokens) {
      case 8:
        return run(features, std::integral_constant<int, 8>());
      case 16:
        return run(features, std::integral_constant<int, 16>());
      case 32:
        return run(features, std::integral_constant<int, 32>());
      case 64:
        return run(features, std::integral_constant<int, 64>());
      default:
        return run(features, std::integral_constant<int, kMostTokens>());
    }
  };
  switch (tile.features) {
    case 64:
      return run_tokens(std::integral_constant<int, 64>());
    case 128:
      return run_tokens(std::integral_constant<int, 128>());
    default:
      return run_tokens(std::integral_constant<int, kMostFeatures>());
  }
}

}  // namespace
}  // namespace regatta::cuda
