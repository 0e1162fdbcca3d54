// Attention of spans with few rows (decode, drafts): split-KV with all query heads of a KV group in
// one 16-row matrix tile.
//
// Architectures: sm_80 and later (cp.async, mma.sync m16n8k16); bf16 and fp16.
// Algorithm: a persistent grid walks the items of attention_decode.cuh, found by a prefix sum over
// the batch's lengths. Warp w of a block takes the 16-token chunks w, w + 4, ... with its own ring
// and online softmax; no block barrier inside an item. Warps merge in shared memory, splits in the
// workspace, by the last block to arrive, in the order of the splits.
// Source: Flash-Decoding (Dao et al., 2023) and FlashInfer's packed groups; ours fixes the splits
// by length and merges in the same launch. Bound: bytes of keys and values over the read bandwidth.
#include "attention_decode.cuh"

namespace regatta::cuda {
namespace {

// Enough stages that three blocks fill a Hopper multiprocessor's shared memory, and one fits the
// 99 KB of sm_86 and sm_89.
template <int D>
struct DecodeShape {
  static constexpr int kWarps = D > 128 ? 2 : 4;
  static constexpr int kStages = D <= 64 ? 4 : D < 128 ? 3 : 2;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kRow = D + 8;                 // elements
  static constexpr int kTile = 16 * kRow;            // elements of 16 keys or values
  static constexpr int kRing = kStages * 2 * kTile;  // elements per warp
  static constexpr int kBlocksPerSm = D == 96 ? 2 : 3;
  static constexpr int kRingBytes = kWarps * kRing * 2;
  static_assert(kRingBytes >= kWarps * 16 * D * 4, "the ring also holds the warps' results");
};

// Queries of rows r0 and r0 + 8 of an item as left matrix fragments.
template <class T, int D>
__device__ __forceinline__ void load_queries(const AttentionArgs& args, const DecodeItem& x, int r0,
                                             uint32_t (&q)[D / 16][4]) {
  const int lane = threadIdx.x % kWarp;
  const int r1 = r0 + 8, t0 = r0 / args.group, t1 = r1 / args.group;
  const int num_rows = x.num_tokens * args.group;
  const T* base = static_cast<const T*>(args.q) + x.kv_head * args.group * D + 2 * (lane % 4);
  const int64_t stride = static_cast<int64_t>(args.num_heads) * D;
  const T* q0 = base + (x.token0 + t0) * stride + (r0 - t0 * args.group) * D;
  const T* q1 = base + (x.token0 + t1) * stride + (r1 - t1 * args.group) * D;
  auto pair = [](const T* p) { return *reinterpret_cast<const uint32_t*>(p); };
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    q[k][0] = r0 < num_rows ? pair(q0 + k * 16) : 0;
    q[k][1] = r1 < num_rows ? pair(q1 + k * 16) : 0;
    q[k][2] = r0 < num_rows ? pair(q0 + k * 16 + 8) : 0;
    q[k][3] = r1 < num_rows ? pair(q1 + k * 16 + 8) : 0;
  }
}

// Running softmax of one warp over its part of an item's keys: rows lane / 4 and lane / 4 + 8.
template <int D>
struct DecodeState {
  float out[D / 8][4];
  float largest0, largest1, sum0, sum1;

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < D / 8; ++n) out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0.f;
    largest0 = largest1 = -INFINITY;
    sum0 = sum1 = 0.f;
  }

  // Takes the masked logits (log2 units) of 16 keys; leaves their weights in s.
  __device__ __forceinline__ void add(float (&s)[2][4]) {
    const float new0 =
        fmaxf(largest0, quad_max(fmaxf(fmaxf(s[0][0], s[0][1]), fmaxf(s[1][0], s[1][1]))));
    const float new1 =
        fmaxf(largest1, quad_max(fmaxf(fmaxf(s[0][2], s[0][3]), fmaxf(s[1][2], s[1][3]))));
    if (__any_sync(~0u, new0 > largest0 || new1 > largest1)) {
      const float scale0 = weight_of(largest0, new0), scale1 = weight_of(largest1, new1);
      sum0 *= scale0;
      sum1 *= scale1;
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        out[n][0] *= scale0;
        out[n][1] *= scale0;
        out[n][2] *= scale1;
        out[n][3] *= scale1;
      }
      largest0 = new0;
      largest1 = new1;
    }
    const float base0 = largest0 == -INFINITY ? 0.f : largest0;
    const float base1 = largest1 == -INFINITY ? 0.f : largest1;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      s[n][0] = exp2_approx(s[n][0] - base0);
      s[n][1] = exp2_approx(s[n][1] - base0);
      s[n][2] = exp2_approx(s[n][2] - base1);
      s[n][3] = exp2_approx(s[n][3] - base1);
      sum0 += s[n][0] + s[n][1];
      sum1 += s[n][2] + s[n][3];
    }
  }

  // Hands the warp's result to the block: stats [16], results [rows, D].
  __device__ __forceinline__ void store(float2* stats, float* results, int rows) {
    const int lane = threadIdx.x % kWarp, row = lane / 4;
    sum0 = quad_sum(sum0);
    sum1 = quad_sum(sum1);
    if (lane % 4 == 0) {
      stats[row] = make_float2(largest0, sum0);
      stats[row + 8] = make_float2(largest1, sum1);
    }
    // Columns are rotated by row: without it, rows would share banks.
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      const int column = (n * 8 + 2 * (lane % 4) + row * 8) % D;
      if (row < rows) {
        *reinterpret_cast<float2*>(results + row * D + column) = make_float2(out[n][0], out[n][1]);
      }
      if (row + 8 < rows) {
        const int column8 = (column + 64) % D;
        *reinterpret_cast<float2*>(results + (row + 8) * D + column8) =
            make_float2(out[n][2], out[n][3]);
      }
    }
  }
};

// kShaped: with a soft cap or slopes.
template <class T, int D, bool kShaped>
__global__ void __launch_bounds__(DecodeShape<D>::kThreads, DecodeShape<D>::kBlocksPerSm)
    attention_decode_sm80_kernel(const AttentionArgs args) {
  using Shape = DecodeShape<D>;
  constexpr int kWarps = Shape::kWarps, kStages = Shape::kStages;
  extern __shared__ __align__(128) uint8_t shared[];
  int* const unit_ends = reinterpret_cast<int*>(shared + Shape::kRingBytes);  // [num_seqs]
  __shared__ float2 warp_stats[kWarps][16];
  __shared__ int warp_totals[kWarps];
  __shared__ int arrived;

  const int tid = threadIdx.x, lane = tid % kWarp, warp = tid / kWarp;
  T* const ring = reinterpret_cast<T*>(shared) + warp * Shape::kRing;

  // Trigger after the wait: the prefill kernel behind relies on it (see attention.cu).
  pdl_wait();
  pdl_trigger();

  const int num_units = plan_decode<kWarps>(args, unit_ends, warp_totals);
  clear_padding<D>(args, tid, Shape::kThreads);
  const int num_items = num_units * args.num_kv_heads;
  for (int item = blockIdx.x; item < num_items; item += gridDim.x) {
    const DecodeItem x = find_decode_item(args, unit_ends, item);
    const int begin = x.begin, end = x.end, low = x.low, context_len = x.context_len;
    const int num_tokens = x.num_tokens, kv_head = x.kv_head;
    const int num_chunks = end > begin ? (end - begin + 15) / 16 : 0;
    const int my_chunks = num_chunks > warp ? (num_chunks - warp + kWarps - 1) / kWarps : 0;

    // Lane i holds the block of this warp's chunk i (mod 32).
    const int32_t* table = args.block_tables + static_cast<int64_t>(x.seq) * args.max_blocks;
    auto chunk_position = [&](int i) { return begin + (warp + i * kWarps) * 16; };
    auto block_of_chunk = [&](int i) {
      return i < my_chunks ? table[chunk_position(i) >> args.block_shift] : 0;
    };
    int blocks = block_of_chunk(lane);
    auto issue = [&](int i) {
      if (i < my_chunks) {
        if (i > 0 && i % kWarp == 0) blocks = block_of_chunk(i + lane);
        const int block = __shfl_sync(~0u, blocks, i % kWarp);
        const int position = chunk_position(i);
        T* stage = ring + i % kStages * 2 * Shape::kTile;
        load_16_tokens<T, D, D / 16>(stage,
                                     cache_tokens<T, D>(args.key, args, block, kv_head, position),
                                     0, position, low, context_len);
        load_16_tokens<T, D, D / 16>(stage + Shape::kTile,
                                     cache_tokens<T, D>(args.value, args, block, kv_head, position),
                                     0, position, low, context_len);
      }
      cp_async_commit();
    };
#pragma unroll
    for (int i = 0; i < kStages; ++i) issue(i);

    const int r0 = x.row_tile * args.tile_rows + lane / 4;
    const int last0 = context_len - num_tokens + r0 / args.group;
    const int last1 = context_len - num_tokens + (r0 + 8) / args.group;
    const int first0 = last0 - args.window + 1, first1 = last1 - args.window + 1;
    [[maybe_unused]] float slopes[2];
    if constexpr (kShaped) {
      const int num_rows = num_tokens * args.group;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = min(r0 + 8 * h, num_rows - 1);
        slopes[h] = slope_of(args, kv_head * args.group + r % args.group);
      }
    }
    uint32_t q[D / 16][4];
    load_queries<T, D>(args, x, r0, q);
    DecodeState<D> state;
    state.clear();

    for (int i = 0; i < my_chunks; ++i) {
      cp_async_wait<kStages - 1>();
      __syncwarp();
      const T* keys = ring + i % kStages * 2 * Shape::kTile;
      const T* values = keys + Shape::kTile;
      const int position = chunk_position(i);

      float s[2][4] = {};
      const T* key_row =
          keys + ((lane & 7) + (lane >> 4) * 8) * Shape::kRow + ((lane >> 3) & 1) * 8;
#pragma unroll
      for (int k = 0; k < D / 16; ++k) {
        uint32_t b[4];
        ldmatrix4(b, key_row + k * 16);
        mma_m16n8k16<T>(s[0], q[k], b[0], b[1]);
        mma_m16n8k16<T>(s[1], q[k], b[2], b[3]);
      }
      if constexpr (kShaped) {
        const int first = position + 2 * (lane % 4);
        const int distances[2] = {first - last0, first - last1};
        shape_logits<8>(args, slopes, distances, [&](int i) -> float& { return s[i / 4][i % 4]; });
      }
      const bool edge =
          position + 15 > context_len - num_tokens || position < context_len - args.window;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if constexpr (!kShaped) s[n][e] *= args.scale_log2;
          if (edge) {
            const int p = position + n * 8 + 2 * (lane % 4) + (e & 1);
            const bool seen = e < 2 ? p <= last0 && p >= first0 : p <= last1 && p >= first1;
            s[n][e] = seen ? s[n][e] : -INFINITY;
          }
        }
      }
      state.add(s);
      const uint32_t p[4] = {pack2<T>(s[0][0], s[0][1]), pack2<T>(s[0][2], s[0][3]),
                             pack2<T>(s[1][0], s[1][1]), pack2<T>(s[1][2], s[1][3])};
      const T* value_row =
          values + ((lane & 7) + ((lane >> 3) & 1) * 8) * Shape::kRow + (lane >> 4) * 8;
#pragma unroll
      for (int n = 0; n < D / 16; ++n) {
        uint32_t b[4];
        ldmatrix4_trans(b, value_row + n * 16);
        mma_m16n8k16<T>(state.out[2 * n], p, b[0], b[1]);
        mma_m16n8k16<T>(state.out[2 * n + 1], p, b[2], b[3]);
      }
      __syncwarp();
      issue(i + kStages);
    }

    // Merge the warps. The rings are done with: they hold the results now.
    cp_async_wait<0>();
    __syncthreads();
    float* const results = reinterpret_cast<float*>(shared);  // [kWarps, 16, D]
    state.store(warp_stats[warp], results + warp * 16 * D, tile_rows_of(args, x));
    __syncthreads();
    merge_warps<T, D, kWarps, Shape::kThreads>(args, x, tid, warp_stats, results, 16);
    __syncthreads();  // results may be overwritten, partials are written
    if (x.splits > 1) {
      if (tid == 0) arrived = arrive_split(args, x);
      __syncthreads();
      if (arrived) merge_splits<T, D, Shape::kThreads>(args, x, tid);
    }
  }
}

template <class T, int D>
Status run(const AttentionArgs& args, int num_sms, const Launch& launch_on) {
  using Shape = DecodeShape<D>;
  auto* const kernel = shapes_scores(args) ? attention_decode_sm80_kernel<T, D, true>
                                           : attention_decode_sm80_kernel<T, D, false>;
  return launch(kernel,
                {launch_on, num_sms * Shape::kBlocksPerSm, Shape::kThreads,
                 Shape::kRingBytes + round_up(args.num_seqs * 4, 16)},
                "paged_attention decode_sm80", args);
}

}  // namespace

Status launch_attention_decode_sm80(const AttentionArgs& args, DType dtype, int head_dim,
                                    int num_sms, const Launch& launch_on) {
  return dispatch_half(dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    return dispatch_head_dim(head_dim, "attention_decode_sm80", [&](auto dim) {
      return run<T, decltype(dim)::value>(args, num_sms, launch_on);
    });
  });
}

}  // namespace regatta::cuda
