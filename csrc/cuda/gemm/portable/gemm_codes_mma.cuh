// Products of codes of 8 bits on both sides by mma.sync: the kernels of gemm_codes_mma.cu, which
// says what they are, and of gemm_codes_mma_sm89.cu.
#pragma once

#include "gemm_mma.cuh"

namespace regatta::cuda {
namespace {

// d[16,8] += a[16,32] b[32,8]. Lane l holds, with g = l / 4 and c = 4 * (l % 4):
//   d: as mma_m16n8k16
//   a: four codes at (g, c), (g+8, c), (g, c+16), (g+8, c+16)    b: at rows c, c+16 of column g
__device__ __forceinline__ void mma_codes(int (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                          uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  mma_m16n8k32(d, a, b0, b1);
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+r"(d[i % 2 * 2]), "+r"(d[i % 2 * 2 + 1])
                 : "r"(a[i]), "r"(i < 2 ? b0 : b1));
  }
#endif
}

__device__ __forceinline__ void mma_codes(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                          uint32_t b1) {
#if __CUDA_ARCH__ >= 890
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  wrong_architecture();
#endif
}

// Ada has that instruction; for Hopper the compiler makes halves, in twice the registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kAsHalves = true;
#else
constexpr bool kAsHalves = false;
#endif

// Scales of the rows r and r + 8 of 16 rows of weight in one block of columns; 1 without blocks.
struct RowPair {
  float low, high;
};

__device__ __forceinline__ RowPair scales_of_rows(const BlockScales& b, int row, int unit) {
  if (b.num_blocks == 0) return {1.f, 1.f};
  return {__ldg(b.of_row(row) + unit), __ldg(b.of_row(row + 8) + unit)};
}

// Of this lane's two tokens, token and token + 1: there is room for 128 at a time. A group's tile
// begins at any token, and may end behind that room.
template <bool kGrouped>
__device__ __forceinline__ float2 scales_of_tokens(const BlockScales& b, int token, int unit) {
  if (b.num_blocks == 0) return make_float2(1.f, 1.f);
  const float* of_unit = b.x + static_cast<int64_t>(unit) * b.x_stride;
  if constexpr (kGrouped) {
    const int last = b.x_stride - 1;
    return make_float2(__ldcg(of_unit + min(token, last)), __ldcg(of_unit + min(token + 1, last)));
  } else {
    return __ldcg(reinterpret_cast<const float2*>(of_unit + token));
  }
}

// acc += part, scaled; part = 0.
__device__ __forceinline__ void promote(float (&acc)[4], float (&part)[4], RowPair rows,
                                        float2 tokens) {
  acc[0] = fmaf(part[0], rows.low * tokens.x, acc[0]);
  acc[1] = fmaf(part[1], rows.low * tokens.y, acc[1]);
  acc[2] = fmaf(part[2], rows.high * tokens.x, acc[2]);
  acc[3] = fmaf(part[3], rows.high * tokens.y, acc[3]);
#pragma unroll
  for (int i = 0; i < 4; ++i) part[i] = 0.f;
}

// ------------------------------------------------------------------------------------- few rows

template <bool kFp8, int kNumTokens>
struct CodeWeights {
  static constexpr int kTokens = kNumTokens;
  static constexpr int kBlocks = kTokens == 64 || (kFp8 && kTokens == 32 && kAsHalves) ? 1 : 2;
  static constexpr int kHalves = 1;  // of 128 columns
  static constexpr int kPitch = kMmaStepBytes;
  using Sum = std::conditional_t<kFp8, float, int>;
  using Out = void;

  const uint8_t* from[2][2];
  uint64_t policy;
  uint4 codes[2][2][2];  // by half of the pair, eight rows, 64 columns
  RowPair scale[2];

  // Two tables of 64 columns: eight lanes read two rows of one, all banks.
  static __device__ __forceinline__ int chunk_place(int row, int chunk) {
    return chunk / 4 * kTokens * 64 + row * 64 + chunk % 4 * 16;
  }

  static __device__ __forceinline__ int lane_row() { return threadIdx.x % kWarp / 4; }
  static __device__ __forceinline__ int lane_column() { return threadIdx.x % 4 * 16; }

  __device__ __forceinline__ void place(const MmaParams& p, int pair) {
    policy = policy_of_weights(p.once);
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // Behind the last row, that one again: its outputs are not written.
        const int row =
            min(row_of_pair(p, pair, s) + r * 8 + lane_row(), p.epilogue.out_features - 1);
        from[s][r] = p.weight + static_cast<int64_t>(row) * p.x_bytes + lane_column();
      }
      first_row[s] = row_of_pair(p, pair, s) + lane_row();
    }
  }

  __device__ __forceinline__ void load(const MmaParams& p, int, int unit) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int column = unit * kMmaUnit + c * 64;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          codes[s][r][c] = column + lane_column() < p.x_bytes
                               ? load_codes(from[s][r] + column, policy)
                               : make_uint4(0, 0, 0, 0);
        }
      }
      if constexpr (kFp8) scale[s] = scales_of_rows(p.scales, first_row[s], unit);
    }
  }

  template <bool kGrouped>
  __device__ __forceinline__ void multiply(const MmaParams& p, int, int unit, int token0,
                                           const char* x, Sum (&acc)[2][kTokens / 8][4]) {
    const char* at = x + lane_row() * 64 + lane_column();
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n) {
      Sum part[2][4] = {};
      const auto sums = [&](int s) -> Sum(&)[4] {
        if constexpr (kFp8) return part[s];
        return acc[s][n];
      };
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const uint4 b = *reinterpret_cast<const uint4*>(at + c * kTokens * 64 + n * 8 * 64);
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          const uint4 low = codes[s][0][c], high = codes[s][1][c];
          const uint32_t a0[4] = {low.x, high.x, low.y, high.y};
          const uint32_t a1[4] = {low.z, high.z, low.w, high.w};
          mma_codes(sums(s), a0, b.x, b.y);
          mma_codes(sums(s), a1, b.z, b.w);
        }
      }
      if constexpr (kFp8) {
        const float2 tokens =
            scales_of_tokens<kGrouped>(p.scales, token0 + n * 8 + threadIdx.x % 4 * 2, unit);
#pragma unroll
        for (int s = 0; s < 2; ++s) promote(acc[s][n], part[s], scale[s], tokens);
      }
    }
  }

 private:
  int first_row[2];
};

// ------------------------------------------------------------------------------------ many rows

constexpr int kTileRows = 128, kTileTokens = 128;
constexpr int kTilePairs = kTileRows / 32;
constexpr int kTileColumns = 64;
constexpr int kTileStages = 3;
constexpr int kSideBytes = kTileRows * kTileColumns;  // of one operand in a stage
constexpr int kTileBytes = kTileTokens * 4 + kTileStages * 2 * kSideBytes;
static_assert(mma_sum_bytes(kTilePairs, 1, kMmaSumTokens) <= kTileStages * 2 * kSideBytes);

// Where 16 bytes of a row lie in a stage: eight rows of one chunk share no banks.
__device__ __forceinline__ int tile_place(int row, int chunk) {
  return row * kTileColumns + (chunk ^ (row / 2 & 3)) * 16;
}

template <bool kFp8>
__global__ void __launch_bounds__(kMmaThreads, kFp8 ? 1 : 2)
    mma_tile_kernel(const __grid_constant__ MmaParams p) {
  using Sum = std::conditional_t<kFp8, float, int>;
  extern __shared__ __align__(16) char shared[];
  float* row_scale = reinterpret_cast<float*>(shared);
  char* ring = shared + kTileTokens * 4;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int token0 = blockIdx.x % p.token_blocks * kTileTokens;
  const int pair0 = blockIdx.x / p.token_blocks * kTilePairs;
  const int count = min(kTileTokens, p.num_rows - token0);
  const int warp_row = warp % 2 * 64, warp_token = warp / 2 * 32;
  const int num_steps = (p.x_bytes + kTileColumns - 1) / kTileColumns;

  // This thread copies one chunk of two rows of each operand.
  const int chunk = threadIdx.x % 4, row = threadIdx.x / 4;
  const uint8_t* weight[2];
  const uint8_t* x[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = row + i * 64;
    const int n =
        min(row_of_pair(p, pair0 + r / 32, r / 16 % 2) + r % 16, p.epilogue.out_features - 1);
    weight[i] = p.weight + static_cast<int64_t>(n) * p.x_bytes + chunk * 16;
    x[i] = p.x + static_cast<int64_t>(min(token0 + r, p.num_rows - 1)) * p.x_bytes + chunk * 16;
  }
  const auto copy = [&](int step) {
    const int column = step * kTileColumns;
    const bool inside = column + chunk * 16 < p.x_bytes;
    char* to = ring + step % kTileStages * 2 * kSideBytes;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int place = tile_place(row + i * 64, chunk);
      cp_async16(to + place, inside ? weight[i] + column : p.weight, inside ? 16 : 0);
      cp_async16(to + kSideBytes + place, inside ? x[i] + column : p.x, inside ? 16 : 0);
    }
  };
  pdl_trigger();
  pdl_wait();
#pragma unroll
  for (int i = 0; i < kTileStages - 1; ++i) {
    if (i < num_steps) copy(i);
    cp_async_commit();
  }
  for (int t = threadIdx.x; t < count; t += kMmaThreads) {
    row_scale[t] = row_scale_of(p.epilogue, token0 + t);
  }

  Sum acc[4][4][4] = {};
  Sum part[kFp8 ? 4 : 1][4][4] = {};
  const auto sums = [&](int s, int n) -> Sum(&)[4] {
    if constexpr (kFp8) return part[s][n];
    return acc[s][n];
  };
  const int tile = lane / 8, tile_row = lane % 8;
  for (int step = 0; step < num_steps; ++step) {
    cp_async_wait<kTileStages - 2>();
    __syncthreads();
    if (step + kTileStages - 1 < num_steps) copy(step + kTileStages - 1);
    cp_async_commit();
    const char* at = ring + step % kTileStages * 2 * kSideBytes;
#pragma unroll(kFp8&& kAsHalves ? 1 : kTileColumns / 32)
    for (int k = 0; k < kTileColumns / 32; ++k) {
      uint32_t a[4][4], b[2][4];
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        ldmatrix4(a[s],
                  at + tile_place(warp_row + s * 16 + tile % 2 * 8 + tile_row, k * 2 + tile / 2));
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        ldmatrix4(b[n],
                  at + kSideBytes +
                      tile_place(warp_token + n * 16 + tile / 2 * 8 + tile_row, k * 2 + tile % 2));
      }
#pragma unroll
      for (int s = 0; s < 4; ++s) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          mma_codes(sums(s, n), a[s], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
        }
      }
    }
    if constexpr (kFp8) {
      if (step % 2 == 0 && step + 1 < num_steps) continue;
      const int unit = step / 2;
      RowPair rows[4];
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        const int first = row_of_pair(p, pair0 + warp_row / 32 + s / 2, s % 2);
        rows[s] = scales_of_rows(p.scales, first + lane / 4, unit);
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float2 tokens =
            scales_of_tokens<false>(p.scales, token0 + warp_token + n * 8 + lane % 4 * 2, unit);
#pragma unroll
        for (int s = 0; s < 4; ++s) promote(acc[s][n], part[s][n], rows[s], tokens);
      }
    }
  }
  cp_async_wait<0>();

  float* out = reinterpret_cast<float*>(ring);
  constexpr int kStride = mma_sum_stride(kTilePairs);
  for (int first = 0; first < count; first += kMmaSumTokens) {
    __syncthreads();
    if (warp_token == first) {
#pragma unroll
      for (int s = 0; s < 4; ++s) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          put_sums(out + n * 8 * kStride + warp_row + s * 16, kStride, acc[s][n]);
        }
      }
    }
    __syncthreads();
    finish_any<void>(p, out, kTilePairs, 1, kMmaSumTokens, row_scale + first, token0 + first,
                     min(kMmaSumTokens, count - first), pair0);
  }
}

template <bool kFp8>
Status run_codes(const GemmParams& p, const MmaTile& tile, cudaStream_t stream) {
  constexpr char kName[] = "gemm_codes_mma";
  const MmaParams m = make_mma_params(p, tile, 1);
  switch (tile.tokens) {
    case 8:
      return run_mma<CodeWeights<kFp8, 8>>(p, m, kName, stream);
    case 32:
      return run_mma<CodeWeights<kFp8, 32>>(p, m, kName, stream);
    case 64:
      return run_mma<CodeWeights<kFp8, 64>>(p, m, kName, stream);
    default:
      break;
  }
  return launch(mma_tile_kernel<kFp8>,
                {{stream, p.dependent_launch},
                 ceil_div(num_mma_pairs(p), kTilePairs) * m.token_blocks,
                 kMmaThreads,
                 kTileBytes},
                kName, m);
}

}  // namespace
}  // namespace regatta::cuda
