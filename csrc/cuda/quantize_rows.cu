// Activations as e4m3 or int8 codes with a scale per row, and the norm ahead of it in one pass.
//
// Input: [num_rows, width] row-major; codes likewise. Architectures: sm_89 and later for e4m3.
// Algorithm: a block per row, which it holds in registers: sum of squares and largest magnitude
// between two barriers, codes (quantize_row.cuh). Source: own. Bound: memory (2 + 1 bytes per
// value); for few rows latency.
#include "quantize_row.cuh"

namespace regatta::cuda {
namespace {

// kVectors: pieces of eight values per thread; they stay in registers.
template <class T, int kVectors>
__global__ void __launch_bounds__(kQuantizeThreads, kVectors <= 8 ? 4 : 2)
    quantize_rows_kernel(const QuantizeRowsParams p) {
  __shared__ QuantizeScratch scratch;
  pdl_trigger();
  const int64_t row = blockIdx.x;
  uint8_t* codes = static_cast<uint8_t*>(p.codes) + row * p.width;
  const float scale = quantize_row<T, kVectors>(
      p, row, scratch, 1, [] { pdl_wait(); },
      [&](int64_t at, uint2 eight) { *reinterpret_cast<uint2*>(codes + at) = eight; });
  if (threadIdx.x == 0) p.scale[row] = scale;
}

template <class T>
Status run(const QuantizeRowsParams& p, const LaunchConfig& config) {
  const int64_t vectors = ceil_div(p.width, kQuantizeThreads * 8);
  if (vectors <= 1) return launch(quantize_rows_kernel<T, 1>, config, "quantize_rows", p);
  if (vectors <= 2) return launch(quantize_rows_kernel<T, 2>, config, "quantize_rows", p);
  if (vectors <= 4) return launch(quantize_rows_kernel<T, 4>, config, "quantize_rows", p);
  if (vectors <= 8) return launch(quantize_rows_kernel<T, 8>, config, "quantize_rows", p);
  return launch(quantize_rows_kernel<T, 16>, config, "quantize_rows", p);
}

}  // namespace

Status quantize_rows(const QuantizeRowsParams& p, CUstream_st* stream) {
  if (p.num_rows == 0) return {};
  if (p.width % 8 != 0 || p.width > kQuantizeThreads * 128) {
    return Status::error("quantize_rows: width " + std::to_string(p.width) +
                         " must be a multiple of 8 and at most " +
                         std::to_string(kQuantizeThreads * 128));
  }
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(p.num_rows));
  config.block = dim3(kQuantizeThreads);
  config.stream = stream;
  config.pdl = p.dependent_launch;
  if (p.dtype == DType::kBFloat16) return run<__nv_bfloat16>(p, config);
  if (p.dtype == DType::kFloat16) return run<__half>(p, config);
  return Status::error(std::string("quantize_rows: dtype ") + dtype_name(p.dtype) +
                       " is not supported (allowed: bfloat16, float16)");
}

}  // namespace regatta::cuda
