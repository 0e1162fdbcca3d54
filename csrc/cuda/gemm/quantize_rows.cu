// Activations as e4m3 or int8 codes with a scale per row, and the norm ahead of it in one pass.
//
// Input: [num_rows, width] row-major; codes likewise. Architectures: all (e4m3: sm_89 and later).
// Algorithm: a block holds a row in registers: sum of squares and largest magnitude ahead of one
// barrier, codes behind it (quantize_row.cuh), while its next row travels. Of many rows a warp may
// hold each, of few wide ones a cluster; codes and scales are the same. Source: own. Bound:
// memory (2 + 1 bytes per value); for few rows latency.
#include <algorithm>

#include "quantize_row.cuh"

namespace regatta::cuda {
namespace {

// From so many rows on a warp takes a row, up to so many a cluster takes a wide one: whichever is
// faster on an H200.
constexpr int64_t kRowsOfWarps = 128, kRowsOfClusters = 64;
constexpr int kWarpWidth = 4096;     // values of a row that a warp takes
constexpr int kWarpThreads = 128;    // of a block then: their registers fill a multiprocessor
constexpr int kRowCluster = 4;       // blocks that share a row
constexpr int kClusterWidth = 8192;  // values that they take at a time

template <class T, bool kFp8, RowKind kKind, int kVectors, int kThreads>
__global__ void __launch_bounds__(kThreads) quantize_rows_kernel(const QuantizeRowsParams p) {
  using R = Row<T, kKind, kVectors, kThreads>;
  __shared__ QuantizeScratch scratch[2];
  pdl_trigger();
  const int width = static_cast<int>(p.width);
  Vec16<T> x[kVectors], weight[R::kNumWeights] = {};
  if constexpr (R::kKeepsWeight) R::load(p.norm_weight, width, weight);
  const float fixed = p.static_scale != nullptr ? *p.static_scale : 0.f;
  pdl_wait();
  const T* rows = static_cast<const T*>(p.x);
  R::load(rows + static_cast<int64_t>(blockIdx.x) * width, width, x);
  int parity = 0;
  for (int64_t row = blockIdx.x; row < p.num_rows; row += gridDim.x, parity ^= 1) {
    // The next row travels meanwhile.
    Vec16<T> next[kVectors];
    if (row + gridDim.x < p.num_rows) R::load(rows + (row + gridDim.x) * width, width, next);
    uint8_t* codes = static_cast<uint8_t*>(p.codes) + row * width;
    const float scale = quantize_row<T, kFp8, kKind, kVectors, kThreads>(
        p, x, weight, fixed, scratch[parity], 1,
        [&](int at, uint2 eight) { *reinterpret_cast<uint2*>(codes + at) = eight; });
    if (threadIdx.x == 0) p.scale[row] = scale;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) x[i] = next[i];
  }
}

// Eight of silu(gate) * up, rounded as a product that folds them rounds.
template <class T>
__device__ __forceinline__ Vec16<T> fold(const Vec16<T>& gate, const Vec16<T>& up) {
  Vec16<T> y;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    y.set(j, __fdividef(gate.get(j), 1.f + __expf(-gate.get(j))) * up.get(j));
  }
  return y;
}

// A row a block: all of its loads are in flight at once, and other blocks' beside them.
template <class T, int kVectors, int kThreads>
__global__ void __launch_bounds__(kThreads) quantize_gated_kernel(const QuantizeRowsParams p) {
  using R = Row<T, RowKind::kPlain, kVectors, kThreads>;
  __shared__ QuantizeScratch scratch;
  pdl_trigger();
  const int width = static_cast<int>(p.width);
  const float fixed = p.static_scale != nullptr ? *p.static_scale : 0.f;
  pdl_wait();
  const int64_t row = blockIdx.x;
  const T* gate = static_cast<const T*>(p.x) + row * 2 * width;
  uint8_t* codes = static_cast<uint8_t*>(p.codes) + row * width;
  Vec16<T> x[kVectors], up[kVectors];
  R::load(gate, width, x);
  R::load(gate + width, width, up);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) x[i] = fold(x[i], up[i]);
  const Vec16<T> weight[R::kNumWeights] = {};
  const float scale = quantize_row<T, true, RowKind::kPlain, kVectors, kThreads>(
      p, x, weight, fixed, scratch, 1,
      [&](int at, uint2 eight) { *reinterpret_cast<uint2*>(codes + at) = eight; });
  if (threadIdx.x == 0) p.scale[row] = scale;
}

// A warp a row of up to 4,096 values as they are, for many rows: all of a row is in flight at once,
// and no thread waits for another warp.
template <class T, bool kFp8>
__global__ void __launch_bounds__(kWarpThreads) quantize_warps_kernel(const QuantizeRowsParams p) {
  constexpr int kPieces = kWarpWidth / (kWarp * 8);
  pdl_trigger();
  const int lane = threadIdx.x % kWarp, width = static_cast<int>(p.width);
  const auto column = [&](int i) { return (i * kWarp + lane) * 8; };
  const float fixed = p.static_scale != nullptr ? *p.static_scale : 0.f;
  pdl_wait();
  const int64_t row =
      static_cast<int64_t>(blockIdx.x) * (kWarpThreads / kWarp) + threadIdx.x / kWarp;
  if (row >= p.num_rows) return;
  const T* from = static_cast<const T*>(p.x) + row * width;
  uint8_t* codes = static_cast<uint8_t*>(p.codes) + row * width;
  Vec16<T> x[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    x[i] =
        column(i) < width ? load16(from + column(i)) : bit_cast<Vec16<T>>(make_uint4(0, 0, 0, 0));
  }
  const float largest = largest_of(x);
  forget_floats(x);
  const CodeScale by = code_scale<kFp8>(fixed, warp_max(largest), 1.f);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    if (column(i) >= width) continue;
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = x[i].get(j);
    *reinterpret_cast<uint2*>(codes + column(i)) =
        make_uint2(four_codes<kFp8>(v, by.factor), four_codes<kFp8>(v + 4, by.factor));
  }
  if (lane == 0) p.scale[row] = by.scale;
}

// A cluster a row, for few wide ones, which would leave multiprocessors and threads waiting: blocks
// tell each other their warps' largest magnitudes.
template <class T, bool kFp8, int kVectors>
__global__ void __launch_bounds__(kQuantizeThreads)
    quantize_clusters_kernel(const QuantizeRowsParams p) {
  constexpr int kWarps = kQuantizeThreads / kWarp;
  static_assert(kRowCluster * kWarps == kWarp);
  __shared__ float largest[kWarp];  // of the cluster's warps
  pdl_trigger();
  cluster_arrive_relaxed();  // before another block's shared memory is written, it must have begun
  const int rank = static_cast<int>(cluster_rank()), width = static_cast<int>(p.width);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const auto column = [&](int i) {
    return ((i * kRowCluster + rank) * kQuantizeThreads + static_cast<int>(threadIdx.x)) * 8;
  };
  const float fixed = p.static_scale != nullptr ? *p.static_scale : 0.f;
  pdl_wait();
  const int64_t row = blockIdx.x / kRowCluster;
  const T* from = static_cast<const T*>(p.x) + row * width;
  uint8_t* codes = static_cast<uint8_t*>(p.codes) + row * width;
  Vec16<T> x[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    x[i] =
        column(i) < width ? load16(from + column(i)) : bit_cast<Vec16<T>>(make_uint4(0, 0, 0, 0));
  }
  const float mine = warp_max(largest_of(x));
  cluster_wait();
  if (lane < kRowCluster) store_cluster_float(largest + rank * kWarps + warp, lane, mine);
  __syncwarp();
  cluster_arrive();
  cluster_wait();
  const CodeScale by = code_scale<kFp8>(fixed, warp_max(largest[lane]), 1.f);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (column(i) >= width) continue;
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = x[i].get(j);
    *reinterpret_cast<uint2*>(codes + column(i)) =
        make_uint2(four_codes<kFp8>(v, by.factor), four_codes<kFp8>(v + 4, by.factor));
  }
  if (rank == 0 && threadIdx.x == 0) p.scale[row] = by.scale;
}

template <class T, bool kFp8, RowKind kKind, int kVectors, int kThreads>
Status run(const QuantizeRowsParams& p, cudaStream_t stream) {
  constexpr int kBlocks = 1024 / kThreads;  // per multiprocessor
  const int64_t blocks = std::min(p.num_rows, int64_t{kBlocks} * num_multiprocessors());
  return launch(quantize_rows_kernel<T, kFp8, kKind, kVectors, kThreads>,
                {{stream, p.dependent_launch}, blocks, kThreads}, "quantize_rows", p);
}

template <class T, bool kFp8>
Status run_plain(const QuantizeRowsParams& p, cudaStream_t stream) {
  constexpr RowKind kPlain = RowKind::kPlain;
  if (p.width <= 256 * 8) return run<T, kFp8, kPlain, 1, 256>(p, stream);
  if (p.width <= 512 * 8) return run<T, kFp8, kPlain, 1, 512>(p, stream);
  if (p.width <= 512 * 16) return run<T, kFp8, kPlain, 2, 512>(p, stream);
  if (p.width <= 512 * 32) return run<T, kFp8, kPlain, 4, 512>(p, stream);
  return run<T, kFp8, kPlain, 4, 1024>(p, stream);
}

template <class T, bool kFp8, RowKind kKind>
Status run_other(const QuantizeRowsParams& p, cudaStream_t stream) {
  const int64_t vectors = ceil_div(p.width, kQuantizeThreads * 8);
  if (vectors <= 1) return run<T, kFp8, kKind, 1, kQuantizeThreads>(p, stream);
  if (vectors <= 2) return run<T, kFp8, kKind, 2, kQuantizeThreads>(p, stream);
  if (vectors <= 4) return run<T, kFp8, kKind, 4, kQuantizeThreads>(p, stream);
  if (vectors <= 8) return run<T, kFp8, kKind, 8, kQuantizeThreads>(p, stream);
  return run<T, kFp8, kKind, 16, kQuantizeThreads>(p, stream);
}

template <class T, int kVectors, int kThreads>
Status run_gated_rows(const QuantizeRowsParams& p, cudaStream_t stream) {
  return launch(quantize_gated_kernel<T, kVectors, kThreads>,
                {{stream, p.dependent_launch}, p.num_rows, kThreads}, "quantize_rows", p);
}

template <class T>
Status run_gated(const QuantizeRowsParams& p, cudaStream_t stream) {
  if (p.width <= 256 * 8) return run_gated_rows<T, 1, 256>(p, stream);
  if (p.width <= 512 * 16) return run_gated_rows<T, 2, 512>(p, stream);
  if (p.width <= 512 * 32) return run_gated_rows<T, 4, 512>(p, stream);
  return run_gated_rows<T, 4, 1024>(p, stream);
}

template <class T, bool kFp8>
Status run_warps(const QuantizeRowsParams& p, cudaStream_t stream) {
  return launch(
      quantize_warps_kernel<T, kFp8>,
      {{stream, p.dependent_launch}, ceil_div(p.num_rows, kWarpThreads / kWarp), kWarpThreads},
      "quantize_rows", p);
}

template <class T, bool kFp8, int kVectors>
Status run_clusters(const QuantizeRowsParams& p, cudaStream_t stream) {
  LaunchConfig config({stream, p.dependent_launch}, p.num_rows * kRowCluster, kQuantizeThreads);
  config.cluster_x = kRowCluster;
  return launch(quantize_clusters_kernel<T, kFp8, kVectors>, config, "quantize_rows", p);
}

template <class T, bool kFp8>
Status run_kind(const QuantizeRowsParams& p, QuantizeWay way, cudaStream_t stream) {
  if (way == QuantizeWay::kWarp) return run_warps<T, kFp8>(p, stream);
  if (way == QuantizeWay::kCluster) {
    return p.width <= 2 * kClusterWidth ? run_clusters<T, kFp8, 2>(p, stream)
                                        : run_clusters<T, kFp8, 4>(p, stream);
  }
  switch (row_kind(p)) {
    case RowKind::kPlain:
      return run_plain<T, kFp8>(p, stream);
    case RowKind::kNorm:
      return run_other<T, kFp8, RowKind::kNorm>(p, stream);
    default:
      return run_other<T, kFp8, RowKind::kAny>(p, stream);
  }
}

// A scale for every 128 columns, which half a warp has: 8 values a thread at a time. The row is
// read a second time behind the norm.
template <class T>
__global__ void __launch_bounds__(kQuantizeThreads)
    quantize_blocks_kernel(const QuantizeRowsParams p) {
  __shared__ float scratch[kQuantizeThreads / kWarp];
  pdl_trigger();
  pdl_wait();
  const int64_t row = blockIdx.x;
  const int width = static_cast<int>(p.width);
  const T* x = static_cast<const T*>(p.x) + row * (p.gated ? 2 * width : width);
  uint8_t* codes = static_cast<uint8_t*>(p.codes) + row * width;
  float norm = 1.f;
  if (p.normalize) {
    float squares = 0.f;
    for (int at = threadIdx.x * 8; at < width; at += kQuantizeThreads * 8) {
      const Vec16<T> v = load16(x + at);
#pragma unroll
      for (int j = 0; j < 8; ++j) squares += v.get(j) * v.get(j);
    }
    norm = rsqrtf(block_sum(squares, scratch) / static_cast<float>(width) + p.epsilon);
  }
  const float fixed = p.static_scale != nullptr ? *p.static_scale : 0.f;
  constexpr int kStep = kQuantizeThreads * 8;
  for (int first = 0; first < width; first += kStep) {
    const int at = first + static_cast<int>(threadIdx.x) * 8;
    float v[8] = {};
    if (at < width) {
      Vec16<T> values = load16(x + at);
      if (p.gated) values = fold(values, load16(x + width + at));
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = values.get(j);
      if (p.norm_weight != nullptr) {
        const Vec16<T> weight = load16(static_cast<const T*>(p.norm_weight) + at);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] *= weight.get(j);
      }
    }
    float largest = 0.f;
#pragma unroll
    for (int j = 0; j < 8; ++j) largest = fmaxf(largest, fabsf(v[j]));
#pragma unroll
    for (int o = 8; o > 0; o /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, o));
    const float own = largest > 0.f ? largest / kFp8Max : 1.f;
    const float factor = fixed > 0.f ? norm / fixed : 1.f / own;
    if (at < width) {
      *reinterpret_cast<uint2*>(codes + at) =
          make_uint2(four_codes<true>(v, factor), four_codes<true>(v + 4, factor));
      if (at % kScaleBlock == 0) {
        p.scale[at / kScaleBlock * gemm_block_stride(p.num_rows) + row] =
            fixed > 0.f ? fixed : own * norm;
      }
    }
  }
}

template <class T>
Status run_type(const QuantizeRowsParams& p, QuantizeWay way, cudaStream_t stream) {
  if (p.blocks) {
    return launch(quantize_blocks_kernel<T>,
                  {{stream, p.dependent_launch}, p.num_rows, kQuantizeThreads}, "quantize_rows", p);
  }
  if (p.gated) return run_gated<T>(p, stream);
  return p.operands == GemmOperands::kFp8 ? run_kind<T, true>(p, way, stream)
                                          : run_kind<T, false>(p, way, stream);
}

}  // namespace

bool can_quantize(const QuantizeRowsParams& p, QuantizeWay way) {
  if (way == QuantizeWay::kBlock) return true;
  if (p.blocks || p.gated || row_kind(p) != RowKind::kPlain) return false;
  if (way == QuantizeWay::kWarp) return p.width <= kWarpWidth;
  return p.width > kClusterWidth && p.width <= 4 * kClusterWidth &&
         has_dependent_launch();  // an architecture with clusters
}

Status quantize_rows(const QuantizeRowsParams& p, CUstream_st* stream) {
  QuantizeWay way = QuantizeWay::kBlock;
  if (p.num_rows >= kRowsOfWarps && can_quantize(p, QuantizeWay::kWarp)) way = QuantizeWay::kWarp;
  if (p.num_rows <= kRowsOfClusters && can_quantize(p, QuantizeWay::kCluster)) {
    way = QuantizeWay::kCluster;
  }
  return quantize_rows(p, way, stream);
}

Status quantize_rows(const QuantizeRowsParams& p, QuantizeWay way, CUstream_st* stream) {
  constexpr int64_t kWidest = kQuantizeThreads * 128;
  if (p.num_rows == 0) return {};
  if (p.width % 8 != 0 || p.width > kWidest) {
    return Status::error("quantize_rows: width " + std::to_string(p.width) +
                         " must be a multiple of 8 and at most " + std::to_string(kWidest));
  }
  if (p.blocks && (p.operands != GemmOperands::kFp8 || p.shift != nullptr || p.smooth != nullptr)) {
    return Status::error(
        "quantize_rows: scales of blocks are of e4m3 codes without shift or smooth");
  }
  if (p.gated && (p.operands != GemmOperands::kFp8 || p.normalize || p.norm_weight != nullptr ||
                  p.shift != nullptr || p.smooth != nullptr)) {
    return Status::error(
        "quantize_rows: gated rows become e4m3 codes without norm, shift or smooth");
  }
  if (p.dtype == DType::kBFloat16) return run_type<__nv_bfloat16>(p, way, stream);
  if (p.dtype == DType::kFloat16) return run_type<__half>(p, way, stream);
  return Status::error(std::string("quantize_rows: dtype ") + dtype_name(p.dtype) +
                       " is not supported (allowed: bfloat16, float16)");
}

}  // namespace regatta::cuda
