// Activations as e4m3 or int8 codes with a scale per row, and the norm ahead of it in one pass.
//
// Input: [num_rows, width] row-major; codes likewise. Architectures: sm_89 and later for e4m3.
// Algorithm: a block per row, which it holds in registers: sum of squares and largest magnitude
// between two barriers, codes (quantize_row.cuh). Source: own. Bound: memory (2 + 1 bytes per
// value); for few rows latency.
#include "quantize_row.cuh"

namespace regatta::cuda {
namespace {

template <class T, bool kFp8, RowKind kKind, int kVectors, int kThreads>
__global__ void __launch_bounds__(kThreads) quantize_rows_kernel(const QuantizeRowsParams p) {
  __shared__ QuantizeScratch scratch;
  pdl_trigger();
  const int64_t row = blockIdx.x;
  uint8_t* codes = static_cast<uint8_t*>(p.codes) + row * p.width;
  const float scale = quantize_row<T, kFp8, kKind, kVectors, kThreads>(
      p, row, scratch, 1, [] { pdl_wait(); },
      [&](int at, uint2 eight) { *reinterpret_cast<uint2*>(codes + at) = eight; });
  if (threadIdx.x == 0) p.scale[row] = scale;
}

template <class T, bool kFp8, RowKind kKind, int kVectors, int kThreads>
Status run(const QuantizeRowsParams& p, cudaStream_t stream) {
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(p.num_rows));
  config.block = dim3(kThreads);
  config.stream = stream;
  config.pdl = p.dependent_launch;
  return launch(quantize_rows_kernel<T, kFp8, kKind, kVectors, kThreads>, config, "quantize_rows",
                p);
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

template <class T, bool kFp8>
Status run_kind(const QuantizeRowsParams& p, cudaStream_t stream) {
  switch (row_kind(p)) {
    case RowKind::kPlain:
      return run_plain<T, kFp8>(p, stream);
    case RowKind::kNorm:
      return run_other<T, kFp8, RowKind::kNorm>(p, stream);
    default:
      return run_other<T, kFp8, RowKind::kAny>(p, stream);
  }
}

template <class T>
Status run_type(const QuantizeRowsParams& p, cudaStream_t stream) {
  return p.operands == GemmOperands::kFp8 ? run_kind<T, true>(p, stream)
                                          : run_kind<T, false>(p, stream);
}

}  // namespace

Status quantize_rows(const QuantizeRowsParams& p, CUstream_st* stream) {
  constexpr int64_t kWidest = kQuantizeThreads * 128;
  if (p.num_rows == 0) return {};
  if (p.width % 8 != 0 || p.width > kWidest) {
    return Status::error("quantize_rows: width " + std::to_string(p.width) +
                         " must be a multiple of 8 and at most " + std::to_string(kWidest));
  }
  if (p.dtype == DType::kBFloat16) return run_type<__nv_bfloat16>(p, stream);
  if (p.dtype == DType::kFloat16) return run_type<__half>(p, stream);
  return Status::error(std::string("quantize_rows: dtype ") + dtype_name(p.dtype) +
                       " is not supported (allowed: bfloat16, float16)");
}

}  // namespace regatta::cuda
