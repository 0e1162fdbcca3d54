// The work items of the sm80 decode kernel, and how partial results are merged.
//
// An item is (span, row tile of args.tile_rows rows, split of its context, KV head). The size of a
// split depends on the length of the context alone, so that a token's result does not depend on the
// batch. "Unit": (span, row tile, split), counted over the batch; an item is a unit and a KV head.
#pragma once

#include "attention.cuh"

namespace regatta::cuda {

constexpr int kSplitMask = ~63;  // splits start at multiples of 64 tokens

struct DecodeItem {
  int unit, kv_head;
  int token0, num_tokens, context_len;
  int low;  // first visible position of the span
  int row_tile, splits, split_index;
  int begin, end;  // positions; begin is a multiple of 64
  int seq;
};

__device__ __forceinline__ int decode_units(const AttentionArgs& args, int seq) {
  const int num_tokens = args.cu_seqlens_q[seq + 1] - args.cu_seqlens_q[seq];
  if (num_tokens <= 0 || !is_decode_span(num_tokens, args.group, args.max_decode_rows)) return 0;
  const int context_len = args.context_lens[seq];
  const int length =
      context_len - (first_visible(context_len, num_tokens, args.window) & kSplitMask);
  const int split = split_tokens(length);
  const int splits = length > split ? (length + split - 1) / split : 1;
  return (num_tokens * args.group + args.tile_rows - 1) / args.tile_rows * splits;
}

// unit_ends[seq] = units up to and including seq; returns their number. The whole block calls it;
// warp_totals: [kWarps].
template <int kWarps>
__device__ __forceinline__ int plan_decode(const AttentionArgs& args, int* unit_ends,
                                           int* warp_totals) {
  const int tid = threadIdx.x, lane = tid % kWarp, warp = tid / kWarp;
  int num_units = 0;
  for (int base = 0; base < args.num_seqs; base += kWarps * kWarp) {
    const int seq = base + tid;
    const int end = warp_inclusive_scan(seq < args.num_seqs ? decode_units(args, seq) : 0);
    if (lane == kWarp - 1) warp_totals[warp] = end;
    __syncthreads();
    int before = num_units;
    for (int w = 0; w < kWarps; ++w) {
      before += w < warp ? warp_totals[w] : 0;
      num_units += warp_totals[w];
    }
    if (seq < args.num_seqs) unit_ends[seq] = before + end;
    __syncthreads();
  }
  return num_units;
}

__device__ __forceinline__ DecodeItem find_decode_item(const AttentionArgs& args,
                                                       const int* unit_ends, int item) {
  DecodeItem x;
  x.unit = item / args.num_kv_heads;
  x.kv_head = item - x.unit * args.num_kv_heads;
  int low = 0, high = args.num_seqs - 1;  // first span with unit < end
  while (low < high) {
    const int middle = (low + high) / 2;
    if (x.unit < unit_ends[middle]) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  x.seq = low;
  const int first_unit = low == 0 ? 0 : unit_ends[low - 1];
  x.token0 = args.cu_seqlens_q[low];
  x.num_tokens = args.cu_seqlens_q[low + 1] - x.token0;
  x.context_len = args.context_lens[low];
  x.low = first_visible(x.context_len, x.num_tokens, args.window);
  const int split = split_tokens(x.context_len - (x.low & kSplitMask));
  const int row_tiles = (x.num_tokens * args.group + args.tile_rows - 1) / args.tile_rows;
  x.splits = (unit_ends[low] - first_unit) / row_tiles;
  x.row_tile = (x.unit - first_unit) / x.splits;
  x.split_index = (x.unit - first_unit) - x.row_tile * x.splits;
  x.begin = (x.low & kSplitMask) + x.split_index * split;
  x.end = min(x.begin + split, x.context_len);
  return x;
}

// Rows of an item's tile that exist.
__device__ __forceinline__ int tile_rows_of(const AttentionArgs& args, const DecodeItem& x) {
  return min(args.tile_rows, x.num_tokens * args.group - x.row_tile * args.tile_rows);
}

// Rows of tokens behind the last span become 0.
template <int D>
__device__ __forceinline__ void clear_padding(const AttentionArgs& args, int thread, int threads) {
  const int64_t row = static_cast<int64_t>(args.num_heads) * D;
  const int64_t first = args.cu_seqlens_q[args.num_seqs] * row / 8,
                last = args.num_tokens * row / 8;
  for (int64_t i = first + blockIdx.x * threads + thread; i < last;
       i += static_cast<int64_t>(gridDim.x) * threads) {
    static_cast<uint4*>(args.out)[i] = make_uint4(0, 0, 0, 0);
  }
}

// exp2(largest - total_largest) for parts that may be empty.
__device__ __forceinline__ float weight_of(float largest, float total_largest) {
  return total_largest == -INFINITY ? 0.f : exp2_approx(largest - total_largest);
}

// Of a row of weights exp2(logit - largest).
template <class T, int D>
__device__ __forceinline__ void store_row4(const AttentionArgs& args, const DecodeItem& x, int row,
                                           int column, float4 value, float largest, float sum) {
  const int r = x.row_tile * args.tile_rows + row, t = token_of_row(args, r);
  const int head = x.kv_head * args.group + r - t * args.group;
  const float total = sum_with_sink(args, sum, largest, head);
  const float scale = total > 0.f ? 1.f / total : 0.f;
  T* out = static_cast<T*>(args.out) +
           (static_cast<int64_t>(x.token0 + t) * args.num_heads + head) * D + column;
  *reinterpret_cast<uint2*>(out) = make_uint2(pack2<T>(value.x * scale, value.y * scale),
                                              pack2<T>(value.z * scale, value.w * scale));
}

// Merges the warps' results of an item: into `out` when the item has its context alone, else into
// the workspace. kThreads threads call it with their number. stats: [kWarps][16]; results: [kWarps,
// result_rows, D], where column c of row r lies at (c + 8 r) % D.
template <class T, int D, int kWarps, int kThreads>
__device__ __forceinline__ void merge_warps(const AttentionArgs& args, const DecodeItem& x,
                                            int thread, const float2 (*stats)[16],
                                            const float* results, int result_rows) {
  const int rows = tile_rows_of(args, x);
  const int64_t partial =
      (static_cast<int64_t>(x.unit) * args.num_kv_heads + x.kv_head) * args.partial_rows;
  for (int i = thread; i < rows * (D / 4); i += kThreads) {
    const int row = i / (D / 4), column = i % (D / 4) * 4;
    const int rotated = (column + row * 8) % D;
    float largest = -INFINITY, sum = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, stats[w][row].x);
    float4 value = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float weight = weight_of(stats[w][row].x, largest);
      const float4 y =
          *reinterpret_cast<const float4*>(results + (w * result_rows + row) * D + rotated);
      sum += weight * stats[w][row].y;
      value.x += weight * y.x;
      value.y += weight * y.y;
      value.z += weight * y.z;
      value.w += weight * y.w;
    }
    if (x.splits == 1) {
      store_row4<T, D>(args, x, row, column, value, largest, sum);
    } else {
      *reinterpret_cast<float4*>(args.partial_out + (partial + row) * D + column) = value;
      if (column == 0) args.partial_stats[partial + row] = make_float2(largest, sum);
    }
  }
}

// Counts a split in, one thread after a barrier with the writers of its partial result; true for
// the last split of the tile.
__device__ __forceinline__ bool arrive_split(const AttentionArgs& args, const DecodeItem& x) {
  int* const counter =
      args.counters + static_cast<int64_t>(x.unit - x.split_index) * args.num_kv_heads + x.kv_head;
  __threadfence();
  const bool last = atomicAdd(counter, 1) == x.splits - 1;
  if (last) *counter = 0;  // for the next call
  __threadfence();
  return last;
}

// Merges the splits of a tile in their order. kThreads threads call it with their number.
template <class T, int D, int kThreads>
__device__ __forceinline__ void merge_splits(const AttentionArgs& args, const DecodeItem& x,
                                             int thread) {
  const int rows = tile_rows_of(args, x);
  const int64_t tile_entry =
      static_cast<int64_t>(x.unit - x.split_index) * args.num_kv_heads + x.kv_head;
  const int64_t stride = static_cast<int64_t>(args.num_kv_heads) * args.partial_rows;
  for (int i = thread; i < rows * (D / 4); i += kThreads) {
    const int row = i / (D / 4), column = i % (D / 4) * 4;
    const int64_t first = tile_entry * args.partial_rows + row;
    float largest = -INFINITY, sum = 0.f;
#pragma unroll 8
    for (int s = 0; s < x.splits; ++s) {
      largest = fmaxf(largest, __ldcg(args.partial_stats + first + s * stride).x);
    }
    float4 value = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
    for (int s = 0; s < x.splits; ++s) {
      const float2 part_stats = __ldcg(args.partial_stats + first + s * stride);
      const float4 part = __ldcg(
          reinterpret_cast<const float4*>(args.partial_out + (first + s * stride) * D + column));
      const float weight = weight_of(part_stats.x, largest);
      sum += weight * part_stats.y;
      value.x += weight * part.x;
      value.y += weight * part.y;
      value.z += weight * part.z;
      value.w += weight * part.w;
    }
    store_row4<T, D>(args, x, row, column, value, largest, sum);
  }
}

}  // namespace regatta::cuda
