// Attention of spans with few rows on Hopper: the tensor copy engine streams keys and values
// through a ring that never drains between work items.
//
// Architectures: sm_90a; bf16 and fp16; head_dim 64, 128, 256.
// Algorithm
//  1. Items as in attention_decode.cuh, handed out by a ticket counter: multiprocessors read at
//     unequal speeds, and a fixed deal left a quarter of them idle at the end.
//  2. A producer warp walks the items and fills stages of 64 tokens (32 for head_dim 256), running
//     ahead into the next item while consumers finish this one. Each stage carries a description of
//     its item.
//  3. Each consumer warp takes 16 tokens of a stage. Logits are mma.sync m16n8k16 with up to 8 rows
//  of
//     a KV group as the upper half of the 16-row operand; their layout is that of the right operand
//     of out^T [D, 8] = values^T [D, 16] weights^T [16, 8], which needs half the registers and
//     products of out [16, D]. The online softmax rescales only when a logit exceeds the running
//     maximum by a factor of 2^8, which costs one vote per 16 tokens.
//  4. Consumer warps are merged in shared memory. A finisher warp publishes a split and, when it is
//     the last of its tile, merges the splits: the fence and the counter cost 3 us, during which
//     the consumers go on (without it they lost a quarter of the time there).
// Bound: bytes of keys and values over the read bandwidth, 4.67 TB/s measured.
// H200, bf16, 32/8 heads of 128, block_size 64, in a graph with dependent launches, us (TB/s);
// cuDNN on contiguous caches through PyTorch 2.11 in brackets:
//   batch 1 x 128: 6.1 [4.2]     1 x 4096: 15.5 [11.7]         8 x 1024: 18.2 [15.1]
//   64 x 4096: 285 (3.76) [244]  128 x 1024: 155 (3.47) [127]  128 x 4096: 548 (3.92)
//   1 x 131072: 146 (3.69); head_dim 256, 64 x 4096: 529 (4.06); block_size 16, 64 x 4096: 282
//   (3.80)
// Three blocks per multiprocessor instead of two, with two stages each, were 5 to 30 % slower.
#include <algorithm>

#include "attention_decode.cuh"
#include "attention_tensor_map.cuh"
#include "hopper.cuh"

namespace regatta::cuda {
namespace {

template <int D>
struct DecodeShape {
  static constexpr int kTokens = D > 128 ? 32 : 64;  // per stage
  static constexpr int kConsumers = kTokens / 16;    // warps
  static constexpr int kThreads = (kConsumers + 2) * kWarp;
  static constexpr int kPanels = D / 64;  // of 64 columns, 128 bytes per row
  static constexpr int kPanelBytes = kTokens * 128;
  static constexpr int kTileBytes = kTokens * D * 2;
  static constexpr int kStageBytes = 2 * kTileBytes;  // keys, values
  static constexpr int kMaxStages = 8;
  static constexpr int kBlocksPerSm = 2;
  static constexpr int kBlockBytes = 110 * 1024;  // of shared memory, dynamic
};

struct alignas(16) StageInfo {
  DecodeItem item;
  int position;     // of the stage's first token
  int first, last;  // stage of the item; first < 0: no more items
};

template <class T, int D>
__global__ void __launch_bounds__(DecodeShape<D>::kThreads, DecodeShape<D>::kBlocksPerSm)
    attention_decode_sm90_kernel(const __grid_constant__ CUtensorMap key_map,
                                 const __grid_constant__ CUtensorMap value_map,
                                 const AttentionArgs args, int box_tokens, int num_stages,
                                 int result_rows) {
  using S = DecodeShape<D>;
  constexpr int kConsumers = S::kConsumers;
  extern __shared__ uint8_t raw[];
  uint8_t* const ring = raw + (1024 - shared_address(raw) % 1024) % 1024;
  float* const results = reinterpret_cast<float*>(ring + num_stages * S::kStageBytes);
  int* const unit_ends = reinterpret_cast<int*>(results + kConsumers * result_rows * D);
  __shared__ uint64_t full[S::kMaxStages], empty[S::kMaxStages];
  __shared__ StageInfo infos[S::kMaxStages];
  __shared__ float2 warp_stats[kConsumers][16];
  __shared__ int warp_totals[kConsumers + 2];
  // Items whose partial results are written, for the finisher.
  __shared__ uint64_t done_full[2], done_empty[2];
  __shared__ DecodeItem done_items[2];
  __shared__ DecodeItem current[kConsumers];
  __shared__ int arrived;

  const int tid = threadIdx.x, lane = tid % kWarp;
  const int warp = __shfl_sync(~0u, tid / kWarp, 0);
  if (tid == 0) {
    tensor_map_prefetch(&key_map);
    tensor_map_prefetch(&value_map);
    for (int s = 0; s < num_stages; ++s) {
      barrier_init(&full[s], 1);
      barrier_init(&empty[s], kConsumers);
    }
    for (int s = 0; s < 2; ++s) {
      barrier_init(&done_full[s], kConsumers);
      barrier_init(&done_empty[s], 1);
    }
    barrier_init_fence();
  }
  // Trigger after the wait: the prefill kernel behind relies on it (see attention.cu).
  pdl_wait();
  pdl_trigger();
  const int num_units = plan_decode<kConsumers + 2>(args, unit_ends, warp_totals);
  const int num_items = num_units * args.num_kv_heads;
  const bool busy = num_items > 2 * static_cast<int>(gridDim.x);

  int stage = 0, phase = 0;
  auto advance = [&] {
    if (++stage == num_stages) stage = 0, phase ^= 1;
  };
  if (warp == kConsumers) {
    const uint64_t policy = policy_evict_first();  // read once per step
    int item = blockIdx.x;
    while (item < num_items) {
      int ticket = 0;
      if (lane == 0) ticket = atomicAdd(args.tickets, 1);  // needed when this item has been issued
      DecodeItem x = find_decode_item(args, unit_ends, item);
      const int32_t* table = args.block_tables + static_cast<int64_t>(x.seq) * args.max_blocks;
      const int num_stages_of_item = max(1, (x.end - x.begin + S::kTokens - 1) / S::kTokens);
      // Lane b holds the id of the item's block b (mod 32): one read's latency per item, not per
      // stage.
      const int first_block = x.begin >> args.block_shift;
      const int last_block = (x.end - 1) >> args.block_shift;
      auto read_blocks = [&](int from) {
        return from + lane <= last_block && x.end > x.begin ? table[from + lane] : 0;
      };
      int blocks = read_blocks(first_block);
      for (int i = 0; i < num_stages_of_item; ++i) {
        const int position = x.begin + i * S::kTokens;
        // Lane b copies box b of the stage, if a token of it is visible.
        const int from = position + lane * box_tokens;
        const bool used =
            lane * box_tokens < S::kTokens && from < x.end && from + box_tokens > x.low;
        // Boxes of a stage never straddle a refill: stages are aligned and 32 blocks are whole
        // stages.
        const int in_item = (position >> args.block_shift) - first_block;
        if (in_item > 0 && in_item % kWarp == 0 &&
            (position & ((1 << args.block_shift) - 1)) == 0) {
          blocks = read_blocks(first_block + in_item);
        }
        const int block =
            __shfl_sync(~0u, blocks, ((from >> args.block_shift) - first_block) % kWarp);
        const int row = ((block * args.num_kv_heads + x.kv_head) << args.block_shift) +
                        (from & ((1 << args.block_shift) - 1));
        barrier_wait(&empty[stage], phase ^ 1);
        const int boxes = __popc(__ballot_sync(~0u, used));
        if (lane == 0) {
          infos[stage].item = x;
          infos[stage].position = position;
          infos[stage].first = i == 0;
          infos[stage].last = i == num_stages_of_item - 1;
          barrier_arrive_expect(&full[stage], boxes * box_tokens * D * 2 * 2);
        }
        __syncwarp();
        if (used) {
          uint8_t* to_keys = ring + stage * S::kStageBytes + lane * box_tokens * 128;
#pragma unroll
          for (int panel = 0; panel < S::kPanels; ++panel) {
            tensor_load_2d(to_keys + panel * S::kPanelBytes, &key_map, panel * 64, row,
                           &full[stage], policy);
          }
#pragma unroll
          for (int panel = 0; panel < S::kPanels; ++panel) {
            tensor_load_2d(to_keys + S::kTileBytes + panel * S::kPanelBytes, &value_map, panel * 64,
                           row, &full[stage], policy);
          }
        }
        advance();
      }
      item = gridDim.x + __shfl_sync(~0u, ticket, 0);
      // One ticket per item: the last one clears the counter for the next call.
      if (lane == 0 && ticket == num_items - 1) *args.tickets = 0;
    }
    barrier_wait(&empty[stage], phase ^ 1);
    if (lane == 0) {
      infos[stage].first = -1;
      barrier_arrive(&full[stage]);
    }
  } else if (warp == kConsumers + 1) {
    for (int use = 0;; ++use) {
      barrier_wait(&done_full[use & 1], use >> 1 & 1);
      const DecodeItem x = done_items[use & 1];
      __syncwarp();
      if (lane == 0) barrier_arrive(&done_empty[use & 1]);
      if (x.splits == 0) break;  // no more items
      bool last = false;
      if (lane == 0) last = arrive_split(args, x);
      if (__shfl_sync(~0u, last, 0)) merge_splits<T, D, kWarp>(args, x, lane);
    }
  } else {
    clear_padding<D>(args, tid, kConsumers * kWarp);
    const DecodeItem& x = current[warp];  // in shared memory: registers are short
    float out[D / 16][4];  // out^T: columns of values lane / 4, + 8; rows 2 * (lane % 4), + 1
    float largest = -INFINITY, sum = 0.f;  // of row lane / 4
    uint32_t q[D / 16][2];
    int limit = 0;     // last position that row lane / 4 sees
    int num_done = 0;  // items handed to the finisher
    // Byte offsets inside a 128-byte swizzled panel of this lane's ldmatrix rows.
    int offset[4];
    const int row16 = warp * 16 + (lane & 7) + (lane >> 4) * 8;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      offset[k] = row16 * 128 + (((k * 2 + ((lane >> 3) & 1)) ^ (lane & 7)) * 16);
    }
    auto hand_over = [&](const DecodeItem& item) {
      const int slot = num_done & 1;
      barrier_wait(&done_empty[slot], (num_done >> 1 & 1) ^ 1);
      if (tid == 0) done_items[slot] = item;
      __syncwarp();
      if (lane == 0) barrier_arrive(&done_full[slot]);
      ++num_done;
    };
    while (true) {
      barrier_wait(&full[stage], phase);
      const StageInfo& info = infos[stage];
      const int first = info.first, last = info.last, position = info.position + warp * 16;
      if (first < 0) {
        __syncwarp();
        if (lane == 0) current[warp].splits = 0;
        __syncwarp();
        hand_over(x);
        break;
      }
      if (first != 0) {
        static_assert(sizeof(DecodeItem) == 12 * 4);
        if (lane < 12) {
          reinterpret_cast<int*>(&current[warp])[lane] =
              reinterpret_cast<const int*>(&info.item)[lane];
        }
        __syncwarp();
        const int r = x.row_tile * args.tile_rows + lane / 4, t = r / args.group;
        const bool exists = r < x.num_tokens * args.group;
        limit = x.context_len - x.num_tokens + t;
        const T* query = static_cast<const T*>(args.q) +
                         (static_cast<int64_t>(x.token0 + t) * args.num_heads +
                          x.kv_head * args.group + r - t * args.group) *
                             D +
                         2 * (lane % 4);
#pragma unroll
        for (int k = 0; k < D / 16; ++k) {
          q[k][0] = exists ? *reinterpret_cast<const uint32_t*>(query + k * 16) : 0;
          q[k][1] = exists ? *reinterpret_cast<const uint32_t*>(query + k * 16 + 8) : 0;
        }
#pragma unroll
        for (int m = 0; m < D / 16; ++m) out[m][0] = out[m][1] = out[m][2] = out[m][3] = 0.f;
        largest = -INFINITY;
        sum = 0.f;
      }
      if (position < x.end && position + 16 > x.low) {
        const uint8_t* keys = ring + stage * S::kStageBytes;
        const uint8_t* values = keys + S::kTileBytes;
        float even[2][4] = {}, odd[2][4] = {};  // two chains of products each
#pragma unroll
        for (int k = 0; k < D / 16; ++k) {
          uint32_t b[4];
          ldmatrix4(b, keys + k / 4 * S::kPanelBytes + offset[k % 4]);
          const uint32_t a[4] = {q[k][0], 0, q[k][1], 0};
          mma_m16n8k16<T>(k % 2 ? odd[0] : even[0], a, b[0], b[1]);
          mma_m16n8k16<T>(k % 2 ? odd[1] : even[1], a, b[2], b[3]);
        }
        const bool edge =
            position + 15 > x.context_len - x.num_tokens || position < x.context_len - args.window;
        // Logits of row lane / 4, of tokens c, c + 1, c + 8, c + 9 with c = 2 * (lane % 4).
        float s[4] = {even[0][0] + odd[0][0], even[0][1] + odd[0][1], even[1][0] + odd[1][0],
                      even[1][1] + odd[1][1]};
        // Tokens in no use may hold NaN, which 0 would not cancel: cleared in the fragments.
        uint32_t keep0 = ~0u, keep1 = ~0u;
#pragma unroll
        for (int e = 0; e < 4; ++e) s[e] *= args.scale_log2;
        if (edge) {
          const int p = position + 2 * (lane % 4);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int token = p + (e & 1) + (e / 2) * 8;
            s[e] = token <= limit && token > limit - args.window ? s[e] : -INFINITY;
          }
          auto half = [&](int token) {
            return token >= x.low && token < x.context_len ? 0xffffu : 0u;
          };
          keep0 = half(p) | half(p + 1) << 16;
          keep1 = half(p + 8) | half(p + 9) << 16;
        }
        const float top = fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3]));
        constexpr float kSlack = 8.f;  // weights stay below 2^8: exact enough in bf16 and fp16
        const bool first_logit = largest == -INFINITY && top > -INFINITY;
        if (__any_sync(~0u, top > largest + kSlack || first_logit)) {
          const float grown = fmaxf(largest, quad_max(top));
          const float scale = weight_of(largest, grown);
          largest = grown;
          sum *= scale;
          const float scale0 = __shfl_sync(~0u, scale, lane % 4 * 8);
          const float scale1 = __shfl_sync(~0u, scale, lane % 4 * 8 + 4);
#pragma unroll
          for (int m = 0; m < D / 16; ++m) {
            out[m][0] *= scale0;
            out[m][1] *= scale1;
            out[m][2] *= scale0;
            out[m][3] *= scale1;
          }
        }
        const float base = largest == -INFINITY ? 0.f : largest;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[e] = exp2_approx(s[e] - base);
          sum += s[e];
        }
        const uint32_t weights0 = pack2<T>(s[0], s[1]), weights1 = pack2<T>(s[2], s[3]);
#pragma unroll
        for (int m = 0; m < D / 16; ++m) {
          uint32_t a[4];
          ldmatrix4_trans(a, values + m / 4 * S::kPanelBytes + offset[m % 4]);
          a[0] &= keep0, a[1] &= keep0, a[2] &= keep1, a[3] &= keep1;
          mma_m16n8k16<T>(out[m], a, weights0, weights1);
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&empty[stage]);
      advance();
      if (last != 0) {
        named_barrier_sync(1, kConsumers * kWarp);  // nobody reads the previous results any more
        const float total = quad_sum(sum);
        if (lane % 4 == 0) warp_stats[warp][lane / 4] = make_float2(largest, total);
        const int rows = tile_rows_of(args, x);
#pragma unroll
        for (int m = 0; m < D / 16; ++m) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int row = 2 * (lane % 4) + (e & 1), column = m * 16 + lane / 4 + e / 2 * 8;
            if (row < rows) {
              results[(warp * result_rows + row) * D + (column + row * 8) % D] = out[m][e];
            }
          }
        }
        named_barrier_sync(1, kConsumers * kWarp);
        merge_warps<T, D, kConsumers, kConsumers * kWarp>(args, x, tid, warp_stats, results,
                                                          result_rows);
        if (x.splits > 1) {
          if (busy) {
            hand_over(x);
          } else {  // nothing else to do: all consumers merge, which is sooner done
            named_barrier_sync(1, kConsumers * kWarp);
            if (tid == 0) arrived = arrive_split(args, x);
            named_barrier_sync(1, kConsumers * kWarp);
            if (arrived) merge_splits<T, D, kConsumers * kWarp>(args, x, tid);
          }
        }
      }
    }
  }
}

template <class T, int D>
Status run(const AttentionArgs& args, DType dtype, int64_t num_cache_rows, int num_sms,
           const Launch& launch_on) {
  using S = DecodeShape<D>;
  const int box_tokens = std::min(1 << args.block_shift, S::kTokens);
  CUtensorMap key_map, value_map;
  Status status = encode_cache(&key_map, args.key, dtype, num_cache_rows, D, box_tokens);
  if (!status.ok()) return status;
  status = encode_cache(&value_map, args.value, dtype, num_cache_rows, D, box_tokens);
  if (!status.ok()) return status;
  const int result_rows = args.partial_rows;
  const int64_t other_bytes =
      1024 + int64_t{S::kConsumers} * result_rows * D * 4 + round_up(args.num_seqs * 4, 16);
  const int num_stages = static_cast<int>(
      std::clamp<int64_t>((S::kBlockBytes - other_bytes) / S::kStageBytes, 2, S::kMaxStages));
  LaunchConfig config;
  config.grid = dim3(num_sms * S::kBlocksPerSm);
  config.block = dim3(S::kThreads);
  config.shared_bytes = num_stages * S::kStageBytes + other_bytes;
  config.stream = launch_on.stream;
  config.pdl = launch_on.pdl;
  return launch(attention_decode_sm90_kernel<T, D>, config, "paged_attention decode_sm90", key_map,
                value_map, args, box_tokens, num_stages, result_rows);
}

template <class T>
Status run_head_dim(const AttentionArgs& args, DType dtype, int head_dim, int64_t num_cache_rows,
                    int num_sms, const Launch& launch_on) {
  switch (head_dim) {
    case 64:
      return run<T, 64>(args, dtype, num_cache_rows, num_sms, launch_on);
    case 128:
      return run<T, 128>(args, dtype, num_cache_rows, num_sms, launch_on);
    case 256:
      return run<T, 256>(args, dtype, num_cache_rows, num_sms, launch_on);
  }
  return Status::error("attention_decode_sm90: head_dim " + std::to_string(head_dim) +
                       " is not supported (allowed: 64, 128, 256)");
}

}  // namespace

Status launch_attention_decode_sm90(const AttentionArgs& args, DType dtype, int head_dim,
                                    int64_t num_cache_rows, int num_sms, const Launch& launch_on) {
  return dtype == DType::kBFloat16
             ? run_head_dim<__nv_bfloat16>(args, dtype, head_dim, num_cache_rows, num_sms,
                                           launch_on)
             : run_head_dim<__half>(args, dtype, head_dim, num_cache_rows, num_sms, launch_on);
}

}  // namespace regatta::cuda
