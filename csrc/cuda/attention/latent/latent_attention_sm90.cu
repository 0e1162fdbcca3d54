// Attention over latents of a paged cache on Hopper: wgmma with latents brought by the tensor copy
// engine. See latent.h. Architectures: sm_90a; bf16 and fp16, L = 512 and R = 64.
//
// Algorithm
//  1. A block takes 64 rows of a span, token after token with heads side by side. Groups of rows
//     and their tiles of keys, of all spans one behind the other, are cut into equal parts, one for
//     each multiprocessor. Parts of a group go to the workspace; a second launch adds them up in a
//     fixed order. In the batch-invariant mode, and for many long prompts, groups are whole.
//  2. A producer warp copies tiles of 64 latents into a ring of two, in three parts with a barrier
//     each: either warpgroup's 256 columns of values, and the keys' last 64 columns.
//  3. Warpgroup 0 computes scores and softmax, and hands weights to warpgroup 1 through shared
//     memory. Each multiplies them by its half of the values, beside the next tile's scores.
//  4. Slots past the context may hold NaN: scores are masked by selection, values are cleared.
// Source: own; the warpgroups' halves and the cuts through spans are FlashMLA's (DeepSeek, 2025).
// Bound: the cache's bytes for few heads; for many 2 (2 L + R) operations per row and token.
#include <algorithm>
#include <climits>

#include "cuda/attention/attention_tensor_map.cuh"
#include "cuda/attention/latent/latent_attention.cuh"
#include "cuda/wgmma.cuh"

namespace regatta::cuda {
namespace {

constexpr int kRank = 512, kRope = 64;
constexpr int kTile = 64;  // tokens
constexpr int kStages = 2;
constexpr int kPanels = (kRank + kRope) / 64;  // of 64 columns, 128 bytes per row
constexpr int kHalfPanels = kRank / 64 / 2;    // of values, that a warpgroup takes
constexpr int kHalf = kRank / 2;
constexpr int kPanelBytes = kTile * 128, kTileBytes = kPanels * kPanelBytes;
constexpr int kParts = 3;  // of a tile: values of warpgroup 0, of warpgroup 1, keys alone
constexpr int kKeysAlone = 2;
constexpr int kWeightBytes = kLatentRows * kTile * 2;
constexpr int kSharedBytes = (1 + kStages) * kTileBytes + kWeightBytes + 1024;  // 1024 to align
constexpr int kThreads = 3 * 128;     // registers are given and taken by whole warpgroups
constexpr int kLeastTiles = 2;        // of a part, that are worth another block
constexpr int kSnapsFrom = 8;         // tiles of a part, from which on it may have one more or less
static_assert(kLatentRows == kTile);  // queries and latents have the same panels

// Named barriers: weights are there, weights have been read, and those of one warpgroup alone.
constexpr int kReadyBarrier = 1, kFreeBarrier = 2, kGroupBarrier = 3;

__device__ __forceinline__ int groups_of(const LatentArgs& a, const LatentPlan& plan, int length) {
  if (length > a.max_span_len) return 0;
  const int rows = kLatentRows * plan.lanes;
  return (length * a.num_heads + rows - 1) / rows;
}

// Tiles of keys that the rows of a group see.
__device__ __forceinline__ int tiles_of(const LatentArgs& a, const LatentPlan& plan,
                                        const LatentSpan& span, int group) {
  const int rows = min((group + 1) * kLatentRows * plan.lanes, span.length * a.num_heads);
  return max((span.last((rows - 1) / a.num_heads) + kTile - 1) / kTile, 1);
}

// A tile of a group's keys. seq -1: past the last one.
struct Place {
  int seq, group, tile, num_tiles;
};

// What counts of a group: its tiles, or it alone.
template <bool kTiles>
__device__ __forceinline__ int weight_of(const LatentArgs& a, const LatentPlan& plan,
                                         const LatentSpan& span, int group) {
  return kTiles ? tiles_of(a, plan, span, group) : 1;
}

// Groups of span `seq`, and what counts of them. All lanes of a warp have spans side by side.
struct Weighed {
  int groups = 0, weight = 0;
};
template <bool kTiles>
__device__ __forceinline__ Weighed weigh(const LatentArgs& a, const LatentPlan& plan, int seq) {
  const int lane = threadIdx.x % kWarp;
  Weighed own;
  if (seq < a.num_seqs) {
    const LatentSpan span(a, seq);
    own.groups = groups_of(a, plan, span.length);
    own.weight = !kTiles ? own.groups : own.groups == 1 ? tiles_of(a, plan, span, 0) : 0;
  }
  // Spans of several groups: all lanes add up their tiles.
  for (unsigned many = kTiles ? __ballot_sync(~0u, own.groups > 1) : 0; many != 0;
       many &= many - 1) {
    const int holder = __ffs(many) - 1, count = __shfl_sync(~0u, own.groups, holder);
    const LatentSpan span(a, seq - lane + holder);
    int sum = 0;
    for (int g = lane; g < count; g += kWarp) sum += tiles_of(a, plan, span, g);
    sum = __reduce_add_sync(~0u, sum);
    if (lane == holder) own.weight = sum;
  }
  return own;
}

// Place `index` over all groups of all spans, and in *total how many there are where it lies past
// them. By a warp.
template <bool kTiles>
__device__ __forceinline__ Place find_place(const LatentArgs& a, const LatentPlan& plan, int index,
                                            int* total) {
  const int lane = threadIdx.x % kWarp;
  int before = 0;
  for (int s0 = 0; s0 < a.num_seqs; s0 += kWarp) {
    const Weighed own = weigh<kTiles>(a, plan, s0 + lane);
    const int until = before + warp_inclusive_scan(own.weight);
    const unsigned has = __ballot_sync(~0u, until > index);
    if (has == 0) {
      before = __shfl_sync(~0u, until, kWarp - 1);
      continue;
    }
    const int holder = __ffs(has) - 1, count = __shfl_sync(~0u, own.groups, holder);
    int first = __shfl_sync(~0u, until - own.weight, holder);
    const LatentSpan span(a, s0 + holder);
    for (int g0 = 0;; g0 += kWarp) {
      const int weight = g0 + lane < count ? weight_of<kTiles>(a, plan, span, g0 + lane) : 0;
      const int end = first + warp_inclusive_scan(weight);
      const unsigned inside = __ballot_sync(~0u, end > index);
      if (inside != 0) {
        const int owner = __ffs(inside) - 1;
        const int begin = __shfl_sync(~0u, end - weight, owner);
        return {s0 + holder, g0 + owner, index - begin, __shfl_sync(~0u, weight, owner)};
      }
      first = __shfl_sync(~0u, end, kWarp - 1);
    }
  }
  *total = before;
  return {-1, 0, 0, 0};
}

// Where the tiles of all groups are cut into equal parts. All by a warp.
struct Cuts {
  int total, size, snap;

  __device__ __forceinline__ Cuts(const LatentArgs& a, const LatentPlan& plan) {
    find_place<true>(a, plan, INT_MAX, &total);
    size = max((total + plan.units - 1) / plan.units, kLeastTiles);
    snap = size >= kSnapsFrom;
  }
  // The tile at which part `part` begins. A cut one tile from a group's end is moved there: the
  // queries and results of that piece would cost more than it. *place: of the tile, or past the
  // group's last one.
  __device__ __forceinline__ int at(const LatentArgs& a, const LatentPlan& plan, int part,
                                    Place* place) const {
    const int64_t index = static_cast<int64_t>(part) * size;
    int unused;
    *place = {-1, 0, 0, 0};
    if (index >= total) return total;
    *place = find_place<true>(a, plan, static_cast<int>(index), &unused);
    int move = 0;
    if (snap != 0 && place->tile == 1) {
      move = -1;
    } else if (snap != 0 && place->tile > 0 && place->num_tiles - place->tile == 1) {
      move = 1;
    }
    place->tile += move;
    return static_cast<int>(index) + move;
  }
};

// Tiles begin to end of a group's keys, for this block's rows of it.
struct Piece {
  LatentSpan span;
  int seq, begin, end, num_tiles;
  int first_row, num_rows;  // of the span; rows that exist

  __device__ __forceinline__ bool is_whole() const { return begin == 0 && end == num_tiles; }
};

// What a block does, piece by piece; each warp goes through it on its own.
struct Walk {
  int seq, group, tile;
  int left;  // tiles

  // The next piece of which this lane has rows.
  __device__ __forceinline__ bool next(const LatentArgs& a, const LatentPlan& plan, Piece* piece) {
    while (left > 0 && seq < a.num_seqs) {
      piece->span = LatentSpan(a, seq);
      const LatentSpan& span = piece->span;
      if (group >= groups_of(a, plan, span.length)) {
        ++seq, group = 0, tile = 0;
        continue;
      }
      const int num_tiles = tiles_of(a, plan, span, group), begin = tile;
      const int first =
          (group * plan.lanes + static_cast<int>(blockIdx.x) % plan.lanes) * kLatentRows;
      ++group, tile = 0;
      if (begin >= num_tiles) continue;
      piece->seq = seq;
      piece->begin = begin;
      piece->end = min(num_tiles, begin + left);
      piece->num_tiles = num_tiles;
      piece->first_row = first;
      piece->num_rows = min(span.length * a.num_heads - first, kLatentRows);
      left -= piece->end - begin;
      if (piece->num_rows > 0) return true;
    }
    return false;
  }
};

// By a warp.
__device__ __forceinline__ Walk walk_of(const LatentArgs& a, const LatentPlan& plan) {
  const int unit = blockIdx.x / plan.lanes;
  if (plan.shares) {
    const Cuts cuts(a, plan);
    Place begin, end;
    const int from = cuts.at(a, plan, unit, &begin), to = cuts.at(a, plan, unit + 1, &end);
    return {max(begin.seq, 0), begin.group, begin.tile, to - from};
  }
  int unused;
  const Place found = find_place<false>(a, plan, unit, &unused);
  if (found.seq < 0) return {0, 0, 0, 0};
  // The last rows, which see the most, first.
  const LatentSpan span(a, found.seq);
  const int group = groups_of(a, plan, span.length) - 1 - found.group;
  return {found.seq, group, 0, tiles_of(a, plan, span, group)};
}

// Of what a unit leaves: of the group that it begins (which: 1), or of one that others began.
__device__ __forceinline__ int64_t place_of(const LatentPlan& plan, int unit, int which, int lane) {
  return static_cast<int64_t>(unit * 2 + which) * plan.lanes + lane;
}

struct Barriers {
  uint64_t full[kStages][kParts], empty[kStages][kParts], queries;
};

// Fills the ring with the latents of all pieces. By a warp; box_tokens: of a copy.
__device__ __forceinline__ void produce(const LatentArgs& a, const LatentPlan& plan, Walk walk,
                                        const CUtensorMap& map, int box_tokens, uint8_t* tiles,
                                        Barriers& barriers) {
  const int lane = threadIdx.x % kWarp;
  const uint64_t policy = plan.reads_once ? policy_evict_first() : policy_evict_last();
  Piece piece;
  int filled = 0;
  while (walk.next(a, plan, &piece)) {
    const int32_t* const table = a.block_tables + static_cast<int64_t>(piece.seq) * a.max_blocks;
    // Lane b copies box b of a tile, if it holds a token of the context. What is not copied stays
    // as it is, and is masked.
    const auto row_of_box = [&](int tile) {
      const int position = tile * kTile + lane * box_tokens;
      if (lane * box_tokens >= kTile || position >= piece.span.context) return -1;
      return table[position / a.block_size] * a.block_size + position % a.block_size;
    };
    int row = row_of_box(piece.begin);
    for (int tile = piece.begin; tile < piece.end; ++tile, ++filled) {
      const int next = tile + 1 < piece.end ? row_of_box(tile + 1) : -1;
      const int stage = filled % kStages, use = filled / kStages & 1;
      const int bytes = __popc(__ballot_sync(~0u, row >= 0)) * box_tokens * 128;  // of a panel
      uint8_t* const to = tiles + stage * kTileBytes + lane * box_tokens * 128;
      const auto copy = [&](int part, int first, int count) {
        uint64_t* const full = &barriers.full[stage][part];
        barrier_wait(&barriers.empty[stage][part], use ^ 1);
        if (lane == 0) barrier_arrive_expect(full, bytes * count);
        __syncwarp();
        if (row < 0) return;
        for (int panel = first; panel < first + count; ++panel) {
          tensor_load_2d(to + panel * kPanelBytes, &map, panel * 64, row, full, policy);
        }
      };
      copy(kKeysAlone, kPanels - 1, 1);  // free first
      copy(0, 0, kHalfPanels);
      copy(1, kHalfPanels, kHalfPanels);
      row = next;
    }
  }
}

// Rows of queries of a piece, by the 128 threads of a warpgroup; those past the last one are zeros.
template <class T>
__device__ __forceinline__ void copy_queries(const LatentArgs& a, const Piece& piece,
                                             uint8_t* queries) {
  const int unit = threadIdx.x % 8;  // 16 bytes of a panel's row
  for (int r = threadIdx.x % 128 / 8; r < kLatentRows; r += 16) {
    const bool inside = r < piece.num_rows;
    const int64_t index = piece.span.index(a, piece.first_row + (inside ? r : 0));
    const T* const latent = static_cast<const T*>(a.q_latent) + index * kRank + unit * 8;
    const T* const rope = static_cast<const T*>(a.q_rope) + index * kRope + unit * 8;
    uint8_t* const to = queries + r * 128 + ((unit ^ r) & 7) * 16;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      cp_async16(to + panel * kPanelBytes, panel < kPanels - 1 ? latent + panel * 64 : rope,
                 inside ? 16 : 0);
    }
  }
  cp_async_commit();
}

__device__ __forceinline__ void shared_proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// This thread's words of the columns 8 b + 2 (lane % 4) and one on, of four blocks b of 8 columns,
// become all words of block lane % 4.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(~0u, odd ? w[i] : w[i + 1], 1);
    (odd ? w[i] : w[i + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(~0u, high ? w[i] : w[i + 2], 2);
    (high ? w[i] : w[i + 2]) = other;
  }
}

// What both warpgroups do with their half of the values: out[64, 256] of a thread's two rows.
template <class T>
struct Half {
  const LatentArgs& a;
  const LatentPlan& plan;
  uint8_t* const values;  // this half of the ring's first tile
  const int half, warp, lane;
  const uint64_t descriptor;
  float out[kHalf / 2];

  __device__ __forceinline__ Half(const LatentArgs& args, const LatentPlan& p, uint8_t* tiles,
                                  int which)
      : a(args),
        plan(p),
        values(tiles + which * kHalfPanels * kPanelBytes),
        half(which),
        warp(threadIdx.x % 128 / kWarp),
        lane(threadIdx.x % kWarp),
        descriptor(wgmma_descriptor_rows(values, kPanelBytes)) {}

  __device__ __forceinline__ int row(int h) const { return warp * 16 + lane / 4 + h * 8; }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kHalf / 2; ++i) out[i] = 0.f;
  }
  __device__ __forceinline__ void rescale(const float (&factors)[2]) {
    if (!__any_sync(~0u, factors[0] != 1.f || factors[1] != 1.f)) return;  // usual in late tiles
#pragma unroll
    for (int i = 0; i < kHalf / 2; ++i) out[i] *= factors[i / 2 & 1];
  }
  // Zeros for values past the context, in the last tile of a piece.
  __device__ __forceinline__ void clear_unused(const Piece& piece, int stage) {
    const int used = piece.span.context - (piece.end - 1) * kTile;
    if (used >= kTile) return;
    for (int i = threadIdx.x % 128; i < kHalfPanels * kPanelBytes / 16; i += 128) {
      if (i / 8 % kTile >= used) {  // panel after panel, 8 units of a row side by side
        *reinterpret_cast<uint4*>(values + stage * kTileBytes + i * 16) = make_uint4(0, 0, 0, 0);
      }
    }
    shared_proxy_fence();
    named_barrier_sync(kGroupBarrier + half, 128);
  }
  // out += weights values.
  __device__ __forceinline__ void issue(const uint32_t (&weights)[kTile / 16][4], int stage) {
    const uint64_t tile = descriptor + stage * (kTileBytes >> 4);
    wgmma_pin(out);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) {
      WgmmaRows<T, kHalf>::run(out, weights[k], tile + k * (16 * 128 >> 4), 1);
    }
    wgmma_commit();
  }
  // Columns of the output, times scales of the rows; or of a piece's, as they are.
  __device__ __forceinline__ void store(const Piece& piece, const float (&scales)[2]) {
    const int unit = blockIdx.x / plan.lanes, column = half * kHalf;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = row(h);
      const bool inside = r < piece.num_rows;
      if (piece.is_whole()) {
        T* const to = static_cast<T*>(a.out) +
                      piece.span.index(a, piece.first_row + (inside ? r : 0)) * kRank + column;
#pragma unroll
        for (int j = 0; j < kHalf / 8; j += 4) {
          uint32_t words[4];
#pragma unroll
          for (int b = 0; b < 4; ++b) {
            const float* const x = out + 4 * (j + b) + 2 * h;
            words[b] = pack2<T>(x[0] * scales[h], x[1] * scales[h]);
          }
          transpose_quad(words);
          if (inside) {
            *reinterpret_cast<uint4*>(to + (j + lane % 4) * 8) =
                make_uint4(words[0], words[1], words[2], words[3]);
          }
        }
      } else if (inside) {
        const int64_t place = place_of(plan, unit, piece.begin == 0, blockIdx.x % plan.lanes);
        float* const to = a.partial + (place * plan.place_rows + r) * kRank + column + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < kHalf / 8; ++j) {
          *reinterpret_cast<float2*>(to + j * 8) =
              make_float2(out[4 * j + 2 * h], out[4 * j + 2 * h + 1]);
        }
      }
    }
  }
};

// What warpgroup 0 hands to warpgroup 1.
struct Handed {
  uint4* weights;  // [kTile / 16, 128]: registers of each thread
  float* factors;  // [kLatentRows]: of the output so far
  float* scales;   // [kLatentRows]: of the output, behind the last tile of a piece
};

// Whether the phase with this parity has ended; the same for all lanes.
__device__ __forceinline__ bool barrier_passed(uint64_t* barrier, uint32_t parity) {
  uint32_t passed = 0;
#ifdef REGATTA_SM90
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(passed)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
#endif
  return __all_sync(~0u, passed);
}

__device__ __forceinline__ void release(uint64_t* barrier) {
  if (threadIdx.x % kWarp == 0) barrier_arrive(barrier);
}

// Warpgroup 0: scores, softmax, the first half of the output.
template <class T>
__device__ __forceinline__ void score_and_multiply(const LatentArgs& a, const LatentPlan& plan,
                                                   Walk walk, uint8_t* queries, uint8_t* tiles,
                                                   const Handed& handed, Barriers& barriers) {
  Half<T> half(a, plan, tiles, 0);
  const int thread = threadIdx.x, lane = half.lane;
  const WgmmaTile query_tile = wgmma_descriptor(queries), key_tile = wgmma_descriptor(tiles);
  Piece piece;
  int position0;  // that all rows see, behind the last one
  int tokens[2];
  float s[kTile / 2], largest[2], sum[2], rescale[2];
  uint32_t weights[kTile / 16][4];
  int done = 0;  // tiles whose scores have been asked for

  // kParts groups of products.
  const auto issue_scores = [&] {
    const int stage = done % kStages, use = done / kStages & 1;
    WgmmaTile query = query_tile, key = key_tile.at(stage * kTileBytes);
    // What derives from them is made where it is used: kept, it would take more registers than
    // there are.
    asm volatile("" : "+r"(query.low), "+r"(key.low));
    const auto issue = [&](int part, int first, int count) {
      barrier_wait(&barriers.full[stage][part], use);
#pragma unroll
      for (int k = first * 4; k < (first + count) * 4; ++k) {
        const int at = k / 4 * kPanelBytes + k % 4 * 32;
        Wgmma<T, kTile>::run(s, query.at(at), key.at(at), part != kKeysAlone || k > first * 4);
      }
      wgmma_commit();
    };
    wgmma_pin(s);
    wgmma_fence();
    issue(kKeysAlone, kPanels - 1, 1);
    issue(0, 0, kHalfPanels);
    issue(1, kHalfPanels, kHalfPanels);
  };
  const auto mask = [&](int tile) {
    const int first = tile * kTile + lane % 4 * 2;
    if (piece.span.tree) {
#pragma unroll
      for (int i = 0; i < kTile / 2; ++i) {
        if (!piece.span.sees(a, tokens[i / 2 & 1], first + i / 4 * 8 + (i & 1))) s[i] = -INFINITY;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kTile / 2; ++i) {
        if (first + i / 4 * 8 + (i & 1) > piece.span.before + tokens[i / 2 & 1]) s[i] = -INFINITY;
      }
    }
  };
  const auto softmax = [&](int tile) {
    if ((tile + 1) * kTile > position0) mask(tile);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = largest[h];
#pragma unroll
      for (int i = 0; i < kTile / 8; ++i) {
        top = fmaxf(top, fmaxf(s[4 * i + 2 * h], s[4 * i + 2 * h + 1]));
      }
      top = quad_max(top);
      const float base = top == -INFINITY ? 0.f : top * a.scale_log2;
      // 1 where it stays: a tile of which the row sees nothing changes nothing.
      rescale[h] = top == largest[h] ? 1.f : exp2_approx(fmaf(largest[h], a.scale_log2, -base));
      largest[h] = top;
      float part = 0.f;
#pragma unroll
      for (int i = 0; i < kTile / 8; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * i + 2 * h + e];
          x = exp2_approx(fmaf(x, a.scale_log2, -base));
          part += x;
        }
      }
      sum[h] = fmaf(sum[h], rescale[h], part);
    }
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[k][i] = pack2<T>(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
    }
  };
  float scales[2];
  const auto hand_over = [&](bool last) {
    if (last) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float total = quad_sum(sum[h]);
        scales[h] = total > 0.f ? 1.f / total : 0.f;
        const int r = half.row(h);
        if (!piece.is_whole() && lane % 4 == 0 && r < piece.num_rows) {
          const int64_t place =
              place_of(plan, blockIdx.x / plan.lanes, piece.begin == 0, blockIdx.x % plan.lanes);
          a.sums[place * plan.place_rows + r] = make_float2(largest[h] * a.scale_log2, total);
        }
      }
    }
    named_barrier_sync(kFreeBarrier, 256);
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) {
      handed.weights[k * 128 + thread] =
          make_uint4(weights[k][0], weights[k][1], weights[k][2], weights[k][3]);
    }
    if (lane % 4 == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        handed.factors[half.row(h)] = rescale[h];
        if (last) handed.scales[half.row(h)] = scales[h];
      }
    }
    named_barrier_arrive(kReadyBarrier, 256);
  };

  for (int pieces = 0; walk.next(a, plan, &piece); ++pieces) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      tokens[h] = min((piece.first_row + half.row(h)) / a.num_heads, piece.span.length - 1);
      largest[h] = -INFINITY, sum[h] = 0.f;
    }
    position0 = piece.span.before;
    if (!piece.span.tree) position0 += piece.first_row / a.num_heads + 1;
    half.clear();
    barrier_wait(&barriers.queries, pieces & 1);
    issue_scores();
    wgmma_wait<0>();
    wgmma_pin(s);
    release(&barriers.empty[done % kStages][kKeysAlone]);
    softmax(piece.begin);
    hand_over(piece.begin + 1 == piece.end);
    ++done;
    for (int tile = piece.begin + 1; tile < piece.end; ++tile, ++done) {
      const int last = (done - 1) % kStages;
      half.rescale(rescale);
      half.issue(weights, last);
      // Scores are asked for behind the values' products, unless their tile is still under way:
      // then what the products are done with makes room for the one after it.
      const bool waits = !barrier_passed(&barriers.full[done % kStages][1], done / kStages & 1);
      if (waits) {
        wgmma_wait<0>();
        wgmma_pin(half.out);
        release(&barriers.empty[last][0]);
      }
      issue_scores();
      wgmma_wait<kParts>();
      wgmma_pin(half.out);
      if (!waits) release(&barriers.empty[last][0]);
      wgmma_wait<0>();
      wgmma_pin(s);
      release(&barriers.empty[done % kStages][kKeysAlone]);
      softmax(tile);
      hand_over(tile + 1 == piece.end);
    }
    const int last = (done - 1) % kStages;
    half.rescale(rescale);
    half.clear_unused(piece, last);
    half.issue(weights, last);
    wgmma_wait<0>();
    wgmma_pin(half.out);
    release(&barriers.empty[last][0]);
    half.store(piece, scales);
  }
}

// Warpgroup 1: queries, the second half of the output.
template <class T>
__device__ __forceinline__ void copy_and_multiply(const LatentArgs& a, const LatentPlan& plan,
                                                  Walk walk, uint8_t* queries, uint8_t* tiles,
                                                  const Handed& handed, Barriers& barriers) {
  Half<T> half(a, plan, tiles, 1);
  const int thread = threadIdx.x % 128;
  const auto queries_are_there = [&] {
    cp_async_wait<0>();
    shared_proxy_fence();
    barrier_arrive(&barriers.queries);
  };
  named_barrier_arrive(kFreeBarrier, 256);
  Piece piece, next;
  bool more = walk.next(a, plan, &piece);
  if (more) {
    copy_queries<T>(a, piece, queries);
    queries_are_there();
  }
  int done = 0;
  while (more) {
    const bool has_next = walk.next(a, plan, &next);
    float factors[2], scales[2];
    uint32_t weights[kTile / 16][4];
    half.clear();
    for (int tile = piece.begin; tile < piece.end; ++tile, ++done) {
      const bool last = tile + 1 == piece.end;
      const int stage = done % kStages;
      named_barrier_sync(kReadyBarrier, 256);
#pragma unroll
      for (int k = 0; k < kTile / 16; ++k) {
        const uint4 x = handed.weights[k * 128 + thread];
        weights[k][0] = x.x, weights[k][1] = x.y, weights[k][2] = x.z, weights[k][3] = x.w;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        factors[h] = handed.factors[half.row(h)];
        if (last) scales[h] = handed.scales[half.row(h)];
      }
      named_barrier_arrive(kFreeBarrier, 256);
      if (last && has_next) copy_queries<T>(a, next, queries);  // their tile's scores are done
      barrier_wait(&barriers.full[stage][1], done / kStages & 1);
      half.rescale(factors);
      if (last) half.clear_unused(piece, stage);
      half.issue(weights, stage);
      wgmma_wait<0>();
      wgmma_pin(half.out);
      release(&barriers.empty[stage][1]);
    }
    if (has_next) queries_are_there();
    half.store(piece, scales);
    piece = next;
    more = has_next;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    latent_attention_sm90_kernel(const __grid_constant__ CUtensorMap map, const LatentArgs a,
                                 const LatentPlan plan, int box_tokens) {
#ifdef REGATTA_SM90A
  extern __shared__ uint8_t raw[];
  uint8_t* const queries = raw + (1024 - shared_address(raw) % 1024) % 1024;
  uint8_t* const tiles = queries + kTileBytes;
  __shared__ Barriers barriers;
  __shared__ float factors[kLatentRows], scales[kLatentRows];
  __shared__ Walk walk;
  const Handed handed = {reinterpret_cast<uint4*>(tiles + kStages * kTileBytes), factors, scales};

  pdl_trigger();
  if (threadIdx.x == 0) {
    tensor_map_prefetch(&map);
    for (int stage = 0; stage < kStages; ++stage) {
      for (int part = 0; part < kParts; ++part) {
        barrier_init(&barriers.full[stage][part], 1);
        barrier_init(&barriers.empty[stage][part], 4);  // warps of a warpgroup
      }
    }
    barrier_init(&barriers.queries, 128);
    barrier_init_fence();
  }
  pdl_wait();  // the launch ahead writes queries and the cache
  const int warp = __shfl_sync(~0u, threadIdx.x / kWarp, 0);
  if (warp == 0) {
    const Walk found = walk_of(a, plan);
    if (threadIdx.x == 0) walk = found;
  }
  __syncthreads();
  if (warp < 4) {
    registers_take<232>();
    score_and_multiply<T>(a, plan, walk, queries, tiles, handed, barriers);
  } else if (warp < 8) {
    registers_take<232>();
    copy_and_multiply<T>(a, plan, walk, queries, tiles, handed, barriers);
  } else {
    registers_give<40>();
    if (warp == 8) produce(a, plan, walk, map, box_tokens, tiles, barriers);
  }
#else
  wrong_architecture();
#endif
}

// The group of a row, among the tiles of all groups.
struct GroupOfRow {
  int row;  // of its span
  int first, num_tiles;
};

// Of a token and a head. False: of padding, or of a span that is attended otherwise. By a warp.
__device__ __forceinline__ bool find_group(const LatentArgs& a, const LatentPlan& plan, int token,
                                           int head, GroupOfRow* found) {
  const int lane = threadIdx.x % kWarp;
  int before = 0;
  for (int s0 = 0; s0 < a.num_seqs; s0 += kWarp) {
    const int seq = s0 + lane;
    const bool has =
        seq < a.num_seqs && a.cu_seqlens_q[seq] <= token && token < a.cu_seqlens_q[seq + 1];
    const Weighed own = weigh<true>(a, plan, seq);
    const int until = before + warp_inclusive_scan(own.weight);
    const unsigned holders = __ballot_sync(~0u, has);
    if (holders == 0) {
      before = __shfl_sync(~0u, until, kWarp - 1);
      continue;
    }
    const int holder = __ffs(holders) - 1;
    if (__shfl_sync(~0u, own.groups, holder) == 0) return false;
    const LatentSpan span(a, s0 + holder);
    found->row = (token - span.start) * a.num_heads + head;
    const int group = found->row / (kLatentRows * plan.lanes);
    int ahead = 0;
    for (int g = lane; g < group; g += kWarp) ahead += tiles_of(a, plan, span, g);
    found->first = __shfl_sync(~0u, until - own.weight, holder) + __reduce_add_sync(~0u, ahead);
    found->num_tiles = tiles_of(a, plan, span, group);
    return true;
  }
  return false;
}

// The pieces of each row of which a group was cut, added up: every kAddWarps-th one by a warp, in
// the order of their keys, and then what warps have. Blocks: tokens and heads, with strides; 128
// columns.
constexpr int kAddWarps = 4, kAddColumns = 128;

template <class T>
__global__ void __launch_bounds__(kAddWarps* kWarp)
    add_pieces_kernel(const LatentArgs a, const LatentPlan plan) {
  __shared__ float4 sums[kAddWarps][kWarp];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int column = blockIdx.y * kAddColumns + lane * 4;
  pdl_trigger();
  pdl_wait();
  const Cuts cuts(a, plan);
  for (int pair = blockIdx.x; pair < a.num_tokens * a.num_heads; pair += gridDim.x) {
    const int token = pair / a.num_heads, head = pair % a.num_heads;
    GroupOfRow group;
    if (!find_group(a, plan, token, head, &group)) continue;
    // Of the parts that have some of it, the second one, and the one behind the last: cuts beside
    // its ends were moved there.
    const int second = (group.first + cuts.snap) / cuts.size + 1;
    const int end = (group.first + group.num_tiles - cuts.snap + cuts.size - 1) / cuts.size;
    if (second >= end) continue;  // a block has taken it alone
    const int num_pieces = end - second + 1;
    const int which_lane = group.row / kLatentRows % plan.lanes, r = group.row % kLatentRows;
    const auto row_of = [&](int piece) {  // in the workspace
      return place_of(plan, second - 1 + piece, piece == 0, which_lane) * plan.place_rows + r;
    };
    float top = -INFINITY;
    for (int i = lane; i < num_pieces; i += kWarp) top = fmaxf(top, a.sums[row_of(i)].x);
    top = warp_max(top);
    const float base = top == -INFINITY ? 0.f : top;
    float total = 0.f;
    for (int i = lane; i < num_pieces; i += kWarp) {
      const float2 x = a.sums[row_of(i)];
      total = fmaf(exp2_approx(x.x - base), x.y, total);
    }
    total = warp_sum(total);
    float4 y = make_float4(0.f, 0.f, 0.f, 0.f);
    const auto add = [&](float weight, float4 x) {
      y.x = fmaf(weight, x.x, y.x), y.y = fmaf(weight, x.y, y.y);
      y.z = fmaf(weight, x.z, y.z), y.w = fmaf(weight, x.w, y.w);
    };
#pragma unroll 8
    for (int i = warp; i < num_pieces; i += kAddWarps) {
      const int64_t at = row_of(i);
      add(exp2_approx(a.sums[at].x - base),
          *reinterpret_cast<const float4*>(a.partial + at * kRank + column));
    }
    sums[warp][lane] = y;
    __syncthreads();
    if (warp == 0) {
#pragma unroll
      for (int w = 1; w < kAddWarps; ++w) add(1.f, sums[w][lane]);
      const float scale = total > 0.f ? 1.f / total : 0.f;
      const int64_t row = static_cast<int64_t>(head) * a.num_tokens + token;
      *reinterpret_cast<uint2*>(static_cast<T*>(a.out) + row * kRank + column) =
          make_uint2(pack2<T>(y.x * scale, y.y * scale), pack2<T>(y.z * scale, y.w * scale));
    }
    __syncthreads();
  }
}

template <class T>
Status run(const LatentArgs& a, const LatentPlan& plan, int64_t num_slots,
           const Launch& launch_on) {
  CUtensorMap map = {};
  const int box_tokens = std::min(a.block_size, kTile);
  REGATTA_RETURN_IF_ERROR(
      encode_cache(&map, a.cache, Traits<T>::dtype, num_slots, kRank + kRope, box_tokens));
  REGATTA_RETURN_IF_ERROR(launch(latent_attention_sm90_kernel<T>,
                                 {launch_on, plan.lanes * plan.units, kThreads, kSharedBytes},
                                 "latent_attention sm90", map, a, plan, box_tokens));
  if (plan.num_places() == 0) return {};
  // Half of the threads of each multiprocessor, which are there together: more blocks would only
  // look again where the cuts are.
  constexpr int64_t kPairsAtOnce = 1024 / (kAddWarps * kWarp) * kAddColumns / kRank;
  const int64_t pairs = static_cast<int64_t>(a.num_tokens) * a.num_heads;
  const dim3 grid =
      grid_of(std::min(pairs, kPairsAtOnce * num_multiprocessors()), kRank / kAddColumns);
  return launch(add_pieces_kernel<T>, {launch_on, grid, kAddWarps * kWarp},
                "latent_attention sm90 pieces", a, plan);
}

}  // namespace

Status launch_latent_attention_sm90(const LatentArgs& args, const LatentPlan& plan, DType dtype,
                                    int64_t num_slots, const Launch& launch_on) {
  return dtype == DType::kBFloat16 ? run<__nv_bfloat16>(args, plan, num_slots, launch_on)
                                   : run<__half>(args, plan, num_slots, launch_on);
}

}  // namespace regatta::cuda
