// What follows a product of activations and weights: row scale, bias, gate, residual, rounding.
//
// Shared by the GEMM kernels, which differ in how they come to the sums. A thread finishes eight
// adjacent outputs of one token, so that it reads and writes 16 bytes at a time.
#pragma once

#include "cuda/activation/functions.cuh"
#include "cuda/common.cuh"
#include "cuda/hopper.cuh"
#include "regatta/gemm.h"

namespace regatta::cuda {

// GemmParams, as kernels take it.
struct Epilogue {
  const void* bias;
  const void* residual;
  const float* sumsq;
  const float* x_scale;
  const float* weight_scale;
  void* out;
  float* sumsq_out;
  void* scaled_out;
  const void* next_norm_weight;
  int out_features, num_sumsq, sumsq_columns;
  float inverse_width, epsilon;
  bool gated, float_out;
  bool activates;     // not gated: outputs go through `function`
  Function function;  // of them, or of gates
  bool vector_out;    // rows of out and residual are aligned to 16 bytes
};

inline Epilogue make_epilogue(const GemmParams& p) {
  Epilogue e = {};
  e.bias = p.bias;
  e.residual = p.residual;
  e.sumsq = p.sumsq;
  // Scales of blocks are in the sums already.
  e.x_scale = p.scale_rows == 0 ? p.x_scale : nullptr;
  e.weight_scale = p.scale_rows == 0 ? p.weight_scale : nullptr;
  e.out = p.out;
  e.sumsq_out = p.sumsq_out;
  e.out_features = static_cast<int>(p.out_features);
  e.scaled_out = p.scaled_out;
  e.next_norm_weight = p.next_norm_weight;
  e.sumsq_columns = static_cast<int>(gemm_sumsq_columns(p.num_rows));
  e.num_sumsq = static_cast<int>(p.num_sumsq);
  e.inverse_width = 1.f / static_cast<float>(p.in_features);
  e.epsilon = p.epsilon;
  e.gated = p.gated;
  e.activates = p.activates;
  e.function = p.function;
  e.float_out = p.out_dtype == DType::kFloat32;
  const int64_t width = p.gated ? p.out_features / 2 : p.out_features;
  e.vector_out = width % 8 == 0 && reinterpret_cast<uintptr_t>(p.out) % 16 == 0 &&
                 reinterpret_cast<uintptr_t>(p.residual) % 16 == 0 &&
                 reinterpret_cast<uintptr_t>(p.scaled_out) % 16 == 0;
  return e;
}

// Scales of blocks of 128 columns, as GemmParams has them.
struct BlockScales {
  const float* x;       // [num_blocks, x_stride]
  const float* weight;  // [rows / scale_rows, num_blocks]
  int num_blocks, x_stride, scale_rows, last_row;

  // Of this row of weight, for every block.
  __device__ __forceinline__ const float* of_row(int row) const {
    return weight + static_cast<int64_t>(min(row, last_row) / scale_rows) * num_blocks;
  }

  // With the scales of a group's weight, which are [G, ...] of what they are without groups.
  __device__ __forceinline__ BlockScales of_group(int group) const {
    BlockScales own = *this;
    own.weight += static_cast<int64_t>(group) * (last_row / scale_rows + 1) * num_blocks;
    return own;
  }
};

inline BlockScales make_block_scales(const GemmParams& p) {
  BlockScales b = {};
  b.x = p.x_scale;
  b.weight = p.weight_scale;
  b.num_blocks = static_cast<int>(ceil_div(p.in_features, kScaleBlock));
  b.x_stride = static_cast<int>(gemm_block_stride(p.num_rows));
  b.scale_rows = static_cast<int>(p.scale_rows);
  b.last_row = static_cast<int>(p.out_features - 1);
  return b;
}

// rsqrt(mean(x^2) + epsilon) of a row, from its partial sums in their order; or the scale of its
// codes; 1 without them.
__device__ __forceinline__ float row_scale_of(const Epilogue& p, int64_t row) {
  if (p.x_scale != nullptr) return __ldcg(p.x_scale + row);
  if (p.sumsq == nullptr) return 1.f;
  const float* from = p.sumsq + row * p.num_sumsq;
  float sum = 0.f;
  if (p.num_sumsq % 4 == 0) {
#pragma unroll 8
    for (int i = 0; i < p.num_sumsq; i += 4) {
      const float4 v = __ldcg(reinterpret_cast<const float4*>(from + i));
      sum += (v.x + v.y) + (v.z + v.w);
    }
  } else {
    for (int i = 0; i < p.num_sumsq; ++i) sum += __ldcg(from + i);
  }
  return rsqrtf(sum * p.inverse_width + p.epsilon);
}

// The same of `count` rows by one warp, into scales[0 .. count - 1]. Eight rows at a time: one
// after the other, each would wait for memory.
__device__ __forceinline__ void warp_row_scales(const Epilogue& p, int64_t row, int count,
                                                float* scales) {
  constexpr int kRows = 8;
  const int lane = threadIdx.x % kWarp;
  if (p.sumsq == nullptr) {
    for (int t = lane; t < count; t += kWarp) scales[t] = row_scale_of(p, row + t);
    return;
  }
  for (int t0 = 0; t0 < count; t0 += kRows) {
    float sum[kRows] = {};
    for (int i = lane; i < p.num_sumsq; i += kWarp) {
#pragma unroll
      for (int t = 0; t < kRows; ++t) {
        if (t0 + t < count) sum[t] += __ldcg(p.sumsq + (row + t0 + t) * p.num_sumsq + i);
      }
    }
#pragma unroll
    for (int t = 0; t < kRows; ++t) {
      const float scale = rsqrtf(warp_sum(sum[t]) * p.inverse_width + p.epsilon);
      if (lane == 0 && t0 + t < count) scales[t0 + t] = scale;
    }
  }
}

// Whether columns n0 .. n0+7 of a row can be read and written at once.
template <class T>
__device__ __forceinline__ bool is_whole(const Epilogue& p, int n0, int width) {
  return sizeof(T) == 2 && p.vector_out && n0 + 8 <= width;
}

// Adds the residual to outputs n0 .. n0+7 of token t, writes them, and returns the sum of their
// squares as rounded. residual: those of them that are whole, or null: read here.
template <class T>
__device__ __forceinline__ float write_outputs(const Epilogue& p, float (&y)[8], int64_t t, int n0,
                                               int width, const Vec16<T>* residual_there) {
  const int64_t offset = t * width + n0;
  const bool whole = is_whole<T>(p, n0, width);
  if (p.residual != nullptr) {
    const T* residual = static_cast<const T*>(p.residual) + offset;
    if (whole) {
      if constexpr (sizeof(T) == 2) {
        const Vec16<T> r = residual_there != nullptr ? *residual_there : load16_l2(residual);
#pragma unroll
        for (int i = 0; i < 8; ++i) y[i] += r.get(i);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (n0 + i < width) y[i] += Traits<T>::to_float(__ldcg(residual + i));
      }
    }
  }
  float squares = 0.f;
  if (p.float_out) {
    float* out = static_cast<float*>(p.out) + offset;
    if (whole) {
      *reinterpret_cast<float4*>(out) = make_float4(y[0], y[1], y[2], y[3]);
      *reinterpret_cast<float4*>(out + 4) = make_float4(y[4], y[5], y[6], y[7]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (n0 + i < width) {
        if (!whole) out[i] = y[i];
        squares += y[i] * y[i];
      }
    }
  } else if constexpr (sizeof(T) == 2) {
    T* out = static_cast<T*>(p.out) + offset;
    Vec16<T> r;
#pragma unroll
    for (int i = 0; i < 8; ++i) r.set(i, y[i]);
    if (whole) store16(out, r);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (n0 + i < width) {
        if (!whole) out[i] = r.v[i];
        squares += r.get(i) * r.get(i);
      }
    }
  }
  return squares;
}

// Eight outputs of token t: n0 .. n0+7. v: their products; gated: eight gates, then eight ups.
template <class T>
__device__ __forceinline__ float finish(const Epilogue& p, const float* v, float scale, int64_t t,
                                        int n0, int width) {
  const T* bias = static_cast<const T*>(p.bias);
  float y[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    y[i] = v[i] * scale;
    const bool inside = n0 + i < width;
    if (p.weight_scale != nullptr && inside) y[i] *= p.weight_scale[n0 + i];
    if (bias != nullptr && inside) y[i] += Traits<T>::to_float(bias[n0 + i]);
  }
  if (p.gated || p.activates) apply(p.function, y);
  if (p.gated) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool inside = n0 + i < width;
      float up = v[8 + i] * scale;
      if (p.weight_scale != nullptr && inside) up *= p.weight_scale[width + n0 + i];
      if (bias != nullptr && inside) up += Traits<T>::to_float(bias[width + n0 + i]);
      y[i] *= up;
    }
  }
  return write_outputs<T>(p, y, t, n0, width, nullptr);
}

// The same for a thread that finishes these columns of several tokens: it reads their scales and
// biases once, all at a time, and the residual of the next token ahead.
template <class T, bool kGated>
struct Columns {
  static constexpr int kCount = kGated ? 16 : 8;
  float scale[kCount], bias[kCount];

  __device__ __forceinline__ void load(const Epilogue& p, int n0, int width) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int n = n0 + i % 8, row = i / 8 * width + n;
      const bool inside = n < width;
      scale[i] = inside && p.weight_scale != nullptr ? __ldg(p.weight_scale + row) : 1.f;
      bias[i] = inside && p.bias != nullptr
                    ? Traits<T>::to_float(static_cast<const T*>(p.bias)[row])
                    : 0.f;
    }
  }

  // Those that lie there in a row, aligned to 16 bytes.
  __device__ __forceinline__ void take(const float* scales, const float* biases) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 s = *reinterpret_cast<const float4*>(scales + i);
      const float4 b = *reinterpret_cast<const float4*>(biases + i);
      scale[i] = s.x, scale[i + 1] = s.y, scale[i + 2] = s.z, scale[i + 3] = s.w;
      bias[i] = b.x, bias[i + 1] = b.y, bias[i + 2] = b.z, bias[i + 3] = b.w;
    }
  }

  __device__ __forceinline__ float finish(const Epilogue& p, const float* v, float row_scale,
                                          int64_t t, int n0, int width,
                                          const Vec16<T>* residual) const {
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      y[i] = v[i] * row_scale * scale[i] + bias[i];
    }
    if (kGated || p.activates) apply(p.function, y);
    if constexpr (kGated) {
#pragma unroll
      for (int i = 0; i < 8; ++i) y[i] *= v[8 + i] * row_scale * scale[8 + i] + bias[8 + i];
    }
    return write_outputs<T>(p, y, t, n0, width, residual);
  }
};

// What one output takes beside its sum: asked for ahead of it, and not looked at until it is
// written. Of products that make no function but a gate's SiLU (select.cu): code for others would
// make the kernel longer, and slower where it is short.
template <class T>
struct Output {
  float scale = 1.f, up_scale = 1.f;
  T bias = {}, up_bias = {}, residual = {}, norm = {};
  bool inside = false;

  template <bool kGated>
  __device__ __forceinline__ void request(const Epilogue& p, int64_t t, int n, int width) {
    if (!inside) return;
    if (p.weight_scale != nullptr) {
      scale = p.weight_scale[n];
      if (kGated) up_scale = p.weight_scale[width + n];
    }
    if (p.bias != nullptr) {
      const T* from = static_cast<const T*>(p.bias) + n;
      bias = *from;
      if (kGated) up_bias = from[width];
    }
    if (!kGated && p.scaled_out != nullptr) norm = static_cast<const T*>(p.next_norm_weight)[n];
    if (p.residual != nullptr) {
      residual = __ldcg(static_cast<const T*>(p.residual) + t * width + n);
    }
  }

  // Returns the square of what it wrote.
  template <bool kGated>
  __device__ __forceinline__ float write(const Epilogue& p, float sum, float up, int64_t at) const {
    if (!inside) return 0.f;
    float y = fmaf(sum, scale, Traits<T>::to_float(bias));
    if (kGated) {
      y = apply<Function::kSilu>(y) * fmaf(up, up_scale, Traits<T>::to_float(up_bias));
    }
    y += Traits<T>::to_float(residual);
    if (p.float_out) {
      static_cast<float*>(p.out)[at] = y;
    } else {
      const T rounded = Traits<T>::from_float(y);
      static_cast<T*>(p.out)[at] = rounded;
      y = Traits<T>::to_float(rounded);
      if (!kGated && p.scaled_out != nullptr) {
        static_cast<T*>(p.scaled_out)[at] = Traits<T>::from_float(y * Traits<T>::to_float(norm));
      }
    }
    return y * y;
  }
};

}  // namespace regatta::cuda
