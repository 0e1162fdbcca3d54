// Attention of long spans with mma.sync: FlashAttention-2 over a paged cache.
//
// Architectures: sm_80 and later; bf16 and fp16; head_dim 64, 80, 96, 128, 256.
// Algorithm: one block per (tile of rows, KV head); four warps of 32 rows (16 for head_dim 256), so
// that a key fragment read from shared memory feeds two matrix products. Keys of the next tile load
// during softmax and the value product, values during the logits. Tiles run from the last, which
// needs the causal mask, to the first. Heaviest tiles are launched first.
// Source: FlashAttention-2 (Dao, 2023). Rows are packed over the query heads of a KV head, which
// shortens the masked part of the diagonal and serves short spans.
// Bound: 4 * D flops per visible (row, key) over the mma.sync rate.
#include "attention.cuh"

namespace regatta::cuda {
namespace {

template <int D>
struct PrefillShape {
  static constexpr int kWarps = 4, kThreads = kWarps * kWarp;
  static constexpr int kRowTiles = D > 128 ? 1 : 2;  // 16-row tiles per warp: registers bound it
  static constexpr int kRows = kWarps * 16 * kRowTiles;
  static constexpr int kKeys = D > 128 ? 32 : 64;
  static constexpr int kRow = D + 8;  // elements in shared memory
  static constexpr int kSharedBytes = (kRows + 2 * kKeys) * kRow * 2;
};

// kShaped: with a soft cap or slopes.
template <class T, int D, bool kShaped>
__global__ void __launch_bounds__(PrefillShape<D>::kThreads, 2)
    attention_prefill_sm80_kernel(const AttentionArgs args) {
  using Shape = PrefillShape<D>;
  constexpr int kRowTiles = Shape::kRowTiles, kKeys = Shape::kKeys, kRow = Shape::kRow;
  extern __shared__ __align__(128) uint8_t shared[];
  T* const queries = reinterpret_cast<T*>(shared);
  T* const keys = queries + Shape::kRows * kRow;
  T* const values = keys + kKeys * kRow;
  const int tid = threadIdx.x, lane = tid % kWarp, warp = tid / kWarp;

  // No pdl_wait() here: the decode kernel in front has waited for everything before it, and this
  // one does not need its results (see attention.cu). Waited for at the end.
  pdl_trigger();

  PrefillTile tile;
  const int kv_head = blockIdx.x % args.num_kv_heads;
  if (find_prefill_tile<Shape::kRows>(args, blockIdx.x / args.num_kv_heads, &tile)) {
    const int num_rows = tile.num_tokens * args.group;
    const int row_begin = tile.tile * Shape::kRows;
    const int row_end = min(row_begin + Shape::kRows, num_rows);
    const int before = tile.context_len - tile.num_tokens;
    // Where the first row and the last one stand, and the end of what they see.
    const int first_own = before + row_begin / args.group;
    const int last_own = before + token_of_row(args, row_end - 1);
    const int low = max(0, first_own - args.window + 1);
    const int low_end = last_visible(first_own, tile.common, args.window) + 1;
    const int high = last_visible(last_own, tile.common, args.window) + 1;
    const int tile_first = low / kKeys, tile_last = (high - 1) / kKeys;

    const int64_t token_stride = static_cast<int64_t>(args.num_heads) * D;
    const T* q = static_cast<const T*>(args.q) + tile.token0 * token_stride +
                 static_cast<int64_t>(kv_head) * args.group * D;
    for (int unit = tid; unit < Shape::kRows * (D / 8); unit += Shape::kThreads) {
      const int row = unit / (D / 8), column = unit % (D / 8) * 8;
      const int r = row_begin + row, t = token_of_row(args, r);
      const T* source = r < num_rows ? q + t * token_stride + (r - t * args.group) * D + column : q;
      cp_async16(queries + row * kRow + column, source, r < num_rows ? 16 : 0);
    }

    // A group of warps loads 16 tokens: each warp a part of their 16-byte units.
    constexpr int kGroups = kKeys / 16, kParts = Shape::kWarps / kGroups;
    constexpr int kUnits = D / 16 / kParts;
    const int load_group = warp / kParts, load_unit = warp % kParts * kUnits * kWarp;
    const int32_t* table = args.block_tables + static_cast<int64_t>(tile.seq) * args.max_blocks;
    auto block_of = [&](int j) {
      const int position = j * kKeys + load_group * 16;
      const bool used = j >= tile_first && position < high && position + 16 > low;
      return used ? table[position >> args.block_shift] : 0;
    };
    auto load = [&](T* to, const void* cache, int j, int block) {
      const int position = j * kKeys + load_group * 16;
      load_16_tokens<T, D, kUnits>(to + load_group * 16 * kRow,
                                   cache_tokens<T, D>(cache, args, block, kv_head, position),
                                   load_unit, position, low, high);
    };
    int block = block_of(tile_last);
    load(keys, args.key, tile_last, block);
    cp_async_commit();
    int next_block = block_of(tile_last - 1);

    float out[kRowTiles][D / 8][4];
    float largest[kRowTiles][2], sum[kRowTiles][2];
    int own[kRowTiles][2];  // where rows stand
    [[maybe_unused]] float slopes[kRowTiles][2];
    auto logit_unit = [&] { return kShaped ? 1.f : args.scale_log2; };  // of what s is then
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = row_begin + (warp * kRowTiles + m) * 16 + lane / 4 + h * 8;
        own[m][h] = before + token_of_row(args, r);
        if constexpr (kShaped) {
          slopes[m][h] = slope_of(args, kv_head * args.group + r % args.group);
        }
        largest[m][h] = -INFINITY;
        sum[m][h] = 0.f;
      }
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
        out[m][n][0] = out[m][n][1] = out[m][n][2] = out[m][n][3] = 0.f;
    }
    const T* query_row = queries + (warp * kRowTiles * 16 + (lane & 15)) * kRow + (lane >> 4) * 8;
    const T* key_row = keys + ((lane & 7) + (lane >> 4) * 8) * kRow + ((lane >> 3) & 1) * 8;
    const T* value_row = values + ((lane & 7) + ((lane >> 3) & 1) * 8) * kRow + (lane >> 4) * 8;

    for (int j = tile_last; j >= tile_first; --j) {
      cp_async_wait<0>();
      __syncthreads();  // keys are there, and nobody reads the previous values any more
      load(values, args.value, j, block);
      cp_async_commit();

      float s[kRowTiles][kKeys / 8][4] = {};
#pragma unroll
      for (int k = 0; k < D / 16; ++k) {
        uint32_t a[kRowTiles][4];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) ldmatrix4(a[m], query_row + m * 16 * kRow + k * 16);
#pragma unroll
        for (int n = 0; n < kKeys / 16; ++n) {
          uint32_t b[4];
          ldmatrix4(b, key_row + n * 16 * kRow + k * 16);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            mma_m16n8k16<T>(s[m][2 * n], a[m], b[0], b[1]);
            mma_m16n8k16<T>(s[m][2 * n + 1], a[m], b[2], b[3]);
          }
        }
      }
      cp_async_wait<0>();
      __syncthreads();  // values are there, and nobody reads these keys any more
      block = next_block;
      if (j > tile_first) load(keys, args.key, j - 1, block);
      cp_async_commit();
      next_block = block_of(j - 2);

      const bool edge = (j + 1) * kKeys > low_end || j * kKeys <= last_own - args.window;
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        if constexpr (kShaped) {
          const int first = j * kKeys + 2 * (lane % 4);
          const int distances[2] = {first - own[m][0], first - own[m][1]};
          shape_logits<kKeys / 2>(args, slopes[m], distances,
                                  [&](int i) -> float& { return s[m][i / 4][i % 4]; });
        }
        if (edge) {
          const int last[2] = {last_visible(own[m][0], tile.common, args.window),
                               last_visible(own[m][1], tile.common, args.window)};
#pragma unroll
          for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int p = j * kKeys + n * 8 + 2 * (lane % 4) + (e & 1);
              const int h = e / 2;
              if (p > last[h] || p <= own[m][h] - args.window) s[m][n][e] = -INFINITY;
            }
          }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float top = largest[m][h];
#pragma unroll
          for (int n = 0; n < kKeys / 8; ++n)
            top = fmaxf(top, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
          top = quad_max(top);
          const float base = top == -INFINITY ? 0.f : top * logit_unit();
          const float scale = exp2_approx(largest[m][h] * logit_unit() - base);
          largest[m][h] = top;
          float part = 0.f;
#pragma unroll
          for (int n = 0; n < kKeys / 8; ++n) {
            s[m][n][2 * h] = exp2_approx(fmaf(s[m][n][2 * h], logit_unit(), -base));
            s[m][n][2 * h + 1] = exp2_approx(fmaf(s[m][n][2 * h + 1], logit_unit(), -base));
            part += s[m][n][2 * h] + s[m][n][2 * h + 1];
          }
          sum[m][h] = sum[m][h] * scale + part;
#pragma unroll
          for (int n = 0; n < D / 8; ++n) {
            out[m][n][2 * h] *= scale;
            out[m][n][2 * h + 1] *= scale;
          }
        }
      }
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k) {
        uint32_t a[kRowTiles][4];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          a[m][0] = pack2<T>(s[m][2 * k][0], s[m][2 * k][1]);
          a[m][1] = pack2<T>(s[m][2 * k][2], s[m][2 * k][3]);
          a[m][2] = pack2<T>(s[m][2 * k + 1][0], s[m][2 * k + 1][1]);
          a[m][3] = pack2<T>(s[m][2 * k + 1][2], s[m][2 * k + 1][3]);
        }
#pragma unroll
        for (int n = 0; n < D / 16; ++n) {
          uint32_t b[4];
          ldmatrix4_trans(b, value_row + k * 16 * kRow + n * 16);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            mma_m16n8k16<T>(out[m][2 * n], a[m], b[0], b[1]);
            mma_m16n8k16<T>(out[m][2 * n + 1], a[m], b[2], b[3]);
          }
        }
      }
    }

    // Through this warp's own rows of the query tile, so that stores are 16 bytes.
    __syncwarp();
    T* const staged = queries + warp * kRowTiles * 16 * kRow;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = row_begin + (warp * kRowTiles + m) * 16 + lane / 4 + h * 8;
        const int head = kv_head * args.group + r - token_of_row(args, r) * args.group;
        const float total =
            sum_with_sink(args, quad_sum(sum[m][h]), largest[m][h] * logit_unit(), head);
        const float scale = total > 0.f ? 1.f / total : 0.f;
        T* to = staged + (m * 16 + h * 8 + lane / 4) * kRow + 2 * (lane % 4);
#pragma unroll
        for (int n = 0; n < D / 8; ++n) {
          *reinterpret_cast<uint32_t*>(to + n * 8) =
              pack2<T>(out[m][n][2 * h] * scale, out[m][n][2 * h + 1] * scale);
        }
      }
    }
    __syncwarp();
    T* const destination = static_cast<T*>(args.out) + tile.token0 * token_stride +
                           static_cast<int64_t>(kv_head) * args.group * D;
    for (int unit = lane; unit < kRowTiles * 16 * (D / 8); unit += kWarp) {
      const int row = unit / (D / 8), column = unit % (D / 8) * 8;
      const int r = row_begin + warp * kRowTiles * 16 + row, t = token_of_row(args, r);
      if (r < num_rows) {
        store16(destination + t * token_stride + (r - t * args.group) * D + column,
                load16(staged + row * kRow + column));
      }
    }
  }
  pdl_wait();  // this grid's end implies the decode kernel's
}

template <class T, int D>
Status run(const AttentionArgs& args, const Launch& launch_on) {
  using Shape = PrefillShape<D>;
  const int64_t tiles =
      ceil_div(int64_t{args.num_tokens} * args.group, Shape::kRows) + args.num_seqs;
  auto* const kernel = shapes_scores(args) ? attention_prefill_sm80_kernel<T, D, true>
                                           : attention_prefill_sm80_kernel<T, D, false>;
  return launch(kernel,
                {launch_on, tiles * args.num_kv_heads, Shape::kThreads, Shape::kSharedBytes},
                "paged_attention prefill_sm80", args);
}

}  // namespace

Status launch_attention_prefill_sm80(const AttentionArgs& args, DType dtype, int head_dim,
                                     const Launch& launch_on) {
  return dispatch_half(dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    return dispatch_head_dim(head_dim, "attention_prefill_sm80", [&](auto dim) {
      return run<T, decltype(dim)::value>(args, launch_on);
    });
  });
}

}  // namespace regatta::cuda
