// Attention of long spans on Hopper: wgmma with keys and values brought by the tensor copy engine.
//
// Architectures: sm_90a; bf16 and fp16; caches in any KV format; head_dim 64, 80, 96, 128, 256; and
// keys and values made of latents, 192 and 128 columns wide (latent/expanded.h).
// Algorithm
//  1. Items are (128 rows, KV head). A persistent block per multiprocessor takes them by tickets,
//     the heaviest of each span first. The last items are shared out among all blocks by their keys
//     (PrefillPlan): the last warpgroup to end its piece joins the pieces in the order of the keys.
//  2. A producer warp copies boxes of 64 columns x block_size tokens into rings of keys and values;
//     out of a quantized cache, all producer warps turn codes into values on the way.
//  3. Two warpgroups of 64 rows issue the logits of the next tile and the value product of this one
//     together, and take turns on the matrix units: softmax hides behind the other's products.
//  4. Tiles run from the last (causal mask) to the first. Slots past the context may hold NaN:
//     values are cleared in shared memory, keys are masked by selection.
// Source: FlashAttention-3 (Shah et al., 2024); ours packs the rows of a KV group and pages.
// Bound: 2 * (D + V) flops per visible (row, key); of quantized caches, making values of codes.
#pragma once

#include <algorithm>
#include <climits>

#include "attention.cuh"
#include "attention_tensor_map.cuh"
#include "cuda/cache/kv_values.cuh"
#include "cuda/wgmma.cuh"

namespace regatta::cuda {

constexpr int kLeastRangeTiles = 8;  // of keys, that are worth another block's queries and results
constexpr int kCutTiles = 4;
constexpr int kLongSpans = 3;        // contexts of more spans are long
constexpr int kLeastIdleTiles = 16;  // of a block at the end, that are worth the joining of pieces

// V: columns of values. Fewer than D: the last D - V of a key are all heads' (2. above).
template <int D, KvFormat kFormat, int V>
struct PrefillShape {
  static constexpr bool kDense = kFormat == KvFormat::kDense;
  static constexpr bool kExpanded = V < D;
  static_assert(!kExpanded || (kDense && V % 64 == 0 && D % 64 == 0));
  static constexpr int kRows = 128;                 // 64 per consumer warpgroup
  static constexpr int kKeys = V > 128 ? 64 : 128;  // per tile
  static constexpr int kPanels = (D + 63) / 64;     // of 64 columns, 128 bytes per row
  static constexpr int kValuePanels = (V + 63) / 64;
  static constexpr int kStages = 2;
  static constexpr int kThreads = 384;
  // Threads that bring queries; over quantized caches they fill keys and values, too.
  static constexpr int kLoaders = kDense ? 96 : 128;
  static constexpr int kFillers = kDense ? 1 : 128;  // arrivals that fill a stage
  static constexpr int kQueryPanel = kRows * 128, kTilePanel = kKeys * 128;
  static constexpr int kQueryBytes = kPanels * kQueryPanel;
  static constexpr int kTileBytes = kPanels * kTilePanel;  // of keys
  static constexpr int kValueBytes = kValuePanels * kTilePanel;
  static constexpr int kQueryStages = D > 128 ? 1 : 2;  // what fits
  // Codes on their way: two tiles, and the scales of three.
  static constexpr int kRowBytes = kDense ? 0 : kFormat == KvFormat::kInt4 ? D / 2 : D;
  static constexpr int kCodeBytes = kKeys * kRowBytes;
  static constexpr int kScaleBytes =
      has_token_scales(kFormat) ? kKeys * scale_floats(kFormat) * 4 : 0;
  static constexpr int kSharedBytes = kQueryStages * kQueryBytes +
                                      kStages * (kTileBytes + kValueBytes) + 2 * kCodeBytes +
                                      3 * kScaleBytes + 1024;  // 1024 to align
};

// An item as the producer found it, or a piece of one.
struct PrefillItem {
  PrefillTile tile;
  int kv_head;     // -1: no more items
  int begin, end;  // key tiles of the piece, from the last one on
  int shared;      // which of the items that are shared out; -1: none, the piece is all of it
  int slot;        // of the piece's results in the workspace
};

// What all roles derive from an item. last_own: where its last row stands. low, low_end: what its
// first row sees.
struct PrefillRange {
  int num_rows, row_begin, before, last_own, low, low_end, tile_first, tile_last, num_tiles;

  template <int kRows, int kKeys>
  static __device__ __forceinline__ PrefillRange of(const AttentionArgs& args,
                                                    const PrefillTile& tile) {
    PrefillRange r;
    r.num_rows = tile.num_tokens * args.group;
    r.row_begin = tile.tile * kRows;
    const int row_end = min(r.row_begin + kRows, r.num_rows);
    r.before = tile.context_len - tile.num_tokens;
    const int first_own = r.before + token_of_row(args, r.row_begin);
    r.last_own = r.before + token_of_row(args, row_end - 1);
    r.low = max(0, first_own - args.window + 1);
    r.low_end = last_visible(first_own, tile.common, args.window) + 1;
    r.tile_first = r.low / kKeys;
    r.tile_last = last_visible(r.last_own, tile.common, args.window) / kKeys;
    r.num_tiles = r.tile_last - r.tile_first + 1;
    return r;
  }
  template <int kRows, int kKeys>
  static __device__ __forceinline__ PrefillRange of(const AttentionArgs& args,
                                                    const PrefillItem& item) {
    PrefillRange r = of<kRows, kKeys>(args, item.tile);
    r.tile_last -= item.begin;
    r.num_tiles = item.end - item.begin;
    r.tile_first = r.tile_last - r.num_tiles + 1;
    return r;
  }
};

// What the blocks take by tickets, in this order: whole items, then ranges of the others, which are
// fewer than blocks. A range is as much as num_shared / num_ranges items, the end of one and the
// beginning of the next at times, so that all blocks end together.
struct PrefillPlan {
  int num_whole, num_shared, num_ranges;

  // first_tiles: key tiles of the first item that may be shared.
  static __device__ __forceinline__ PrefillPlan of(int num_items, int first_tiles, bool shares) {
    const int blocks = gridDim.x, rest = num_items % blocks;
    PrefillPlan plan = {num_items, 0, 0};
    // Joining pieces costs more than where blocks idle for a few tiles alone.
    if (shares && rest > 0 && (blocks - rest) * first_tiles >= kLeastIdleTiles * blocks) {
      plan.num_ranges = min(blocks, rest * first_tiles / kLeastRangeTiles);
      if (plan.num_ranges > rest) {
        plan.num_whole = num_items - rest, plan.num_shared = rest;
      } else {
        plan.num_ranges = 0;
      }
    }
    return plan;
  }
  // Where `range` begins in shared item `item` of num_tiles tiles: 0 or num_tiles beyond its ends.
  __device__ __forceinline__ int cut(int range, int item, int num_tiles) const {
    const int at = range * num_shared - item * num_ranges;  // in num_ranges of an item
    if (at <= 0) return 0;
    if (at >= num_ranges) return num_tiles;
    const int tile = at * num_tiles / num_ranges / kCutTiles * kCutTiles;
    return num_tiles - tile < kCutTiles ? num_tiles : tile;
  }
  __device__ __forceinline__ int first_range(int item) const {
    return item * num_ranges / num_shared;
  }
  __device__ __forceinline__ int first_item(int range) const {
    return range * num_shared / num_ranges;
  }
  // Of a piece, among less than num_shared + num_ranges.
  static __device__ __forceinline__ int slot(int range, int item) { return range + item; }
};

// Barriers that let consumer warpgroup 0 or 1 issue its products, and those of one warpgroup alone.
constexpr int kTurnBarrier = 1;   // + consumer
constexpr int kGroupBarrier = 3;  // + consumer

constexpr int kFillBarrier = 5;

// kBytes (4, 8 or 16) of a cache, or zeros where the source is not valid.
template <int kBytes>
__device__ __forceinline__ void copy_code(void* shared, const void* global, bool valid) {
#ifdef REGATTA_SM90A
  if constexpr (kBytes == 16) {
    cp_async16(shared, global, valid ? 16 : 0);
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)),
                 "l"(global), "n"(kBytes), "r"(valid ? kBytes : 0)
                 : "memory");
  }
#endif
}

// Fills the ring with an item's keys and values out of a quantized cache, by 128 threads. Codes are
// copied two tiles ahead into `codes`, where each thread finds again what it copied; from there
// they become values of T in the ring, finite ones where no token is used. Keys run one tile ahead
// of values. `filled`: tiles of keys so far, of which it returns the new count.
template <class T, int D, KvFormat kFormat>
__device__ __forceinline__ int fill_tiles(const AttentionArgs& args, PrefillItem item, int filled,
                                          uint8_t* keys, uint8_t* values, uint8_t* codes,
                                          uint64_t* key_full, uint64_t* key_empty,
                                          uint64_t* value_full, uint64_t* value_empty) {
  using S = PrefillShape<D, kFormat, D>;
  constexpr int kKeys = S::kKeys, kBytes = S::kRowBytes % 16 == 0 ? 16 : 8;  // at a time
  constexpr int kRowPieces = S::kRowBytes / kBytes, kPieces = kKeys * kRowPieces / 128;
  constexpr int kWords = kBytes / 4, kVectors = kFormat == KvFormat::kInt4 ? kWords : kWords / 2;
  constexpr int kScales = scale_floats(kFormat);
  static_assert(kPieces * 128 == kKeys * kRowPieces);
  const int tid = threadIdx.x;
  const PrefillTile tile = item.tile;
  const int kv_head = item.kv_head;
  const PrefillRange r = PrefillRange::of<S::kRows, kKeys>(args, item);
  const int32_t* const table = args.block_tables + static_cast<int64_t>(tile.seq) * args.max_blocks;
  uint8_t* const scales = codes + 2 * S::kCodeBytes;
  const int num_steps = 2 * r.num_tiles;
  // Step 0 is the keys of tile 0; then keys of i and values of i - 1 take turns.
  auto is_value = [&](int step) { return (step % 2 == 0 && step > 0) || step == num_steps - 1; };
  auto tile_of = [&](int step) {
    if (step == num_steps - 1) return r.num_tiles - 1;
    return is_value(step) ? step / 2 - 1 : (step + 1) / 2;
  };
  auto seen = [&](int position) { return position >= r.low && position < tile.context_len; };
  auto row_at = [&](int position) {  // in the cache
    return ((static_cast<int64_t>(table[position >> args.block_shift]) * args.num_kv_heads +
             kv_head)
            << args.block_shift) +
           (position & ((1 << args.block_shift) - 1));
  };
  auto fetch = [&](int step) {
    if (step < num_steps) {
      const bool value = is_value(step);
      const int first = (r.tile_last - tile_of(step)) * kKeys;
      const auto* const from = static_cast<const uint8_t*>(value ? args.value : args.key);
      uint8_t* const to = codes + step % 2 * S::kCodeBytes;
#pragma unroll
      for (int g = 0; g < kPieces; ++g) {
        const int index = tid + 128 * g, position = first + index / kRowPieces;
        const bool valid = seen(position);
        const int64_t row = valid ? row_at(position) : 0;
        copy_code<kBytes>(to + index * kBytes,
                          from + row * S::kRowBytes + index % kRowPieces * kBytes, valid);
      }
      if constexpr (has_token_scales(kFormat)) {
        if (tid < kKeys) {
          const bool valid = seen(first + tid);
          const int64_t row = valid ? row_at(first + tid) : 0;
          copy_code<kScales * 4>(scales + step % 3 * S::kScaleBytes + tid * kScales * 4,
                                 (value ? args.value_scale : args.key_scale) + row * kScales,
                                 valid);
        }
      }
    }
    cp_async_commit();
  };
  fetch(0);
  fetch(1);
  for (int step = 0; step < num_steps; ++step) {
    const bool value = is_value(step);
    const int use = filled + tile_of(step), stage = use % S::kStages;
    uint8_t* const to = (value ? values : keys) + stage * S::kTileBytes;
    float2 head_scale = make_float2(0.f, 0.f);
    if (!has_token_scales(kFormat)) {
      head_scale.x = (value ? args.value_scale : args.key_scale)[kv_head];
    }
    cp_async_wait<1>();
    if (has_token_scales(kFormat)) named_barrier_sync(kFillBarrier, 128);
    barrier_wait(value ? &value_empty[stage] : &key_empty[stage], (use / S::kStages & 1) ^ 1);
    const uint8_t* const from = codes + step % 2 * S::kCodeBytes;
    const auto* const row_scales =
        reinterpret_cast<const float*>(scales + step % 3 * S::kScaleBytes);
#pragma unroll
    for (int g = 0; g < kPieces; ++g) {
      const int index = tid + 128 * g;
      const int row = index / kRowPieces, first = index % kRowPieces * kVectors;
      float2 scale = head_scale;
      if constexpr (kFormat == KvFormat::kInt4) {
        scale = reinterpret_cast<const float2*>(row_scales)[row];
      } else if constexpr (has_token_scales(kFormat)) {
        scale.x = row_scales[row];
      }
      uint32_t words[kWords];
      if constexpr (kBytes == 16) {
        const uint4 x = *reinterpret_cast<const uint4*>(from + index * kBytes);
        words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
      } else {
        const uint2 x = *reinterpret_cast<const uint2*>(from + index * kBytes);
        words[0] = x.x, words[1] = x.y;
      }
      uint4 x[kVectors];
      dequantize<T, kFormat>(words, scale, x);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int vector = first + v;
        *reinterpret_cast<uint4*>(to + vector / 8 * S::kTilePanel + row * 128 +
                                  ((vector ^ row) & 7) * 16) = x[v];
      }
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    barrier_arrive(value ? &value_full[stage] : &key_full[stage]);
    fetch(step + 2);
  }
  cp_async_wait<0>();
  return filled + r.num_tiles;
}

struct PrefillMaps {
  CUtensorMap key, value;
  CUtensorMap shared_key;  // of the columns that are all heads', else unused
};

// kShaped: with a soft cap or slopes.
template <class T, int D, int V, KvFormat kFormat, bool kShaped>
__global__ void __launch_bounds__(PrefillShape<D, kFormat, V>::kThreads, 1)
    attention_prefill_sm90_kernel(const __grid_constant__ PrefillMaps maps,
                                  const AttentionArgs args, int box_tokens) {
#ifdef REGATTA_SM90A
  using S = PrefillShape<D, kFormat, V>;
  constexpr int kKeys = S::kKeys;
  extern __shared__ uint8_t raw[];
  uint8_t* const shared = raw + (1024 - shared_address(raw) % 1024) % 1024;
  uint8_t* const keys = shared + S::kQueryStages * S::kQueryBytes;
  uint8_t* const values = keys + S::kStages * S::kTileBytes;
  [[maybe_unused]] uint8_t* const codes = values + S::kStages * S::kValueBytes;
  __shared__ uint64_t key_full[S::kStages], key_empty[S::kStages];
  __shared__ uint64_t value_full[S::kStages], value_empty[S::kStages];
  __shared__ uint64_t item_full[S::kQueryStages], query_full[S::kQueryStages];
  __shared__ uint64_t query_empty[S::kQueryStages];
  __shared__ PrefillItem items[S::kQueryStages];
  __shared__ PrefillPlan plan;  // of the warp that finds items, and of who joins their pieces
  __shared__ bool joins[2];     // of each consumer: whether it was the last to end a piece

  const int tid = threadIdx.x, lane = tid % kWarp;
  const int warpgroup = __shfl_sync(~0u, tid / 128, 0);

  // As in the sm80 kernel: no wait in front (unless alone), see attention.cu.
  pdl_trigger();
  if (tid == 0) {
    if (S::kDense) {
      tensor_map_prefetch(&maps.key);
      tensor_map_prefetch(&maps.value);
    }
    for (int s = 0; s < S::kStages; ++s) {
      barrier_init(&key_full[s], S::kFillers);
      barrier_init(&value_full[s], S::kFillers);
      barrier_init(&key_empty[s], 8);  // consumer warps
      barrier_init(&value_empty[s], 8);
    }
    for (int s = 0; s < S::kQueryStages; ++s) {
      barrier_init(&item_full[s], 1);
      barrier_init(&query_full[s], S::kLoaders);
      barrier_init(&query_empty[s], 8);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (S::kExpanded) pdl_wait();
  if (args.prefill_alone) {
    pdl_wait();
    const int64_t row = static_cast<int64_t>(args.num_heads) * D;
    for (int64_t i = args.cu_seqlens_q[args.num_seqs] * row / 8 +
                     static_cast<int64_t>(blockIdx.x) * S::kThreads + tid;
         i < args.num_tokens * row / 8; i += static_cast<int64_t>(gridDim.x) * S::kThreads) {
      static_cast<uint4*>(args.out)[i] = make_uint4(0, 0, 0, 0);  // padding
    }
  }

  if (warpgroup == 0) {
    if constexpr (S::kDense) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    } else {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
    }
    if (S::kDense && tid < kWarp) {
      const uint64_t policy = policy_evict_last();  // other row tiles read the same keys soon
      int tiles_done = 0;
      for (int n = 0;; ++n) {
        const int slot = n % S::kQueryStages;
        barrier_wait(&item_full[slot], n / S::kQueryStages & 1);
        const PrefillTile tile = items[slot].tile;
        const int kv_head = items[slot].kv_head;
        if (kv_head < 0) break;
        const PrefillRange r = PrefillRange::of<S::kRows, kKeys>(args, items[slot]);
        const int32_t* table = args.block_tables + static_cast<int64_t>(tile.seq) * args.max_blocks;
        // Lane b copies box b of tile j, if it holds a token that may be visible. What is not
        // copied stays as it is, and is masked.
        auto row_of_box = [&](int j) {
          const int p = j * kKeys + lane * box_tokens;
          if (lane * box_tokens >= kKeys || p >= tile.context_len || p + box_tokens <= r.low)
            return -1;
          if constexpr (S::kExpanded) return args.block_tables[tile.seq] + p;
          return ((table[p >> args.block_shift] * args.num_kv_heads + kv_head)
                  << args.block_shift) +
                 (p & ((1 << args.block_shift) - 1));
        };
        // from(panel): where it lies.
        auto copy = [&](auto from, int panels, uint8_t* to, int row, uint64_t* full,
                        uint64_t* empty, int use) {
          barrier_wait(empty, (use & 1) ^ 1);
          const int boxes = __popc(__ballot_sync(~0u, row >= 0));
          if (lane == 0) barrier_arrive_expect(full, boxes * box_tokens * panels * 128);
          __syncwarp();
          if (row >= 0) {
#pragma unroll
            for (int panel = 0; panel < panels; ++panel) {
              const auto [map, column] = from(panel);
              tensor_load_2d(to + panel * S::kTilePanel + lane * box_tokens * 128, map, column, row,
                             full, policy);
            }
          }
        };
        struct Source {
          const CUtensorMap* map;
          int column;
        };
        auto key_source = [&](int panel) -> Source {
          if constexpr (S::kExpanded) {
            if (panel >= S::kValuePanels) return {&maps.shared_key, panel * 64 - V};
            return {&maps.key, kv_head * V + panel * 64};
          }
          return {&maps.key, panel * 64};
        };
        auto value_source = [&](int panel) -> Source {
          return {&maps.value, (S::kExpanded ? kv_head * V : 0) + panel * 64};
        };
        int row = row_of_box(r.tile_last), value_row = -1;
        for (int i = 0; i <= r.num_tiles; ++i) {  // keys run one tile ahead of values
          const int next = i + 1 < r.num_tiles ? row_of_box(r.tile_last - i - 1) : -1;
          if (i < r.num_tiles) {
            const int at = tiles_done + i, s = at % S::kStages;
            copy(key_source, S::kPanels, keys + s * S::kTileBytes, row, &key_full[s], &key_empty[s],
                 at / S::kStages);
          }
          if (i > 0) {
            const int at = tiles_done + i - 1, s = at % S::kStages;
            copy(value_source, S::kValuePanels, values + s * S::kValueBytes, value_row,
                 &value_full[s], &value_empty[s], at / S::kStages);
          }
          value_row = row;
          row = next;
        }
        tiles_done += r.num_tiles;
      }
    } else {
      const int loader = tid - (128 - S::kLoaders);
      const int64_t token_stride = static_cast<int64_t>(args.num_heads) * D;
      // One warp finds items: units are whole ones, then ranges.
      int unit = blockIdx.x, ticket = -1, next_item = 0;
      auto find = [&](int item, PrefillItem* found) {
        PrefillTile tile = {};
        find_prefill_tile<S::kRows>(args, item / args.num_kv_heads, &tile);
        int kv_head = item % args.num_kv_heads;
        // Behind a long context, head by head: what all blocks read together fits L2 longer, and
        // the tiles of a span are about as heavy.
        if (tile.context_len > kLongSpans * tile.num_tokens) {
          const int tiles = (tile.num_tokens * args.group + S::kRows - 1) / S::kRows;
          const int at = (tiles - 1 - tile.tile) * args.num_kv_heads + kv_head;
          kv_head = at / tiles;
          tile.tile = tiles - 1 - at % tiles;
        }
        found->tile = tile;
        found->kv_head = kv_head;
        found->begin = 0;
        found->end = PrefillRange::of<S::kRows, kKeys>(args, tile).num_tiles;
        found->shared = -1;
      };
      if (loader < kWarp) {
        PrefillTile none;
        int total = 0;
        find_prefill_tile<S::kRows>(args, INT_MAX, &none, &total);
        const int num_items = total * args.num_kv_heads;
        PrefillItem first = {};
        if (args.shares_prefill) find(num_items - num_items % gridDim.x, &first);
        const PrefillPlan made = PrefillPlan::of(num_items, first.end, args.shares_prefill);
        if (lane == 0) plan = made;
        __syncwarp();
      }
      [[maybe_unused]] int filled = 0;  // tiles of keys (and of values)
      for (int n = 0;; ++n) {
        const int slot = n % S::kQueryStages;
        // As early as there is room for their queries.
        if (loader < kWarp) {
          PrefillItem found = {};
          do {
            if (unit < 0) {
              if (lane == 0) ticket = atomicAdd(args.tickets + 1, 1);
              ticket = __shfl_sync(~0u, ticket, 0);
              unit = gridDim.x + ticket;
            }
            const int range = unit - plan.num_whole;
            if (range >= plan.num_ranges) {
              found.kv_head = -1;
              // One ticket per unit: the last one clears the counter for the next call.
              if (lane == 0 && ticket == plan.num_whole + plan.num_ranges - 1) args.tickets[1] = 0;
              break;
            }
            if (range < 0) {
              find(unit, &found);
              unit = -1;
            } else {
              const int item = max(next_item, plan.first_item(range));
              find(plan.num_whole + item, &found);
              const int num_tiles = found.end;
              found.begin = plan.cut(range, item, num_tiles);
              found.end = plan.cut(range + 1, item, num_tiles);
              found.slot = PrefillPlan::slot(range, item);
              if (found.end - found.begin < num_tiles) found.shared = item;
              next_item = item + 1;
              if (next_item * plan.num_ranges >= (range + 1) * plan.num_shared) unit = -1;
            }
          } while (found.begin == found.end);
          barrier_wait(&query_empty[slot], (n / S::kQueryStages & 1) ^ 1);
          if (lane == 0) {
            items[slot] = found;
            barrier_arrive(&item_full[slot]);
          }
        }
        barrier_wait(&item_full[slot], n / S::kQueryStages & 1);
        const PrefillTile tile = items[slot].tile;
        const int kv_head = items[slot].kv_head;
        if (kv_head >= 0) {
          const T* q = static_cast<const T*>(args.q) + tile.token0 * token_stride +
                       static_cast<int64_t>(kv_head) * args.group * D;
          [[maybe_unused]] const int64_t first_row =  // of head-major queries, in their two parts
              static_cast<int64_t>(kv_head) * args.num_tokens + tile.token0;
          if (S::kExpanded) q = static_cast<const T*>(args.q) + first_row * V;
          [[maybe_unused]] const T* const shared_q =
              static_cast<const T*>(args.shared_q) + first_row * (D - V);
          const int num_rows = tile.num_tokens * args.group, row_begin = tile.tile * S::kRows;
          for (int i = loader; i < S::kRows * (D / 8); i += S::kLoaders) {
            const int row = i / (D / 8), unit = i % (D / 8);
            const int r = row_begin + row, t = token_of_row(args, r);
            const T* source = q;
            if (r < num_rows) {
              if constexpr (S::kExpanded) {
                source = unit < V / 8
                             ? q + static_cast<int64_t>(r) * V + unit * 8
                             : shared_q + static_cast<int64_t>(r) * (D - V) + (unit * 8 - V);
              } else {
                source = q + t * token_stride + (r - t * args.group) * D + unit * 8;
              }
            }
            cp_async16(shared + slot * S::kQueryBytes + unit / 8 * S::kQueryPanel + row * 128 +
                           ((unit ^ row) & 7) * 16,
                       source, r < num_rows ? 16 : 0);
          }
          cp_async_commit();
          cp_async_wait<0>();
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        }
        barrier_arrive(&query_full[slot]);
        if (kv_head < 0) break;
        if constexpr (!S::kDense) {
          filled = fill_tiles<T, D, kFormat>(args, items[slot], filled, keys, values, codes,
                                             key_full, key_empty, value_full, value_empty);
        }
      }
    }
  } else {
    if constexpr (S::kDense) {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
    }
    const int consumer = warpgroup - 1, thread = tid % 128, warp = thread / kWarp;
    const int64_t token_stride = static_cast<int64_t>(args.num_heads) * V;
    if (consumer == 1) named_barrier_arrive(kTurnBarrier, 256);  // warpgroup 0 goes first
    // The item whose logits are computed, and its rows of this thread.
    int slot = 0;
    PrefillRange range;
    int own[2];  // where they stand
    [[maybe_unused]] float slopes[2];
    auto logit_unit = [&] { return kShaped ? 1.f : args.scale_log2; };  // of what s is then
    float largest[2], sum[2], rescale[2];
    float s[kKeys / 2], out[V / 2];
    uint32_t p[kKeys / 16][4];
    int at = 0;  // tiles whose logits have been asked for, over all items

    auto start = [&](int n) {  // false: there is no item n
      slot = n % S::kQueryStages;
      barrier_wait(&query_full[slot], n / S::kQueryStages & 1);
      if (items[slot].kv_head < 0) return false;
      range = PrefillRange::of<S::kRows, kKeys>(args, items[slot]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = range.row_begin + consumer * 64 + warp * 16 + lane / 4 + h * 8;
        own[h] = range.before + token_of_row(args, r);
        if constexpr (kShaped) {
          slopes[h] = slope_of(args, items[slot].kv_head * args.group + r % args.group);
        }
        largest[h] = -INFINITY;
        sum[h] = 0.f;
      }
      return true;
    };
    // 16-byte unit of a row of a query tile, with the 128-byte swizzle.
    auto query_unit = [&](int row, int unit) {
      return shared + slot * S::kQueryBytes + unit / 8 * S::kQueryPanel +
             (consumer * 64 + row) * 128 + ((unit ^ row) & 7) * 16;
    };
    const uint64_t query_descriptor = wgmma_descriptor(shared + consumer * 64 * 128);
    const uint64_t key_descriptor = wgmma_descriptor(keys);
    const uint64_t value_descriptor = wgmma_descriptor_rows(values, S::kTilePanel);
    auto issue_logits = [&](int stage) {
      const uint64_t q0 = query_descriptor + slot * (S::kQueryBytes >> 4);
      const uint64_t k0 = key_descriptor + stage * (S::kTileBytes >> 4);
#pragma unroll
      for (int k = 0; k < D / 16; ++k) {
        Wgmma<T, kKeys>::run(s, q0 + k / 4 * (S::kQueryPanel >> 4) + k % 4 * 2,
                             k0 + k / 4 * (S::kTilePanel >> 4) + k % 4 * 2, k > 0);
      }
      wgmma_commit();
    };
    auto issue_values = [&](int stage) {
      const uint64_t v0 = value_descriptor + stage * (S::kValueBytes >> 4);
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k) {
        WgmmaRows<T, V>::run(out, p[k], v0 + k * (16 * 128 >> 4), 1);
      }
      wgmma_commit();
    };
    auto clear_unused_values = [&](int stage, int j, int context_len) {  // of key tile j
      if constexpr (S::kDense) {                                         // else zeros already
        const int low = range.low - j * kKeys, high = context_len - j * kKeys;
        if (low <= 0 && high >= kKeys) return;
        for (int i = thread; i < S::kValueBytes / 16; i += 128) {
          const int row = i / 8 % kKeys;  // panel after panel, units of a row side by side
          if (row < low || row >= high) {
            *reinterpret_cast<uint4*>(values + stage * S::kValueBytes + i * 16) =
                make_uint4(0, 0, 0, 0);
          }
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        named_barrier_sync(kGroupBarrier + consumer, 128);
      }
    };
    auto softmax = [&](int j) {  // s becomes weights of key tile j
      if constexpr (kShaped) {
        const int first = j * kKeys + 2 * (lane % 4);
        const int distances[2] = {first - own[0], first - own[1]};
        shape_logits<kKeys / 2>(args, slopes, distances, [&](int i) -> float& { return s[i]; });
      }
      if ((j + 1) * kKeys > range.low_end || j * kKeys <= range.last_own - args.window) {
        const int common = items[slot].tile.common;
        const int last[2] = {last_visible(own[0], common, args.window),
                             last_visible(own[1], common, args.window)};
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) {
          const int position = j * kKeys + i / 4 * 8 + 2 * (lane % 4) + (i & 1);
          const int h = i / 2 & 1;
          if (position > last[h] || position <= own[h] - args.window) s[i] = -INFINITY;
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float top = largest[h];
#pragma unroll
        for (int i = 0; i < kKeys / 8; ++i)
          top = fmaxf(top, fmaxf(s[4 * i + 2 * h], s[4 * i + 2 * h + 1]));
        top = quad_max(top);
        const float base = top == -INFINITY ? 0.f : top * logit_unit();
        // 1 where it stays: a tile of which the row sees nothing changes nothing.
        rescale[h] = top == largest[h] ? 1.f : exp2_approx(fmaf(largest[h], logit_unit(), -base));
        largest[h] = top;
        float part = 0.f;
#pragma unroll
        for (int i = 0; i < kKeys / 8; ++i) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[4 * i + 2 * h + e];
            x = exp2_approx(fmaf(x, logit_unit(), -base));
            part += x;
          }
        }
        sum[h] = fmaf(sum[h], rescale[h], part);
      }
    };
    auto pack_weights = [&]() {
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) p[k][i] = pack2<T>(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
      }
    };
    auto release = [&](uint64_t* barrier) {
      if (lane == 0) barrier_arrive(barrier);
    };
    // Joins this warpgroup's results of a shared item with those of the other pieces, or leaves
    // them to who ends last and returns false.
    auto join = [&](const PrefillItem& item) {
      constexpr int kFloats = V / 2 + 4;  // of a thread
      auto results = [&](int slot) {
        return args.partial_out + (static_cast<int64_t>(slot * 2 + consumer) * kFloats) * 128 +
               thread;
      };
      {
        float* const to = results(item.slot);
#pragma unroll
        for (int i = 0; i < V / 2; ++i) __stcg(to + i * 128, out[i]);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          __stcg(to + (V / 2 + h) * 128, largest[h]);
          __stcg(to + (V / 2 + 2 + h) * 128, sum[h]);
        }
      }
      __threadfence();
      named_barrier_sync(kGroupBarrier + consumer, 128);
      const int num_tiles = PrefillRange::of<S::kRows, kKeys>(args, item.tile).num_tiles;
      if (thread == 0) {  // counts the tiles that are done
        int* const counter = args.counters + item.shared * 2 + consumer;
        const int tiles = item.end - item.begin;
        joins[consumer] = atomicAdd(counter, tiles) + tiles == num_tiles;
        if (joins[consumer]) *counter = 0;  // for the next call
        __threadfence();
      }
      named_barrier_sync(kGroupBarrier + consumer, 128);
      if (!joins[consumer]) return false;
      float top[2] = {-INFINITY, -INFINITY};
      auto each_piece = [&](auto use) {
        int end = 0;
        for (int r = plan.first_range(item.shared); end < num_tiles; ++r) {
          const int begin = end;
          end = plan.cut(r + 1, item.shared, num_tiles);
          if (begin < end) use(results(PrefillPlan::slot(r, item.shared)));
        }
      };
      each_piece([&](const float* from) {
#pragma unroll
        for (int h = 0; h < 2; ++h) top[h] = fmaxf(top[h], __ldcg(from + (V / 2 + h) * 128));
      });
#pragma unroll
      for (int i = 0; i < V / 2; ++i) out[i] = 0.f;
      sum[0] = sum[1] = 0.f;
      each_piece([&](const float* from) {
        float weight[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float base = top[h] == -INFINITY ? 0.f : top[h] * logit_unit();
          weight[h] = exp2_approx(fmaf(__ldcg(from + (V / 2 + h) * 128), logit_unit(), -base));
          sum[h] = fmaf(weight[h], __ldcg(from + (V / 2 + 2 + h) * 128), sum[h]);
        }
#pragma unroll
        for (int i = 0; i < V / 2; ++i) {
          out[i] = fmaf(weight[i / 2 & 1], __ldcg(from + i * 128), out[i]);
        }
      });
      largest[0] = top[0], largest[1] = top[1];
      return true;
    };
    // Writes out, through this warpgroup's rows of the query tile, so that stores are 16 bytes.
    auto finish = [&]() {
      const PrefillTile tile = items[slot].tile;
      const int kv_head = items[slot].kv_head;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = warp * 16 + lane / 4 + h * 8;
        const int r = tile.tile * S::kRows + consumer * 64 + row;
        const int head = kv_head * args.group + r - token_of_row(args, r) * args.group;
        const float total = sum_with_sink(args, quad_sum(sum[h]), largest[h] * logit_unit(), head);
        const float scale = total > 0.f ? 1.f / total : 0.f;
#pragma unroll
        for (int n = 0; n < V / 8; ++n) {
          *reinterpret_cast<uint32_t*>(query_unit(row, n) + lane % 4 * 4) =
              pack2<T>(out[4 * n + 2 * h] * scale, out[4 * n + 2 * h + 1] * scale);
        }
      }
      __syncwarp();  // a warp's rows are its own
      const int num_rows = tile.num_tokens * args.group;
      T* const destination = static_cast<T*>(args.out) + tile.token0 * token_stride +
                             static_cast<int64_t>(kv_head) * args.group * V;
#pragma unroll 4
      for (int i = lane; i < 16 * (V / 8); i += kWarp) {
        const int row = warp * 16 + i / (V / 8), unit = i % (V / 8);
        const int r = tile.tile * S::kRows + consumer * 64 + row, t = token_of_row(args, r);
        if (r < num_rows) {
          *reinterpret_cast<uint4*>(destination + t * token_stride + (r - t * args.group) * V +
                                    unit * 8) = *reinterpret_cast<uint4*>(query_unit(row, unit));
        }
      }
      __syncwarp();
      release(&query_empty[slot]);
    };

    for (int item = 0; start(item); ++item) {
#pragma unroll
      for (int i = 0; i < V / 2; ++i) out[i] = 0.f;
      barrier_wait(&key_full[at % S::kStages], at / S::kStages & 1);
      wgmma_pin(s);
      wgmma_fence();
      issue_logits(at % S::kStages);
      wgmma_wait<0>();
      wgmma_pin(s);
      release(&key_empty[at % S::kStages]);
      softmax(range.tile_last);
      pack_weights();
      ++at;

      const int context_len = items[slot].tile.context_len;
      for (int i = 1; i < range.num_tiles; ++i, ++at) {
        const int stage = at % S::kStages, value_stage = (at - 1) % S::kStages;
        barrier_wait(&key_full[stage], at / S::kStages & 1);
        named_barrier_sync(kTurnBarrier + consumer, 256);
        wgmma_pin(s);
        wgmma_pin(out);
        wgmma_fence();
        issue_logits(stage);
        barrier_wait(&value_full[value_stage], (at - 1) / S::kStages & 1);
        clear_unused_values(value_stage, range.tile_last - i + 1, context_len);
        issue_values(value_stage);
        named_barrier_arrive(kTurnBarrier + (consumer ^ 1), 256);
        wgmma_wait<1>();
        wgmma_pin(s);
        release(&key_empty[stage]);
        softmax(range.tile_last - i);
        wgmma_wait<0>();
        wgmma_pin(out);
        release(&value_empty[value_stage]);
        if (__any_sync(~0u, rescale[0] != 1.f || rescale[1] != 1.f)) {  // rare in late tiles
#pragma unroll
          for (int n = 0; n < V / 2; ++n) out[n] *= rescale[n / 2 & 1];
        }
        pack_weights();
      }
      const int value_stage = (at - 1) % S::kStages;
      barrier_wait(&value_full[value_stage], (at - 1) / S::kStages & 1);
      clear_unused_values(value_stage, range.tile_first, context_len);
      wgmma_pin(out);
      wgmma_fence();
      issue_values(value_stage);
      wgmma_wait<0>();
      wgmma_pin(out);
      release(&value_empty[value_stage]);
      if (items[slot].shared < 0 || join(items[slot])) {
        finish();
      } else {
        release(&query_empty[slot]);
      }
    }
  }
  pdl_wait();  // this grid's end implies the decode kernel's
#else
  wrong_architecture();
#endif
}

// Of a kernel's blocks and of memory that they share.
template <class S, class Kernel>
Status launch_prefill(Kernel kernel, const PrefillMaps& maps, const AttentionArgs& args,
                      int box_tokens, int num_sms, const Launch& launch_on) {
  const int64_t tiles = ceil_div(int64_t{args.num_tokens} * args.group, S::kRows) + args.num_seqs;
  const int64_t blocks = std::min(num_sms, kMaxMultiprocessors);
  return launch(
      kernel,
      {launch_on, args.shares_prefill ? blocks : std::min(tiles * args.num_kv_heads, blocks),
       S::kThreads, S::kSharedBytes},
      "paged_attention prefill_sm90", maps, args, box_tokens);
}

// num_cache_rows: num_blocks * Hkv * block_size.
template <class T, int D, KvFormat kFormat>
Status run_attention_prefill_sm90(const AttentionArgs& args, int64_t num_cache_rows, int num_sms,
                                  const Launch& launch_on) {
  using S = PrefillShape<D, kFormat, D>;
  const int box_tokens = std::min(1 << args.block_shift, S::kKeys);
  PrefillMaps maps = {};
  if constexpr (S::kDense) {
    constexpr DType dtype = Traits<T>::dtype;
    REGATTA_RETURN_IF_ERROR(
        encode_cache(&maps.key, args.key, dtype, num_cache_rows, D, box_tokens));
    REGATTA_RETURN_IF_ERROR(
        encode_cache(&maps.value, args.value, dtype, num_cache_rows, D, box_tokens));
  }
  auto* const kernel = shapes_scores(args) ? attention_prefill_sm90_kernel<T, D, D, kFormat, true>
                                           : attention_prefill_sm90_kernel<T, D, D, kFormat, false>;
  return launch_prefill<S>(kernel, maps, args, box_tokens, num_sms, launch_on);
}

}  // namespace regatta::cuda
