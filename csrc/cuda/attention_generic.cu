// Attention in plain float arithmetic: any dtype, any head_dim up to 256, any architecture.
//
// For float32 (where the tests want CPU-like results) and for shapes that the matrix kernels
// refuse. Algorithm: one warp per (token, query head); each lane keeps D / 32 columns; online
// softmax over eight positions at a time. Bound: none sought; it re-reads keys and values for every
// query head.
#include "attention.cuh"

namespace regatta::cuda {
namespace {

constexpr int kWarps = 4, kColumns = 8 /* 32 * 8 = 256 */, kAtOnce = 8;

template <class T>
__global__ void __launch_bounds__(kWarps* kWarp)
    attention_generic_kernel(const AttentionArgs args, int head_dim) {
  pdl_wait();
  pdl_trigger();
  const int lane = threadIdx.x % kWarp;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (row >= static_cast<int64_t>(args.num_tokens) * args.num_heads) return;
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
    const int position = args.context_lens[seq] - args.cu_seqlens_q[seq + 1] + token;
    const int32_t* table = args.block_tables + static_cast<int64_t>(seq) * args.max_blocks;
    const T* query = static_cast<const T*>(args.q) + row * head_dim;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = lane + c * kWarp;
      if (column < head_dim) q[c] = Traits<T>::to_float(query[column]) * args.scale_log2;
    }
    const int block_mask = (1 << args.block_shift) - 1;
    for (int first = max(0, position - args.window + 1); first <= position; first += kAtOnce) {
      float s[kAtOnce];
      int64_t rows[kAtOnce];
      float top = largest;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int p = min(first + i, position);
        rows[i] =
            (((static_cast<int64_t>(table[p >> args.block_shift]) * args.num_kv_heads + kv_head)
              << args.block_shift) +
             (p & block_mask)) *
            head_dim;
        s[i] = 0.f;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const int column = lane + c * kWarp;
          if (column < head_dim) {
            s[i] += q[c] * Traits<T>::to_float(static_cast<const T*>(args.key)[rows[i] + column]);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        s[i] = first + i <= position ? warp_sum(s[i]) : -INFINITY;
        top = fmaxf(top, s[i]);
      }
      const float scale = exp2f(largest - top);
      largest = top;
      sum *= scale;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) x[c] *= scale;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float weight = exp2f(s[i] - top);
        sum += weight;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const int column = lane + c * kWarp;
          if (column < head_dim) {
            x[c] +=
                weight * Traits<T>::to_float(static_cast<const T*>(args.value)[rows[i] + column]);
          }
        }
      }
    }
  }
  const float scale = sum > 0.f ? 1.f / sum : 0.f;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const int column = lane + c * kWarp;
    if (column < head_dim) out[column] = Traits<T>::from_float(x[c] * scale);
  }
}

}  // namespace

Status launch_attention_generic(const AttentionArgs& args, DType dtype, int head_dim,
                                const Launch& launch_on) {
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(
      ceil_div(static_cast<int64_t>(args.num_tokens) * args.num_heads, kWarps)));
  config.block = dim3(kWarps * kWarp);
  config.stream = launch_on.stream;
  config.pdl = launch_on.pdl;
  return dispatch_dtype(dtype, "paged_attention", [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    return launch(attention_generic_kernel<T>, config, "paged_attention generic", args, head_dim);
  });
}

}  // namespace regatta::cuda
