// What gemm_packed_sm90.cu and gemm_packed_groups_sm90.cuh share: stages, and the loop over them,
// in which a warp multiplies its slab of packed weights. The first says how.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/gemm/gemm_epilogue.cuh"
#include "cuda/gemm/gemm_tensor_map.cuh"
#include "cuda/gemm/packed_weight.cuh"
#include "cuda/gemm/select.h"
#include "cuda/hopper.cuh"
#include "cuda/wgmma.cuh"
#include "regatta/gemm.h"

namespace regatta::cuda {
namespace {

constexpr int kGroup = 128;  // threads of a warpgroup
constexpr int kMaxStages = 16;
constexpr int kRowBytes = 128;  // 64 values or 128 codes of x: one swizzled row
constexpr int kHeadBytes = 1024;

constexpr int kSlabs = kSmallPackedRows / kUnitRows;  // a warp each; gated, gates and their ups
constexpr int kConsumers = kSlabs * kWarp;

// A stage: x of kTokens tokens, and behind it weights, 128 columns of each.
template <class F, int kTokens>
struct Stage {
  static constexpr int kBoxes = F::kTokenSize;  // of x, of a stage
  static constexpr int kBoxColumns = kUnitColumns / kBoxes;
  static constexpr int kTokenBytes = kTokens * kRowBytes;  // of a box
  static constexpr int kWeights = kBoxes * kTokenBytes;    // where they begin
  static constexpr int kStageLoad = kWeights + kSlabs * F::kUnitBytes;
  static constexpr int kStageBytes = (kStageLoad + 1023) / 1024 * 1024;
  static constexpr int kSums = F::kTokenSize == 1 ? kTokens / 2 : 0;  // of a group of codes
  static constexpr int kAccumulators = kTokens / 2 + kSums;           // per thread
  // One warp more copies, and others may do what they can; a warpgroup can give its registers away.
  static constexpr bool kGives = kAccumulators > 64;
};

// Where a warp is in a ring of stages.
struct Ring {
  uint64_t *full, *empty;
  int stages;
  int s = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++s == stages) s = 0, phase ^= 1;
  }
  __device__ __forceinline__ void wait() const { barrier_wait(&full[s], phase); }
  // Hands a stage back, by a warp.
  __device__ __forceinline__ void release(int stage) const {
    if (threadIdx.x % kWarp == 0) barrier_arrive(&empty[stage]);
  }
};

// A thread's four sums of eight tokens by a slab, in shared memory.
template <int kStride>
__device__ __forceinline__ void store_sums(float* to, const float* v) {
  to[0] = v[0], to[kStride] = v[1], to[8] = v[2], to[kStride + 8] = v[3];
}

__device__ __forceinline__ void load_four(float (&v)[4], const float* from) {
  const float4 four = *reinterpret_cast<const float4*>(from);
  v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
}

template <class T>
__device__ __forceinline__ float value_of(const uint2& four, int i) {
  return Traits<T>::to_float(
      bit_cast<T>(static_cast<uint16_t>((i < 2 ? four.x : four.y) >> (i % 2 * 16))));
}

// Four values of T, of which `inside` are there. aligned: to 8 bytes.
template <class T>
__device__ __forceinline__ uint2 load_four(const T* from, int inside, bool aligned) {
  if (inside == 4 && aligned) return __ldcg(reinterpret_cast<const uint2*>(from));
  uint32_t v[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < inside) v[i] = __ldcg(reinterpret_cast<const uint16_t*>(from) + i);
  }
  return make_uint2(v[0] | v[1] << 16, v[2] | v[3] << 16);
}

template <class T>
__device__ __forceinline__ void write_four(T* to, const float (&y)[4], int inside, bool aligned) {
  T four[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) four[i] = Traits<T>::from_float(y[i]);
  if (inside == 4 && aligned) {
    *reinterpret_cast<uint2*>(to) = bit_cast<uint2>(four);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < inside) to[i] = four[i];
  }
}

// acc becomes the sums of a warp's slab over the next num_steps stages, at least one, of which the
// first has come. tokens, units: x and this warp's unit in stage 0. Returns the stage that the
// caller hands back, or -1.
template <class T, class F, int kTokens>
__device__ __forceinline__ int multiply_slab(float (&acc)[kTokens / 2], const WgmmaTile& tokens,
                                             const char* units, int has_slab, int num_steps,
                                             Ring& ring) {
  using S = Stage<F, kTokens>;
  int last = -1;
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) acc[i] = 0.f;
  // At least once: a way around the loop would set accumulators beside those in flight, for
  // which the compiler makes each instruction wait for the one ahead.
  int left = num_steps;
  if constexpr (F::kTokenSize == 1) {
    int sum[kTokens / 2];
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) sum[i] = 0;
    uint32_t a[2][2][4];  // one is made while the tensor cores read the other
    W4A8Codes<F> codes;
    codes.load(units + ring.s * S::kStageBytes, 0);
    do {
      const WgmmaTile b = tokens.at(ring.s * S::kStageBytes);
      const int offset = ring.s * S::kStageBytes;
      const int current = ring.s;
      ring.advance();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        constexpr bool kEach = F::kColumns == 64;  // half is a group
        const float2 scale = codes.convert(a[half]);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          Wgmma<int8_t, kTokens>::run(sum, a[half][k], b.at((2 * half + k) * 32),
                                      k > 0 || (half > 0 && !kEach));
        }
        wgmma_commit();
        if (half == 0) {
          codes.load(units + offset, 1);
        } else if (left > 1) {
          ring.wait();
          codes.load(units + ring.s * S::kStageBytes, 0);
        }
        if (half == 0 && !kEach) continue;
        wgmma_wait<0>();
        wgmma_pin(sum);
        if (half == 1) ring.release(current);
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) {
          acc[i] = fmaf(i % 4 < 2 ? scale.x : scale.y, static_cast<float>(sum[i]), acc[i]);
        }
      }
    } while (--left > 0);
  } else {
    int previous = -1;
    uint32_t a[2][4][4] = {};  // one is made while the tensor cores read the other
    const auto release = [&](int stage) {
      if (stage >= 0) ring.release(stage);
    };
    // Of few tokens it is less to scale a group's sums than its operands, which are then not
    // rounded.
    constexpr bool kScalesSums = F::kGroups && F::kColumns >= 64 && kTokens <= 32;
    float sum[kScalesSums ? kTokens / 2 : 1] = {};  // of a group
    float2 scale = make_float2(0.f, 0.f);           // its rows'
    const auto add_group = [&] {
#pragma unroll
      for (int i = 0; i < (kScalesSums ? kTokens / 2 : 0); ++i) {
        acc[i] = fmaf(i % 4 < 2 ? scale.x : scale.y, sum[i], acc[i]);
      }
    };
    PackedCodes<T, F> codes[2];  // of halves of a unit
    codes[0].load(units + ring.s * S::kStageBytes, 0);
    codes[1].load_second(units + ring.s * S::kStageBytes, codes[0]);
    do {
      const WgmmaTile b = tokens.at(ring.s * S::kStageBytes);
      const int current = ring.s;
      ring.advance();
      const char* next = units + ring.s * S::kStageBytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool begins = half == 0 || F::kColumns == 64;  // a group
        if (has_slab) codes[half].template convert<!kScalesSums>(a[half]);
        if constexpr (kScalesSums) {
          wgmma_wait<0>();
          wgmma_pin(sum);
          if (begins) add_group();
          if (begins) scale = codes[half].group_scales();
        }
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const WgmmaTile at = b.at(half * S::kTokenBytes + k * 32);
          if constexpr (kScalesSums) {
            Wgmma<T, kTokens>::run(sum, a[half][k], at, k > 0 || !begins);
          } else {
            Wgmma<T, kTokens>::run(acc, a[half][k], at, 1);
          }
        }
        wgmma_commit();
        if (kScalesSums && half == 0) release(previous);
        if constexpr (!kScalesSums) {
          wgmma_wait<1>();
          if (half == 0) release(previous);
        }
        // The next unit's codes are asked for ahead of their use: warps are few. What takes longest
        // decides when, the products of a half or the copies.
        if (left > 1 && half == (kScalesSums ? 0 : 1)) {
          ring.wait();  // behind release(): of two stages, the copies wait for it
          codes[0].load(next, 0);
        }
        if (left > 1 && half == 1) codes[1].load_second(next, codes[0]);
      }
      previous = current;
    } while (--left > 0);
    if constexpr (kScalesSums) {
      wgmma_wait<0>();
      wgmma_pin(sum);
      add_group();
    }
    last = previous;
  }
  wgmma_wait<0>();
  wgmma_pin(acc);
  return last;
}

}  // namespace
}  // namespace regatta::cuda
