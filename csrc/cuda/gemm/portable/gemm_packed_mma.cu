// y = epilogue(x w^T) with weights of 8 or 4 bits, activations of 16, on any GPU.
//
// Input: x [M, K] bf16 or fp16; weights as pack_weight() leaves them (packed_weight.cuh), the same
// bytes that Hopper's own kernels read.
// Architectures: sm_75 and later (bf16: sm_80).
// Algorithm: gemm_mma.cuh. A lane's 16 bytes of a unit are its left operands of two (8 bits) or
// four (4 bits) instructions: bit operations, one subtraction and, with 4 bits, one multiplication
// make them, all in pairs. x comes by ldmatrix from rows of 144 bytes, which no banks share.
// Source: own; biasing codes into a mantissa is what FasterTransformer and Marlin do.
//
// Bound: memory for few rows (one byte or half a byte per value of weight), the tensor cores and
// ldmatrix from some 64 rows on; of many rows the weight becomes a matrix first (select.cu).
#include "cuda/gemm/packed_weight.cuh"
#include "cuda/gemm/select.h"
#include "gemm_mma.cuh"

namespace regatta::cuda {
namespace {

template <class T, int kBits, int kNumTokens>
struct PackedWeights {
  static constexpr int kTokens = kNumTokens;
  static constexpr int kBlocks = kTokens == 64 ? 1 : 2;
  static constexpr int kHalves = 2;  // of 64 columns
  static constexpr int kPitch = kMmaStepBytes + 16;
  using Sum = float;
  using Out = T;

  static constexpr int kQuads = kBits / 4;  // of a lane in half a unit

  const uint8_t* from[2];
  uint64_t policy;
  uint4 codes[2][kHalves][kQuads];
  uint2 scales[2][kHalves];  // of 4 bits

  static constexpr __host__ __device__ int unit_size(int group_size) {
    return kBits * 256 + (kBits == 4 ? kMmaUnit / group_size * kUnitRows * 4 : 0);
  }

  static __device__ __forceinline__ int chunk_place(int row, int chunk) {
    return row * kPitch + chunk * 16;
  }

  __device__ __forceinline__ void place(const MmaParams& p, int pair) {
    policy = policy_of_weights(p.once);
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      // Behind the last slab, its own rows again: they are not written.
      const int slab = min(row_of_pair(p, pair, s) / kUnitRows, p.num_slabs - 1);
      from[s] = p.weight + static_cast<int64_t>(slab) * p.num_units * p.unit_bytes;
    }
  }

  __device__ __forceinline__ void load(const MmaParams& p, int half, int unit) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const uint8_t* at = from[s] + static_cast<int64_t>(unit) * p.unit_bytes;
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        codes[s][half][q] = load_codes(at + ((half * kQuads + q) * kWarp + lane) * 16, policy);
      }
      if constexpr (kBits == 4) {
        const int group = p.unit_bytes == unit_size(64) ? half : 0;
        scales[s][half] =
            __ldg(reinterpret_cast<const uint2*>(at + kBits * 256) + group * 8 + lane / 4);
      }
    }
  }

  // The left operand of step j of a half.
  __device__ __forceinline__ void convert(int s, int half, int j, uint32_t (&a)[4]) const {
    const uint4 quad = codes[s][half][kBits == 8 ? j / 2 : 0];
    if constexpr (kBits == 8) {
      if (j % 2 == 0) {
        operands_of_int8<T>(quad.x, quad.y, a);
      } else {
        operands_of_int8<T>(quad.z, quad.w, a);
      }
    } else {
      const GroupScale group = group_scale(scales[s][half]);
      const uint32_t words[4] = {quad.x, quad.y, quad.z, quad.w};
      operands_of_int4<T>(words[j], group.zero, a);
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = multiply_pair<T>(a[i], group.scale[i % 2]);
    }
  }

  template <bool kGrouped>
  __device__ __forceinline__ void multiply(const MmaParams&, int half, int, int, const char* x,
                                           float (&acc)[2][kTokens / 8][4]) {
    const int tile = threadIdx.x % kWarp / 8, row = threadIdx.x % 8;
    uint32_t a[2][4], b[4];
    if constexpr (kTokens == 8) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j % 2 == 0) ldmatrix4(b, x + row * kPitch + j * 32 + tile * 16);
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          convert(s, half, j, a[s]);
          mma_m16n8k16<T>(acc[s][0], a[s], b[j % 2 * 2], b[j % 2 * 2 + 1]);
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int s = 0; s < 2; ++s) convert(s, half, j, a[s]);
#pragma unroll
        for (int n = 0; n < kTokens / 8; n += 2) {
          ldmatrix4(b, x + (n * 8 + tile / 2 * 8 + row) * kPitch + j * 32 + tile % 2 * 16);
#pragma unroll
          for (int s = 0; s < 2; ++s) {
            mma_m16n8k16<T>(acc[s][n], a[s], b[0], b[1]);
            mma_m16n8k16<T>(acc[s][n + 1], a[s], b[2], b[3]);
          }
        }
      }
    }
  }
};

template <class T, int kBits>
Status run(const GemmParams& p, const MmaTile& tile, cudaStream_t stream) {
  MmaParams m = make_mma_params(p, tile, 2);
  m.unit_bytes = PackedWeights<T, kBits, 8>::unit_size(static_cast<int>(p.group_size));
  m.num_slabs = static_cast<int>(packed_tiles(p.out_features));
  m.weight_bytes = packed_weight_bytes(p.out_features, p.in_features, p.operands, p.group_size);
  constexpr char kName[] = "gemm_packed_mma";
  switch (tile.tokens) {
    case 8:
      return run_mma<PackedWeights<T, kBits, 8>>(p, m, kName, stream);
    case 32:
      return run_mma<PackedWeights<T, kBits, 32>>(p, m, kName, stream);
    default:
      return run_mma<PackedWeights<T, kBits, 64>>(p, m, kName, stream);
  }
}

}  // namespace

Status gemm_packed_mma(const GemmParams& p, const MmaTile& tile, CUstream_st* stream) {
  const char* reason = gemm_packed_mma_refuses(p);
  if (reason == nullptr && !mma_tile_is_known(p, tile)) reason = "no kernel of this tile";
  if (reason != nullptr) return Status::error(std::string("gemm_packed_mma: ") + reason);
  if (p.num_rows == 0) return {};
  const bool half = p.dtype == DType::kFloat16;
  if (p.operands == GemmOperands::kWeightInt8) {
    return half ? run<__half, 8>(p, tile, stream) : run<__nv_bfloat16, 8>(p, tile, stream);
  }
  return half ? run<__half, 4>(p, tile, stream) : run<__nv_bfloat16, 4>(p, tile, stream);
}

Status gemm_packed_mma(const GemmParams& p, CUstream_st* stream) {
  return gemm_packed_mma(p, choose_mma_tile(p, num_multiprocessors()), stream);
}

}  // namespace regatta::cuda
