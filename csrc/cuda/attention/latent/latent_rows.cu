// See latent.h: norms of parts of rows, rotation, the cache write, and rows of heads.
//
// Architectures: all; float32, bf16, fp16. A block per token. Bound: bytes.
#include <cuda_fp8.h>

#include <algorithm>
#include <type_traits>

#include "cuda/attention/latent/latent.h"
#include "cuda/common.cuh"
#include "regatta/kv_format.h"

namespace regatta::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
__device__ __forceinline__ float rms_factor(const T* x, int width, float epsilon, float* scratch) {
  float sum = 0.f;
  for (int i = threadIdx.x; i < width; i += kThreads) {
    const float v = Traits<T>::to_float(x[i]);
    sum = fmaf(v, v, sum);
  }
  return rsqrtf(block_sum(sum, scratch) / width + epsilon);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    norm_columns_kernel(const T* x, const T* weight, T* out, int width, int64_t stride,
                        float epsilon) {
  __shared__ float scratch[kThreads / kWarp];
  pdl_trigger();
  pdl_wait();
  const T* row = x + blockIdx.x * stride;
  const float factor = rms_factor(row, width, epsilon, scratch);
  for (int i = threadIdx.x; i < width; i += kThreads) {
    const float y = Traits<T>::to_float(row[i]) * factor * Traits<T>::to_float(weight[i]);
    out[static_cast<int64_t>(blockIdx.x) * width + i] = Traits<T>::from_float(y);
  }
}

template <class T>
struct WriteArgs {
  const T* q;
  const T* latents;
  const T* norm_weight;
  const float* rope_cache;
  const int32_t* positions;
  const int32_t* slot_mapping;
  void* cache;
  T* tail;
  float* scales;
  T* q_nope;
  T* q_rope;
  int32_t* head_ends;
  int64_t q_stride, latent_stride;
  int num_tokens, num_heads, latent_rank, rope_size, nope_size, num_positions;
  float epsilon;
  bool interleaved;
};

// Value i of R, rotated by the table's row.
template <class T>
__device__ __forceinline__ float rotated(const T* x, const float* angles, int i, int size,
                                         bool interleaved) {
  const int half = size / 2;
  const int pair = interleaved ? i / 2 : i % half;
  const bool second = interleaved ? i % 2 == 1 : i >= half;
  const float a = Traits<T>::to_float(x[interleaved ? pair * 2 : pair]);
  const float b = Traits<T>::to_float(x[interleaved ? pair * 2 + 1 : pair + half]);
  const float cosine = angles[pair], sine = angles[half + pair];
  return second ? fmaf(b, cosine, a * sine) : fmaf(a, cosine, -b * sine);
}

// Codes of y(i) for i < rank, and their scale. By a block; `scratch` is in use until it begins.
template <class Values>
__device__ __forceinline__ void write_codes(const Values& y, int rank, uint8_t* codes, float* scale,
                                            float* scratch) {
  float largest = kLeastKvRange;
  for (int i = threadIdx.x; i < rank; i += kThreads) largest = fmaxf(largest, fabsf(y(i)));
  largest = warp_max(largest);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = largest;
  __syncthreads();
  for (int w = 0; w < kThreads / kWarp; ++w) largest = fmaxf(largest, scratch[w]);
  const float factor = 448.f / largest;
  for (int i = threadIdx.x; i < rank; i += kThreads) {
    codes[i] = __nv_cvt_float_to_fp8(y(i) * factor, __NV_SATFINITE, __NV_E4M3);
  }
  if (threadIdx.x == 0) *scale = largest / 448.f;
}

template <class T>
__global__ void __launch_bounds__(kThreads) latent_write_kernel(const WriteArgs<T> a) {
  __shared__ float scratch[kThreads / kWarp];
  const int token = blockIdx.x;
  pdl_trigger();
  pdl_wait();
  if (token == 0) {
    for (int h = threadIdx.x; h < a.num_heads; h += kThreads) {
      a.head_ends[h] = (h + 1) * a.num_tokens;
    }
  }
  const int position = min(max(a.positions[token], 0), a.num_positions - 1);
  const float* angles = a.rope_cache + static_cast<int64_t>(position) * a.rope_size;
  const T* latent = a.latents + token * a.latent_stride;
  const float factor = rms_factor(latent, a.latent_rank, a.epsilon, scratch);
  const int64_t slot = a.slot_mapping[token];
  if (slot >= 0) {
    const int rank = a.latent_rank;
    const auto normed = [&](int i) {
      return Traits<T>::to_float(latent[i]) * factor * Traits<T>::to_float(a.norm_weight[i]);
    };
    T* tail;
    if (a.scales != nullptr) {
      write_codes(normed, rank, static_cast<uint8_t*>(a.cache) + slot * rank, a.scales + slot,
                  scratch);
      tail = a.tail + slot * a.rope_size;
    } else {
      T* to = static_cast<T*>(a.cache) + slot * (rank + a.rope_size);
      for (int i = threadIdx.x; i < rank; i += kThreads) to[i] = Traits<T>::from_float(normed(i));
      tail = to + rank;
    }
    for (int i = threadIdx.x; i < a.rope_size; i += kThreads) {
      tail[i] =
          Traits<T>::from_float(rotated(latent + rank, angles, i, a.rope_size, a.interleaved));
    }
  }
  const int head_size = a.nope_size + a.rope_size;
  const T* q = a.q + token * a.q_stride;
  for (int i = threadIdx.x; i < a.num_heads * head_size; i += kThreads) {
    const int head = i / head_size, at = i % head_size;
    const int64_t row = static_cast<int64_t>(head) * a.num_tokens + token;
    if (at < a.nope_size) {
      a.q_nope[row * a.nope_size + at] = q[i];
    } else {
      const float y = rotated(q + head * head_size + a.nope_size, angles, at - a.nope_size,
                              a.rope_size, a.interleaved);
      a.q_rope[row * a.rope_size + at - a.nope_size] = Traits<T>::from_float(y);
    }
  }
}

// Whether a token's span has more than so many. Padding behind the last span has none.
__device__ __forceinline__ bool is_in_longer(const int32_t* cu_seqlens_q, int num_seqs, int token,
                                             int max_span_len) {
  int low = 0, high = num_seqs;  // the first border behind the token
  while (low < high) {
    const int middle = (low + high) / 2;
    if (cu_seqlens_q[middle + 1] > token) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low < num_seqs && cu_seqlens_q[low + 1] - cu_seqlens_q[low] > max_span_len;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    heads_to_rows_kernel(const T* x, T* out, int num_tokens, int num_heads, int width,
                         const int32_t* cu_seqlens_q, int num_seqs, int max_span_len) {
  pdl_trigger();
  pdl_wait();
  const int token = blockIdx.x;
  if (cu_seqlens_q != nullptr && is_in_longer(cu_seqlens_q, num_seqs, token, max_span_len)) return;
  T* to = out + static_cast<int64_t>(token) * num_heads * width;
  for (int i = threadIdx.x; i < num_heads * width; i += kThreads) {
    const int64_t row = static_cast<int64_t>(i / width) * num_tokens + token;
    to[i] = x[row * width + i % width];
  }
}

LaunchConfig rows_config(int64_t rows, const Launch& launch_on) {
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(rows));
  config.block = dim3(kThreads);
  config.stream = launch_on.stream;
  config.pdl = launch_on.pdl;
  return config;
}

}  // namespace

Status norm_columns(const NormColumnsParams& p, const Launch& launch_on) {
  if (p.num_rows == 0) return {};
  return dispatch_dtype(p.dtype, "norm_columns", [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    return launch(norm_columns_kernel<T>, rows_config(p.num_rows, launch_on), "norm_columns",
                  static_cast<const T*>(p.x), static_cast<const T*>(p.weight),
                  static_cast<T*>(p.out), static_cast<int>(p.width), p.stride, p.epsilon);
  });
}

Status latent_write(const LatentWriteParams& p, const Launch& launch_on) {
  if (p.num_tokens == 0) return {};
  return dispatch_dtype(p.dtype, "latent_write", [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    WriteArgs<T> a = {};
    a.q = static_cast<const T*>(p.q);
    a.latents = static_cast<const T*>(p.latents);
    a.norm_weight = static_cast<const T*>(p.norm_weight);
    a.rope_cache = p.rope_cache;
    a.positions = p.positions;
    a.slot_mapping = p.slot_mapping;
    a.cache = p.cache;
    a.tail = static_cast<T*>(p.tail);
    a.scales = p.scales;
    a.q_nope = static_cast<T*>(p.q_nope);
    a.q_rope = static_cast<T*>(p.q_rope);
    a.head_ends = p.head_ends;
    a.q_stride = p.q_stride;
    a.latent_stride = p.latent_stride;
    a.num_tokens = static_cast<int>(p.num_tokens);
    a.num_heads = static_cast<int>(p.num_heads);
    a.latent_rank = static_cast<int>(p.latent_rank);
    a.rope_size = static_cast<int>(p.rope_size);
    a.nope_size = static_cast<int>(p.nope_size);
    a.num_positions = static_cast<int>(p.num_positions);
    a.epsilon = p.epsilon;
    a.interleaved = p.interleaved;
    return launch(latent_write_kernel<T>, rows_config(p.num_tokens, launch_on), "latent_write", a);
  });
}

Status heads_to_rows(const HeadsToRowsParams& p, const Launch& launch_on) {
  if (p.num_tokens == 0) return {};
  return dispatch_dtype(p.dtype, "heads_to_rows", [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    return launch(heads_to_rows_kernel<T>, rows_config(p.num_tokens, launch_on), "heads_to_rows",
                  static_cast<const T*>(p.x), static_cast<T*>(p.out),
                  static_cast<int>(p.num_tokens), static_cast<int>(p.num_heads),
                  static_cast<int>(p.width), p.cu_seqlens_q, static_cast<int>(p.num_seqs),
                  static_cast<int>(p.max_span_len));
  });
}

}  // namespace regatta::cuda
