// Activations as e4m3 or int8 codes with a scale per row, and the norm ahead of it in one pass.
//
// Input: [num_rows, width] row-major; codes likewise. Architectures: sm_89 and later for e4m3.
// Algorithm: a block per row: one pass for sum of squares and largest magnitude, one for the codes;
// the row comes out of cache the second time. x / rms has the codes of x: the root mean square
// goes into the scale alone, unless the scale is given.
// Source: own. Bound: memory (2 + 1 bytes per value); for few rows latency.
#include <cuda_fp8.h>

#include "common.cuh"
#include "regatta/gemm.h"

namespace regatta::cuda {
namespace {

constexpr int kThreads = 512;
constexpr float kFp8Max = 448.f, kInt8Max = 127.f;

// Eight values from column i on, as they are coded but for the norm's divisor.
template <class T>
__device__ __forceinline__ void load_row(const QuantizeRowsParams& p, int64_t row, int64_t i,
                                         float (&v)[8]) {
  const Vec16<T> x = load16(static_cast<const T*>(p.x) + row * p.width + i);
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = x.get(j);
  if (p.norm_weight != nullptr) {
    const Vec16<T> w = load16(static_cast<const T*>(p.norm_weight) + i);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] *= w.get(j);
  }
}

__device__ __forceinline__ void smooth_row(const QuantizeRowsParams& p, int64_t i, float (&v)[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (p.shift != nullptr) v[j] += p.shift[i + j];
    if (p.smooth != nullptr) v[j] *= p.smooth[i + j];
  }
}

__device__ __forceinline__ float block_max(float x, float* scratch) {
  x = warp_max(x);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = x;
  __syncthreads();
  float largest = 0.f;
  for (int w = 0; w < kThreads / kWarp; ++w) largest = fmaxf(largest, scratch[w]);
  return largest;
}

template <class T>
__global__ void __launch_bounds__(kThreads) quantize_rows_kernel(const QuantizeRowsParams p) {
  __shared__ float scratch[2][kThreads / kWarp];
  pdl_trigger();
  pdl_wait();
  const int64_t row = blockIdx.x;
  const bool shifted = p.shift != nullptr;
  float squares = 0.f, largest = 0.f;
  for (int64_t i = threadIdx.x * 8; i < p.width; i += kThreads * 8) {
    float v[8];
    const Vec16<T> x = load16(static_cast<const T*>(p.x) + row * p.width + i);
#pragma unroll
    for (int j = 0; j < 8; ++j) squares += x.get(j) * x.get(j);
    load_row<T>(p, row, i, v);
    if (!shifted) smooth_row(p, i, v);
#pragma unroll
    for (int j = 0; j < 8; ++j) largest = fmaxf(largest, fabsf(v[j]));
  }
  float norm = 1.f;
  if (p.normalize) {
    norm = rsqrtf(block_sum(squares, scratch[0]) / static_cast<float>(p.width) + p.epsilon);
  }
  if (shifted) {  // the shift comes behind the norm: its divisor must be known first
    largest = 0.f;
    for (int64_t i = threadIdx.x * 8; i < p.width; i += kThreads * 8) {
      float v[8];
      load_row<T>(p, row, i, v);
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] *= norm;
      smooth_row(p, i, v);
#pragma unroll
      for (int j = 0; j < 8; ++j) largest = fmaxf(largest, fabsf(v[j]));
    }
  }
  largest = block_max(largest, scratch[1]);
  const bool fp8 = p.operands == GemmOperands::kFp8;
  const float limit = fp8 ? kFp8Max : kInt8Max;
  const float fixed = p.static_scale != nullptr ? *p.static_scale : 0.f;
  // Of the values before (unshifted) or behind the norm's divisor.
  const float own = largest > 0.f ? largest / limit : 1.f;
  const float before = shifted ? norm : 1.f;
  const float scale = fixed > 0.f ? fixed : shifted ? own : own * norm;
  const float inverse = fixed > 0.f ? norm / fixed : before / own;
  if (threadIdx.x == 0) p.scale[row] = scale;
  for (int64_t i = threadIdx.x * 8; i < p.width; i += kThreads * 8) {
    float v[8];
    load_row<T>(p, row, i, v);
    if (shifted) {
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] *= norm;
    }
    smooth_row(p, i, v);
    const float factor = shifted ? (fixed > 0.f ? 1.f / fixed : 1.f / own) : inverse;
    uint32_t packed[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float q = v[j] * factor;
      uint32_t code;
      if (fp8) {
        code = __nv_cvt_float_to_fp8(q, __NV_SATFINITE, __NV_E4M3);
      } else {
        code = static_cast<uint8_t>(
            static_cast<int8_t>(__float2int_rn(fminf(fmaxf(q, -kInt8Max), kInt8Max))));
      }
      packed[j / 4] |= code << (j % 4 * 8);
    }
    *reinterpret_cast<uint2*>(static_cast<uint8_t*>(p.codes) + row * p.width + i) =
        make_uint2(packed[0], packed[1]);
  }
}

}  // namespace

Status quantize_rows(const QuantizeRowsParams& p, CUstream_st* stream) {
  if (p.num_rows == 0) return {};
  if (p.width % 8 != 0) {
    return Status::error("quantize_rows: width " + std::to_string(p.width) +
                         " must be a multiple of 8");
  }
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(p.num_rows));
  config.block = dim3(kThreads);
  config.stream = stream;
  config.pdl = p.dependent_launch;
  if (p.dtype == DType::kBFloat16) {
    return launch(quantize_rows_kernel<__nv_bfloat16>, config, "quantize_rows", p);
  }
  if (p.dtype == DType::kFloat16) {
    return launch(quantize_rows_kernel<__half>, config, "quantize_rows", p);
  }
  return Status::error(std::string("quantize_rows: dtype ") + dtype_name(p.dtype) +
                       " is not supported (allowed: bfloat16, float16)");
}

}  // namespace regatta::cuda
