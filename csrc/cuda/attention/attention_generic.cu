// Attention in plain float arithmetic: any dtype, any head_dim up to 256, any architecture.
//
// For float32 (where the tests want CPU-like results) and for shapes and cache formats that the
// matrix kernels refuse. Algorithm: one warp per (token, query head); each lane keeps D / 32
// columns; online softmax over eight positions at a time. Bound: none sought; it re-reads keys and
// values for every query head.
#include <cuda_fp8.h>

#include "attention.cuh"

namespace regatta::cuda {
namespace {

// Rows of a cache in any format.
template <class T, KvFormat kFormat>
struct CacheRows {
  const void* codes;
  const float* scales;
  int head_dim;

  // Of one head, or of one row: what its codes are multiplied by, and what is added then.
  __device__ __forceinline__ float2 scale_of(int64_t row, int kv_head) const {
    if constexpr (kFormat == KvFormat::kDense) return make_float2(1.f, 0.f);
    if constexpr (kFormat == KvFormat::kInt8Dynamic) return make_float2(scales[row], 0.f);
    if constexpr (kFormat == KvFormat::kInt4) return reinterpret_cast<const float2*>(scales)[row];
    return make_float2(scales[kv_head], 0.f);
  }
  __device__ __forceinline__ float at(int64_t row, int column, float2 scale) const {
    if constexpr (kFormat == KvFormat::kDense) {
      return Traits<T>::to_float(static_cast<const T*>(codes)[row * head_dim + column]);
    } else {
      const auto* const bytes = static_cast<const uint8_t*>(codes);
      float code;
      if constexpr (kFormat == KvFormat::kInt4) {
        code = bytes[row * ((head_dim + 1) / 2) + column / 2] >> (column % 2 * 4) & 15;
      } else if constexpr (kFormat == KvFormat::kFp8) {
        __nv_fp8_e4m3 x;
        x.__x = bytes[row * head_dim + column];
        code = static_cast<float>(x);
      } else {
        code = static_cast<float>(bytes[row * head_dim + column]) - 128.f;
      }
      return fmaf(code, scale.x, scale.y);
    }
  }
};

constexpr int kWarps = 4, kColumns = 8 /* 32 * 8 = 256 */, kAtOnce = 8;

template <class T, KvFormat kFormat>
__global__ void __launch_bounds__(kWarps* kWarp)
    attention_generic_kernel(const AttentionArgs args, int head_dim) {
  pdl_wait();
  pdl_trigger();
  const int lane = threadIdx.x % kWarp;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (row >= int64_t{args.num_tokens} * args.num_heads) return;
  const int token = static_cast<int>(row / args.num_heads);
  const int head = static_cast<int>(row % args.num_heads);
  const int kv_head = head / args.group;
  T* const out = static_cast<T*>(args.out) + row * head_dim;

  int low_seq = 0, high_seq = args.num_seqs;  // first span that ends after the token
  while (low_seq < high_seq) {
    const int middle = (low_seq + high_seq) / 2;
    if (token < args.cu_seqlens_q[middle + 1]) {
      high_seq = middle;
    } else {
      low_seq = middle + 1;
    }
  }
  float q[kColumns] = {}, x[kColumns] = {}, largest = -INFINITY, sum = 0.f;
  if (low_seq < args.num_seqs) {
    const int seq = low_seq;
    const int context_len = args.context_lens[seq];
    const int num_tokens = args.cu_seqlens_q[seq + 1] - args.cu_seqlens_q[seq];
    const int before = context_len - num_tokens;
    const bool tree = is_tree(args, num_tokens);
    // The last position that may be seen, and the token's own.
    const int own = before + token - args.cu_seqlens_q[seq];
    const int last = tree ? context_len - 1
                          : last_visible(own, last_of_prefix(args, seq, context_len), args.window);
    const int position = tree ? before + tree_depth(args, token) : own;
    const int32_t* table = args.block_tables + static_cast<int64_t>(seq) * args.max_blocks;
    const T* query = static_cast<const T*>(args.q) + row * head_dim;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = lane + c * kWarp;
      if (column < head_dim) q[c] = Traits<T>::to_float(query[column]) * args.scale_log2;
    }
    const float slope = slope_of(args, head);
    const CacheRows<T, kFormat> keys = {args.key, args.key_scale, head_dim};
    const CacheRows<T, kFormat> values = {args.value, args.value_scale, head_dim};
    const int block_mask = (1 << args.block_shift) - 1;
    for (int first = max(0, position - args.window + 1); first <= last; first += kAtOnce) {
      float s[kAtOnce];
      int64_t rows[kAtOnce];
      float top = largest;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int p = min(first + i, last);
        rows[i] =
            ((static_cast<int64_t>(table[p >> args.block_shift]) * args.num_kv_heads + kv_head)
             << args.block_shift) +
            (p & block_mask);
        const float2 scale = keys.scale_of(rows[i], kv_head);
        s[i] = 0.f;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const int column = lane + c * kWarp;
          if (column < head_dim) s[i] += q[c] * keys.at(rows[i], column, scale);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        s[i] = warp_sum(s[i]);
        const int p = first + i;
        if (args.cap_log2 != 0.f) s[i] = capped_logit(args, s[i]);
        s[i] = fmaf(slope, static_cast<float>(p - position), s[i]);
        if (p > last || (tree && p >= before && !tree_sees(args, token, p - before))) {
          s[i] = -INFINITY;
        }
        top = fmaxf(top, s[i]);
      }
      if (top == -INFINITY) continue;  // a tree's token may see none of these
      const float scale = exp2f(largest - top);
      largest = top;
      sum *= scale;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) x[c] *= scale;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float weight = exp2f(s[i] - top);
        const float2 scale = values.scale_of(rows[i], kv_head);
        sum += weight;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const int column = lane + c * kWarp;
          if (column < head_dim) x[c] += weight * values.at(rows[i], column, scale);
        }
      }
    }
    sum = sum_with_sink(args, sum, largest, head);
  }
  const float scale = sum > 0.f ? 1.f / sum : 0.f;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const int column = lane + c * kWarp;
    if (column < head_dim) out[column] = Traits<T>::from_float(x[c] * scale);
  }
}

}  // namespace

Status launch_attention_generic(const AttentionArgs& args, DType dtype, KvFormat format,
                                int head_dim, const Launch& launch_on) {
  return dispatch_dtype(dtype, "paged_attention", [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const auto run = [&](auto* kernel) {
      return launch(
          kernel,
          {launch_on, ceil_div(int64_t{args.num_tokens} * args.num_heads, kWarps), kWarps * kWarp},
          "paged_attention generic", args, head_dim);
    };
    if (format == KvFormat::kDense) return run(attention_generic_kernel<T, KvFormat::kDense>);
    return dispatch_codes(format, "paged_attention", [&](auto codes) {
      return run(attention_generic_kernel<T, decltype(codes)::value>);
    });
  });
}

}  // namespace regatta::cuda
