// See latent.h: norms of parts of rows, rotation, the cache write, and rows of heads.
//
// Architectures: all; float32, bf16, fp16. A block per token. Bound: bytes.
#include <type_traits>

#include "cuda/attention/latent/latent.h"
#include "cuda/attention/latent/latent_write.cuh"
#include "cuda/common.cuh"

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

// The first warp takes the latent, the others the queries.
template <class T, int V>
__global__ void __launch_bounds__(kThreads) latent_write_kernel(const LatentWriteArgs<T> a) {
  const int token = blockIdx.x, thread = static_cast<int>(threadIdx.x) - kWarp;
  pdl_trigger();
  if (thread < 0) fetch_norm_weight(a);
  pdl_wait();
  if (token == 0) {
    for (int h = threadIdx.x; h < a.num_heads; h += kThreads) {
      a.head_ends[h] = (h + 1) * a.num_tokens;
    }
  }
  if (thread < 0) {
    write_latent<T, V>(a, token);
  } else {
    rotate_queries<T, V>(a, token, thread, kThreads - kWarp);
    copy_queries<T, V>(a, token, thread, kThreads - kWarp);
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
  return {launch_on, rows, kThreads};
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
    constexpr int kUnit = 16 / static_cast<int>(sizeof(T));
    auto* const kernel =
        lies_in_units(p) ? latent_write_kernel<T, kUnit> : latent_write_kernel<T, 1>;
    return launch(kernel, rows_config(p.num_tokens, launch_on), "latent_write",
                  LatentWriteArgs<T>(p));
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
