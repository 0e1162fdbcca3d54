// Activations as e4m3 or int8 codes with a scale per row, and the norm ahead of it in one pass.
//
// Input: [num_rows, width] row-major; codes likewise. Architectures: sm_89 and later for e4m3.
// Algorithm: a block per row, which it holds in registers: sum of squares, largest magnitude,
// codes. Source: own. Bound: memory (2 + 1 bytes per value); for few rows latency.
#include <cuda_fp8.h>

#include "common.cuh"
#include "regatta/gemm.h"

namespace regatta::cuda {
namespace {

constexpr int kThreads = 256;
constexpr float kFp8Max = 448.f, kInt8Max = 127.f;

__device__ __forceinline__ float block_max(float x, float* scratch) {
  x = warp_max(x);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = x;
  __syncthreads();
  float largest = 0.f;
  for (int w = 0; w < kThreads / kWarp; ++w) largest = fmaxf(largest, scratch[w]);
  return largest;
}

__device__ __forceinline__ uint32_t four_codes(const float* v, float factor, bool fp8) {
  if (fp8) {
    const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(v[0] * factor, v[1] * factor),
                                                  __NV_SATFINITE, __NV_E4M3);
    const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(v[2] * factor, v[3] * factor),
                                                   __NV_SATFINITE, __NV_E4M3);
    return low | high << 16;
  }
  uint32_t packed = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int code = __float2int_rn(fminf(fmaxf(v[j] * factor, -kInt8Max), kInt8Max));
    packed |= static_cast<uint32_t>(code & 0xff) << (j * 8);
  }
  return packed;
}

// kVectors: pieces of eight values per thread; they stay in registers.
template <class T, int kVectors>
__global__ void __launch_bounds__(kThreads) quantize_rows_kernel(const QuantizeRowsParams p) {
  __shared__ float scratch[2][kThreads / kWarp];
  pdl_trigger();
  pdl_wait();
  const int64_t row = blockIdx.x;
  Vec16<T> x[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int64_t at = (i * kThreads + threadIdx.x) * 8;
    x[i] = at < p.width ? load16(static_cast<const T*>(p.x) + row * p.width + at)
                        : bit_cast<Vec16<T>>(make_uint4(0, 0, 0, 0));
  }
  float norm = 1.f;
  if (p.normalize) {
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) squares += x[i].get(j) * x[i].get(j);
    }
    norm = rsqrtf(block_sum(squares, scratch[0]) / static_cast<float>(p.width) + p.epsilon);
  }
  // Piece i as it is coded, but for the norm's divisor where nothing is added behind it.
  const bool shifted = p.shift != nullptr;
  const auto value_of = [&](int i, float(&v)[8]) {
    const int64_t at = (i * kThreads + threadIdx.x) * 8;
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = x[i].get(j);
    if (p.norm_weight != nullptr) {
      const Vec16<T> w = load16(static_cast<const T*>(p.norm_weight) + at);
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] *= w.get(j);
    }
    if (shifted || p.smooth != nullptr) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (shifted) v[j] = v[j] * norm + p.shift[at + j];
        if (p.smooth != nullptr) v[j] *= p.smooth[at + j];
      }
    }
  };
  const float divisor = shifted ? 1.f : norm;  // what value_of() leaves out
  const bool fp8 = p.operands == GemmOperands::kFp8;
  const float fixed = p.static_scale != nullptr ? *p.static_scale : 0.f;
  float factor, scale;
  if (fixed > 0.f) {
    factor = divisor / fixed;
    scale = fixed;
  } else {
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if ((i * kThreads + threadIdx.x) * 8 >= p.width) continue;
      float v[8];
      value_of(i, v);
#pragma unroll
      for (int j = 0; j < 8; ++j) largest = fmaxf(largest, fabsf(v[j]));
    }
    largest = block_max(largest, scratch[1]);
    // x / rms has the codes of x: the root mean square goes into the scale alone.
    const float own = largest > 0.f ? largest / (fp8 ? kFp8Max : kInt8Max) : 1.f;
    factor = 1.f / own;
    scale = own * divisor;
  }
  if (threadIdx.x == 0) p.scale[row] = scale;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int64_t at = (i * kThreads + threadIdx.x) * 8;
    if (at >= p.width) continue;
    float v[8];
    value_of(i, v);
    *reinterpret_cast<uint2*>(static_cast<uint8_t*>(p.codes) + row * p.width + at) =
        make_uint2(four_codes(v, factor, fp8), four_codes(v + 4, factor, fp8));
  }
}

template <class T>
Status run(const QuantizeRowsParams& p, const LaunchConfig& config) {
  if (p.width <= kThreads * 8)
    return launch(quantize_rows_kernel<T, 1>, config, "quantize_rows", p);
  if (p.width <= kThreads * 16)
    return launch(quantize_rows_kernel<T, 2>, config, "quantize_rows", p);
  if (p.width <= kThreads * 32)
    return launch(quantize_rows_kernel<T, 4>, config, "quantize_rows", p);
  if (p.width <= kThreads * 64)
    return launch(quantize_rows_kernel<T, 8>, config, "quantize_rows", p);
  return launch(quantize_rows_kernel<T, 16>, config, "quantize_rows", p);
}

}  // namespace

Status quantize_rows(const QuantizeRowsParams& p, CUstream_st* stream) {
  if (p.num_rows == 0) return {};
  if (p.width % 8 != 0 || p.width > kThreads * 128) {
    return Status::error("quantize_rows: width " + std::to_string(p.width) +
                         " must be a multiple of 8 and at most " + std::to_string(kThreads * 128));
  }
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(p.num_rows));
  config.block = dim3(kThreads);
  config.stream = stream;
  config.pdl = p.dependent_launch;
  if (p.dtype == DType::kBFloat16) return run<__nv_bfloat16>(p, config);
  if (p.dtype == DType::kFloat16) return run<__half>(p, config);
  return Status::error(std::string("quantize_rows: dtype ") + dtype_name(p.dtype) +
                       " is not supported (allowed: bfloat16, float16)");
}

}  // namespace regatta::cuda
