// y = epilogue(x w^T) of 8-bit codes for one row of x, which is quantized on the way.
//
// Input: as GemmParams says: e4m3 or int8 codes, weights [N, K] row-major as checkpoints have them;
// K is a multiple of 16. Architectures: sm_90 (bulk copies).
// Algorithm
//   1. A block works on 16 rows of weight (gated: 8 gate rows and their ups) at a time. One warp
//      fetches pieces of 1 KB of each row into a ring, ahead of pdl_wait() and of the rows' end.
//   2. Eight warps multiply, each 128 columns of a stage, with mma.sync: int8 as it is, e4m3 as
//      fp16, whose products are exact. A lane reads 16 bytes of two rows: k is permuted for both
//      operands alike. Rows lie 64 bytes off a multiple of 128 apart: no bank conflicts.
//   3. The warps' sums meet in shared memory, and are added in their order.
//   4. Every block makes the codes of x (quantize_row.cuh), those of quantize_rows(), while its
//      first weights travel, which saves a launch.
// Source: own. Bound: memory.
#include <algorithm>

#include "cuda/gemm/gemm_epilogue.cuh"
#include "cuda/gemm/quantize_row.cuh"
#include "cuda/gemm/select.h"
#include "cuda/hopper.cuh"
#include "regatta/gemm.h"

namespace regatta::cuda {
namespace {

constexpr int kThreads = kQuantizeThreads;  // that multiply; the same that make codes
constexpr int kWarps = kThreads / kWarp;
constexpr int kRows = 16;                // of weight per tile
constexpr int kPiece = 1024;             // columns of a stage
constexpr int kSlice = kPiece / kWarps;  // of a warp
constexpr int kRowStride = kPiece + 64;  // bytes
constexpr int kMaxStages = 12;
constexpr int kMaxVectors = 8;  // of a row that is quantized here: 16384 columns

struct KernelParams {
  Epilogue epilogue;
  QuantizeRowsParams quantize;
  const uint8_t* x;  // codes, where they are not made here
  const uint8_t* weight;
  int in_features, num_pieces, num_tiles, stages;
  bool trigger_early;
};

constexpr int kPartialStride = kRows + 1;  // floats, of a warp
constexpr int kPartialBytes = 2 * kWarps * kPartialStride * 4;
constexpr int kStageBytes = kRows * kRowStride;
static_assert(kPartialBytes % 16 == 0);

// Word i of 16 adjacent codes; int8: words i and i + 1.
__device__ __forceinline__ uint32_t word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// d[16, 8] += a[16, 64] b[8, 64]^T of codes, in kParts parts; lane l has 16 adjacent codes of rows
// l / 4 and l / 4 + 8 of a and of row l / 4 of b.
template <bool kFp8>
struct Products;

template <>
struct Products<true> {
  using Acc = float;
  static constexpr int kParts = 4;
  static __device__ __forceinline__ uint32_t halves(uint32_t two) {
    return bit_cast<uint32_t>(
        __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3));
  }
  static __device__ __forceinline__ void add(float (&d)[4], const uint4& low, const uint4& high,
                                             const uint4& b, int part) {
    const uint32_t l = word(low, part), h = word(high, part), x = word(b, part);
    const uint32_t a[4] = {halves(l & 0xffff), halves(h & 0xffff), halves(l >> 16),
                           halves(h >> 16)};
    mma_m16n8k16<__half>(d, a, halves(x & 0xffff), halves(x >> 16));
  }
};

template <>
struct Products<false> {
  using Acc = int;
  static constexpr int kParts = 2;
  static __device__ __forceinline__ void add(int (&d)[4], const uint4& low, const uint4& high,
                                             const uint4& b, int part) {
    const int i = part * 2;
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(word(low, i)), "r"(word(high, i)), "r"(word(low, i + 1)), "r"(word(high, i + 1)),
          "r"(word(b, i)), "r"(word(b, i + 1)));
  }
};

// kVectors: of x that is quantized here, of kind kKind; 0: x comes as codes.
template <bool kFp8, class T, bool kGated, RowKind kKind, int kVectors>
__global__ void __launch_bounds__(kThreads + kWarp, 2)
    gemm_stream_codes_sm90_kernel(const KernelParams p) {
  using P = Products<kFp8>;
  extern __shared__ __align__(128) char shared[];
  __shared__ uint64_t full[kMaxStages], empty[kMaxStages];
  __shared__ QuantizeScratch scratch;
  char* stages = shared;
  float* partial = reinterpret_cast<float*>(stages + p.stages * kStageBytes);
  char* codes = reinterpret_cast<char*>(partial) + kPartialBytes;  // [in_features]

  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int width = kGated ? p.epilogue.out_features / 2 : p.epilogue.out_features;
  if (threadIdx.x == 0) {
    for (int s = 0; s < p.stages; ++s) {
      barrier_init(&full[s], 1);
      barrier_init(&empty[s], kWarps);
    }
    barrier_init_fence();
  }
  __syncthreads();

  if (warp == kWarps) {
    const uint64_t once = policy_evict_first();
    const int my_tiles = (p.num_tiles - static_cast<int>(blockIdx.x) - 1) / gridDim.x + 1;
    const int total = my_tiles * p.num_pieces;
    const auto piece_bytes = [&](int piece) { return min(kPiece, p.in_features - piece * kPiece); };
    const auto weights = [&](int tile, int piece, int s) {
      if (lane == 0) {
        barrier_arrive_expect(&full[s], kRows * piece_bytes(piece));
      }
      __syncwarp();
      if (lane < kRows) {
        // Rows past the end repeat the last one; their results are not written.
        int64_t row = kGated ? tile * 8 + lane % 8 : tile * kRows + lane;
        row = min(row, static_cast<int64_t>(width) - 1) + (kGated && lane >= 8 ? width : 0);
        bulk_load(stages + s * kStageBytes + lane * kRowStride,
                  p.weight + row * p.in_features + piece * kPiece, piece_bytes(piece), &full[s],
                  once);
      }
    };
    // Weights are constants: fill the ring while the previous kernel still runs.
    const int ahead = min(p.stages, total);
    for (int i = 0; i < ahead; ++i) {
      weights(blockIdx.x + i / p.num_pieces * gridDim.x, i % p.num_pieces, i);
    }
    if (p.trigger_early || total <= p.stages) pdl_trigger();
    int s = 0, piece = ahead % p.num_pieces;
    int tile = blockIdx.x + ahead / p.num_pieces * gridDim.x;
    uint32_t phase = 0;
    for (int i = ahead; i < total; ++i) {
      barrier_wait(&empty[s], phase);
      weights(tile, piece, s);
      if (!p.trigger_early && i == total - 1) pdl_trigger();
      if (++s == p.stages) s = 0, phase ^= 1;
      if (++piece == p.num_pieces) piece = 0, tile += gridDim.x;
    }
    return;
  }

  float x_scale;
  if constexpr (kVectors > 0) {
    using R = Row<T, kKind, kVectors, kThreads>;
    Vec16<T> x[kVectors], norm_weight[R::kNumWeights] = {};
    if constexpr (R::kKeepsWeight) R::load(p.quantize.norm_weight, p.in_features, norm_weight);
    const float fixed = p.quantize.static_scale != nullptr ? *p.quantize.static_scale : 0.f;
    pdl_wait();
    R::load(p.quantize.x, p.in_features, x);
    x_scale = quantize_row<T, kFp8, kKind, kVectors, kThreads>(
        p.quantize, x, norm_weight, fixed, scratch, 1,
        [&](int at, uint2 eight) { *reinterpret_cast<uint2*>(codes + at) = eight; });
  } else {
    pdl_wait();
    for (int at = threadIdx.x * 16; at < p.in_features; at += kThreads * 16) {
      *reinterpret_cast<uint4*>(codes + at) = __ldcg(reinterpret_cast<const uint4*>(p.x + at));
    }
    x_scale = __ldcg(p.epilogue.x_scale);
  }
  named_barrier_sync(1, kThreads);

  const int g = lane / 4, q = lane % 4 * 16;
  int s = 0, parity = 0;
  uint32_t phase = 0;
  for (int tile = blockIdx.x; tile < p.num_tiles; tile += gridDim.x, parity ^= 1) {
    const int mine = threadIdx.x;  // of the tile's outputs
    const int n = tile * (kGated ? 8 : kRows) + mine;
    const bool writes = mine < (kGated ? 8 : kRows) && n < width;
    float residual = 0.f, scale = 0.f, scale_up = 0.f, bias = 0.f, bias_up = 0.f;
    if (writes) {
      const auto value = [&](const void* from, int64_t at) {
        return from == nullptr ? 0.f
                               : Traits<T>::to_float(__ldcg(static_cast<const T*>(from) + at));
      };
      scale = __ldg(p.epilogue.weight_scale + n);
      residual = value(p.epilogue.residual, n);
      bias = value(p.epilogue.bias, n);
      if constexpr (kGated) {
        scale_up = __ldg(p.epilogue.weight_scale + width + n);
        bias_up = value(p.epilogue.bias, width + n);
      }
    }
    // Two sums of each half of a slice, so that few products wait for one another.
    typename P::Acc acc[4][4] = {};
    for (int piece = 0; piece < p.num_pieces; ++piece) {
      barrier_wait(&full[s], phase);
      const char* at = stages + s * kStageBytes;
      uint4 low[2], high[2], x[2];
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const int within = warp * kSlice + u * 64 + q;
        const int k = piece * kPiece + within;
        const bool inside = k < p.in_features;
        const auto load = [&](const char* from) {
          return inside ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
        };
        low[u] = load(at + g * kRowStride + within);
        high[u] = load(at + (g + 8) * kRowStride + within);
        x[u] = load(codes + k);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&empty[s]);
#pragma unroll
      for (int part = 0; part < P::kParts; ++part) {
#pragma unroll
        for (int u = 0; u < 2; ++u) P::add(acc[u * 2 + part % 2], low[u], high[u], x[u], part);
      }
      if (++s == p.stages) s = 0, phase ^= 1;
    }
    float* sums = partial + parity * kWarps * kPartialStride;
    if (lane % 4 == 0) {
      float* to = sums + warp * kPartialStride + g;
      to[0] = static_cast<float>((acc[0][0] + acc[1][0]) + (acc[2][0] + acc[3][0]));
      to[8] = static_cast<float>((acc[0][2] + acc[1][2]) + (acc[2][2] + acc[3][2]));
    }
    named_barrier_sync(1, kThreads);
    if (writes) {
      float y = 0.f, up = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        y += sums[w * kPartialStride + mine];
        if constexpr (kGated) up += sums[w * kPartialStride + mine + 8];
      }
      y = y * x_scale * scale + bias;  // as finish() of gemm_epilogue.cuh
      if constexpr (kGated) {
        up = up * x_scale * scale_up + bias_up;
        y = y / (1.f + __expf(-y)) * up;
      } else {
        y += residual;
      }
      if (p.epilogue.float_out) {
        static_cast<float*>(p.epilogue.out)[n] = y;
      } else {
        static_cast<T*>(p.epilogue.out)[n] = Traits<T>::from_float(y);
      }
    }
  }
}

template <bool kFp8, class T, bool kGated, RowKind kKind = RowKind::kPlain, int kVectors = 0>
Status run(const GemmParams& p, const QuantizeRowsParams* quantize, const StreamCodesTile& tile,
           cudaStream_t stream) {
  KernelParams kp = {};
  kp.epilogue = make_epilogue(p);
  if (quantize != nullptr) kp.quantize = *quantize;
  kp.x = static_cast<const uint8_t*>(p.x);
  kp.weight = static_cast<const uint8_t*>(p.weight);
  kp.in_features = static_cast<int>(p.in_features);
  kp.num_pieces = static_cast<int>(ceil_div(p.in_features, kPiece));
  kp.num_tiles = static_cast<int>(
      ceil_div(kGated ? p.out_features / 2 : p.out_features, kGated ? kRows / 2 : kRows));
  kp.stages = tile.stages;
  kp.trigger_early = tile.trigger_early;
  const int64_t blocks =
      std::min<int64_t>(kp.num_tiles, int64_t{num_multiprocessors()} * tile.blocks);
  return launch(gemm_stream_codes_sm90_kernel<kFp8, T, kGated, kKind, kVectors>,
                {{stream, p.dependent_launch},
                 blocks,
                 kThreads + kWarp,
                 tile.stages * kStageBytes + kPartialBytes + p.in_features},
                "gemm_stream_codes_sm90", kp);
}

template <bool kFp8, class T, bool kGated>
Status run_row(const GemmParams& p, const QuantizeRowsParams* q, const StreamCodesTile& tile,
               cudaStream_t stream) {
  constexpr RowKind kPlain = RowKind::kPlain, kNorm = RowKind::kNorm;
  if (q == nullptr) return run<kFp8, T, kGated>(p, q, tile, stream);
  const bool is_short = p.in_features <= kQuantizeThreads * 16;
  if (row_kind(*q) == kPlain) {
    return is_short ? run<kFp8, T, kGated, kPlain, 2>(p, q, tile, stream)
                    : run<kFp8, T, kGated, kPlain, kMaxVectors>(p, q, tile, stream);
  }
  return is_short ? run<kFp8, T, kGated, kNorm, 2>(p, q, tile, stream)
                  : run<kFp8, T, kGated, kNorm, kMaxVectors>(p, q, tile, stream);
}

template <bool kFp8>
Status run_type(const GemmParams& p, const QuantizeRowsParams* quantize,
                const StreamCodesTile& tile, cudaStream_t stream) {
  if (p.dtype == DType::kBFloat16) {
    return p.gated ? run_row<kFp8, __nv_bfloat16, true>(p, quantize, tile, stream)
                   : run_row<kFp8, __nv_bfloat16, false>(p, quantize, tile, stream);
  }
  return p.gated ? run_row<kFp8, __half, true>(p, quantize, tile, stream)
                 : run_row<kFp8, __half, false>(p, quantize, tile, stream);
}

}  // namespace

// Two blocks per multiprocessor, of five stages each.
StreamCodesTile choose_stream_codes_tile(const GemmParams& p) {
  constexpr int64_t kPerBlock = 110 * 1024;
  StreamCodesTile tile;
  tile.trigger_early = true;
  tile.stages = static_cast<int>(
      std::min<int64_t>(5, (kPerBlock - kPartialBytes - p.in_features) / kStageBytes));
  return tile;
}

bool gemm_stream_codes_sm90_quantizes(const GemmParams& p, const QuantizeRowsParams& q) {
  return row_kind(q) != RowKind::kAny && !q.blocks &&
         q.width <= kQuantizeThreads * 8 * kMaxVectors && q.dtype == p.dtype &&
         reinterpret_cast<uintptr_t>(q.x) % 16 == 0 && gemm_stream_codes_sm90_refuses(p) == nullptr;
}

Status gemm_stream_codes_sm90(const GemmParams& p, const QuantizeRowsParams* quantize,
                              const StreamCodesTile& tile, CUstream_st* stream) {
  REGATTA_RETURN_IF_ERROR(refusal("gemm_stream_codes_sm90", gemm_stream_codes_sm90_refuses(p)));
  if (quantize != nullptr && !gemm_stream_codes_sm90_quantizes(p, *quantize)) {
    return Status::error("gemm_stream_codes_sm90: x must be codes");
  }
  if (p.num_rows == 0) return {};
  return p.operands == GemmOperands::kFp8 ? run_type<true>(p, quantize, tile, stream)
                                          : run_type<false>(p, quantize, tile, stream);
}

Status gemm_stream_codes_sm90(const GemmParams& p, const QuantizeRowsParams* quantize,
                              CUstream_st* stream) {
  return gemm_stream_codes_sm90(p, quantize, choose_stream_codes_tile(p), stream);
}

}  // namespace regatta::cuda
