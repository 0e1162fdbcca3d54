// See latent.h: attention over latents of a paged cache.
//
// Architectures: all; on Hopper latent_attention_sm90.cu takes what it can. The mma kernel runs on
// sm_80 and later, for bf16 and fp16, L and L + R multiples of 32 and L up to 512, where its tiles
// fit into shared memory; else the plain one. REGATTA_KERNEL=latent_attention=sm80 forces these.
// Algorithm of the mma kernel (a row: a token's query of one head; a span's lie token by token)
//   1. A block takes up to kM rows of one span and a part of its context. Tiles of kTile latents
//      come through shared memory, two ahead, read once for all rows, as keys and as values.
//   2. Warps share a tile's tokens for scores, the rows for softmax, the columns for the output.
//   3. Few rows: the context is split, and a second launch adds the parts up by their sums.
// Source: own; the absorbed form is DeepSeek-V2's, online softmax Milakov and Gimelshein's.
// Bound: the cache's bytes for few heads, mma.sync for many: 2 (2 L + R) operations per row and
// token.
#include <algorithm>
#include <type_traits>

#include "cuda/attention/latent/codes.cuh"
#include "cuda/attention/latent/latent_attention.cuh"
#include "cuda/attention/latent/select.h"

namespace regatta::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kMaxRank = 512;
constexpr int kPairs = kMaxRank / 16 / kWarps;  // of columns by 16 that a warp owns
constexpr int kStages = kLatentStages;
constexpr int kLeastPart = 256;  // tokens of a context, split
constexpr int kMaxParts = 32;

// A block's rows: of span `seq`, from row `first` on.
struct Item {
  int seq, first;
};

// Tile `index` of kM rows over all spans; seq -1: there is none. By a warp.
template <int kM>
__device__ __forceinline__ Item find_item(const LatentArgs& a, int index) {
  const int lane = threadIdx.x % kWarp;
  int before = 0;
  for (int s0 = 0; s0 < a.num_seqs; s0 += kWarp) {
    const int s = s0 + lane;
    int tiles = 0;
    if (s < a.num_seqs) {
      const int length = a.cu_seqlens_q[s + 1] - a.cu_seqlens_q[s];
      if (length <= a.max_span_len) tiles = (length * a.num_heads + kM - 1) / kM;
    }
    const int until = warp_inclusive_scan(tiles) + before;
    const unsigned has = __ballot_sync(~0u, until - tiles <= index && index < until);
    if (has != 0) {
      const int holder = __ffs(has) - 1;
      const int first = __shfl_sync(~0u, (index - (until - tiles)) * kM, holder);
      return {s0 + holder, first};
    }
    before = __shfl_sync(~0u, until, kWarp - 1);
  }
  return {-1, 0};
}

template <int kM, int kTile, bool kCodes>
struct Shape {
  static constexpr int kScoreStride = kTile + 4, kWeightStride = kTile + 8;
  static constexpr int kTiles = kCodes ? 1 : kStages;  // of values

  // Of codes of a token, without and with its scale.
  static constexpr __host__ __device__ int row_bytes(int rank, int rope) { return rank + rope * 2; }
  static constexpr __host__ __device__ int stage_bytes(int rank, int rope) {
    return kCodes ? kTile * (row_bytes(rank, rope) + 4) : 0;
  }
};

template <class T, int kM, int kTile, bool kCodes>
__global__ void __launch_bounds__(kThreads, 1) latent_attention_kernel(const LatentArgs a) {
  using S = Shape<kM, kTile, kCodes>;
  constexpr int kTilesM = kM / 16, kTilesN = kTile / 8;
  constexpr int kOwnM = kTilesM * kTilesN / kWarps;  // score tiles of a warp, one below the other
  static_assert(kOwnM >= 1);
  extern __shared__ __align__(1024) char shared[];
  __shared__ Item item;
  const int size = a.rank + a.rope, stride = size + 8;
  T* const q = reinterpret_cast<T*>(shared);
  T* const latents = q + kM * stride;  // [kTiles, kTile, stride]
  // [stage]: rows of codes and their tails [kTile, row_bytes], scales [kTile]
  char* const stages = reinterpret_cast<char*>(latents + S::kTiles * kTile * stride);
  const int row_bytes = S::row_bytes(a.rank, a.rope), stage_bytes = S::stage_bytes(a.rank, a.rope);
  float* const scores = reinterpret_cast<float*>(stages + kStages * stage_bytes);
  T* const weights = reinterpret_cast<T*>(scores + kM * S::kScoreStride);
  float* const largest = reinterpret_cast<float*>(weights + kM * S::kWeightStride);
  float* const sums = largest + kM;
  float* const factors = sums + kM;

  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  pdl_trigger();
  pdl_wait();
  if (warp == 0) {
    const Item found = find_item<kM>(a, blockIdx.x);
    if (lane == 0) item = found;
  }
  __syncthreads();
  if (item.seq < 0) return;
  const LatentSpan span(a, item.seq);
  const int num_rows = min(kM, span.length * a.num_heads - item.first);
  const int last_token = (item.first + num_rows - 1) / a.num_heads;
  const int visible = span.last(last_token);
  const int part_size =
      a.parts == 1 ? visible : ((span.context + a.parts - 1) / a.parts + kTile - 1) / kTile * kTile;
  const int begin = blockIdx.y * part_size, end = min(begin + part_size, visible);
  const int num_tiles = max(0, (end - begin + kTile - 1) / kTile);

  // Rows of queries; those past the last one are zeros.
  const int units = size / 8;
  for (int i = threadIdx.x; i < kM * units; i += kThreads) {
    const int r = i / units, at = i % units * 8;
    const bool inside = r < num_rows;
    const int row = item.first + (inside ? r : 0);
    const int64_t index =
        static_cast<int64_t>(row % a.num_heads) * a.num_tokens + span.start + row / a.num_heads;
    const T* from = at < a.rank ? static_cast<const T*>(a.q_latent) + index * a.rank + at
                                : static_cast<const T*>(a.q_rope) + index * a.rope + at - a.rank;
    cp_async16(q + r * stride + at, from, inside ? 16 : 0);
  }
  for (int r = threadIdx.x; r < kM; r += kThreads) largest[r] = -INFINITY, sums[r] = 0.f;
  const int32_t* table = a.block_tables + static_cast<int64_t>(item.seq) * a.max_blocks;
  const auto slot_of = [&](int p) {
    return static_cast<int64_t>(table[p / a.block_size]) * a.block_size + p % a.block_size;
  };
  const auto load_values = [&](int tile) {
    T* to = latents + tile % kStages * kTile * stride;
    const int first = begin + tile * kTile;
    for (int i = threadIdx.x; i < kTile * units; i += kThreads) {
      const int t = i / units, at = i % units * 8, position = first + t;
      const bool inside = position < end;
      const int64_t slot = slot_of(inside ? position : begin);
      cp_async16(to + t * stride + at, static_cast<const T*>(a.cache) + slot * size + at,
                 inside ? 16 : 0);
    }
  };
  // A warp per token; then four scales at a time, which lie in one block.
  const auto load_codes = [&](int tile) {
    char* const to = stages + tile % kStages * stage_bytes;
    const int first = begin + tile * kTile;
    for (int t = warp; t < kTile; t += kWarps) {
      const bool inside = first + t < end;
      const int64_t slot = slot_of(inside ? first + t : begin);
      const char* codes = static_cast<const char*>(a.cache) + slot * a.rank;
      const char* tail = static_cast<const char*>(a.tail) + slot * a.rope * 2 - a.rank;
      for (int at = lane * 16; at < row_bytes; at += kWarp * 16) {
        cp_async16(to + t * row_bytes + at, (at < a.rank ? codes : tail) + at, inside ? 16 : 0);
      }
    }
    if (threadIdx.x < kTile / 4) {
      const int position = first + static_cast<int>(threadIdx.x) * 4;
      const bool inside = position < end;
      cp_async16(to + kTile * row_bytes + threadIdx.x * 16,
                 a.scales + slot_of(inside ? position : begin), inside ? 16 : 0);
    }
  };
  const auto load = [&](int tile) {
    if constexpr (kCodes) {
      load_codes(tile);
    } else {
      load_values(tile);
    }
  };
  // The tile of values of a stage's codes. Scales behind the last token may be anything.
  const auto unpack = [&](int tile) {
    const char* const from = stages + tile % kStages * stage_bytes;
    const float* const scales = reinterpret_cast<const float*>(from + kTile * row_bytes);
    for (int t = warp; t < kTile; t += kWarps) {
      const float scale = begin + tile * kTile + t < end ? scales[t] : 0.f;
      const char* const row = from + t * row_bytes;
      for (int at = lane * 8; at < size; at += kWarp * 8) {
        T* const to = latents + t * stride + at;
        if (at < a.rank) {
          const uint2 codes = *reinterpret_cast<const uint2*>(row + at);
          *reinterpret_cast<Vec16<T>*>(to) = values_of_codes<T>(codes, scale);
        } else {
          *reinterpret_cast<uint4*>(to) =
              *reinterpret_cast<const uint4*>(row + a.rank + (at - a.rank) * 2);
        }
      }
    }
  };
  if (num_tiles > 0) load(0);
  cp_async_commit();

  float acc[kTilesM][kPairs][2][4] = {};
  for (int tile = 0; tile < num_tiles; ++tile) {
    if (tile + 1 < num_tiles) load(tile + 1);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    if constexpr (kCodes) {
      unpack(tile);
      __syncthreads();
    }
    const T* const rows = latents + tile % S::kTiles * kTile * stride;
    // Scores.
    {
      const int n = warp % kTilesN, m0 = warp / kTilesN * kOwnM;
      float s[kOwnM][4] = {};
      const T* key = rows + (n * 8 + lane % 8) * stride + lane / 8 * 8;
      const T* query = q + (m0 * 16 + lane % 16) * stride + lane / 16 * 8;
#pragma unroll 2
      for (int k = 0; k < size; k += 32) {
        uint32_t b[4];
        ldmatrix4(b, key + k);
#pragma unroll
        for (int m = 0; m < kOwnM; ++m) {
          uint32_t x[4], y[4];
          ldmatrix4(x, query + m * 16 * stride + k);
          ldmatrix4(y, query + m * 16 * stride + k + 16);
          mma_m16n8k16<T>(s[m], x, b[0], b[1]);
          mma_m16n8k16<T>(s[m], y, b[2], b[3]);
        }
      }
#pragma unroll
      for (int m = 0; m < kOwnM; ++m) {
        float* to = scores + ((m0 + m) * 16 + lane / 4) * S::kScoreStride + n * 8 + lane % 4 * 2;
        *reinterpret_cast<float2*>(to) = make_float2(s[m][0], s[m][1]);
        *reinterpret_cast<float2*>(to + 8 * S::kScoreStride) = make_float2(s[m][2], s[m][3]);
      }
    }
    __syncthreads();
    // Softmax so far.
    for (int r = warp; r < kM; r += kWarps) {
      const int token = (item.first + r) / a.num_heads;
      constexpr int kOwn = kTile / kWarp;
      float v[kOwn], top = -INFINITY;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int position = begin + tile * kTile + lane + i * kWarp;
        v[i] = scores[r * S::kScoreStride + lane + i * kWarp] * a.scale_log2;
        const bool seen = r < num_rows && position < end && span.sees(a, token, position);
        if (!seen) v[i] = -INFINITY;
        top = fmaxf(top, v[i]);
        // fmaxf() forgets a NaN, the sum below does not.
      }
      top = fmaxf(warp_max(top), largest[r]);
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        v[i] = v[i] == -INFINITY ? 0.f : exp2f(v[i] - top);
        sum += v[i];
        weights[r * S::kWeightStride + lane + i * kWarp] = Traits<T>::from_float(v[i]);
      }
      sum = warp_sum(sum);
      __syncwarp();  // all have read the largest so far
      if (lane == 0) {
        const float factor = top == -INFINITY ? 1.f : exp2f(largest[r] - top);
        factors[r] = factor;
        sums[r] = sums[r] * factor + sum;
        largest[r] = top;
      }
    }
    __syncthreads();
    // Output.
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
      const float low = factors[m * 16 + lane / 4], high = factors[m * 16 + 8 + lane / 4];
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          acc[m][p][h][0] *= low, acc[m][p][h][1] *= low;
          acc[m][p][h][2] *= high, acc[m][p][h][3] *= high;
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kTile; k += 16) {
      uint32_t x[kTilesM][4];
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
        ldmatrix4(x[m], weights + (m * 16 + lane % 16) * S::kWeightStride + k + lane / 16 * 8);
      }
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        const int column = (warp + p * kWarps) * 16;
        if (column >= a.rank) continue;
        uint32_t b[4];
        ldmatrix4_trans(b, rows + (k + lane % 16) * stride + column + lane / 16 * 8);
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
          mma_m16n8k16<T>(acc[m][p][0], x[m], b[0], b[1]);
          mma_m16n8k16<T>(acc[m][p][1], x[m], b[2], b[3]);
        }
      }
    }
    __syncthreads();
  }
  cp_async_wait<0>();
  __syncthreads();

  const int64_t all_rows = static_cast<int64_t>(a.num_heads) * a.num_tokens;
#pragma unroll
  for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = m * 16 + half * 8 + lane / 4;
      if (r >= num_rows) continue;
      const int row = item.first + r;
      const int64_t index =
          static_cast<int64_t>(row % a.num_heads) * a.num_tokens + span.start + row / a.num_heads;
      const float scale = sums[r] == 0.f ? 0.f : 1.f / sums[r];
      if (a.parts > 1 && warp == 0 && lane % 4 == 0) {
        a.sums[blockIdx.y * all_rows + index] = make_float2(largest[r], sums[r]);
      }
      if (a.parts > 1 && num_tiles == 0) continue;
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int column = (warp + p * kWarps) * 16 + h * 8 + lane % 4 * 2;
          if (column >= a.rank) continue;
          const float2 y = make_float2(acc[m][p][h][half * 2], acc[m][p][h][half * 2 + 1]);
          if (a.parts > 1) {
            float* to = a.partial + (blockIdx.y * all_rows + index) * a.rank + column;
            *reinterpret_cast<float2*>(to) = y;
          } else {
            T* to = static_cast<T*>(a.out) + index * a.rank + column;
            *reinterpret_cast<typename Traits<T>::Pair*>(to) =
                Traits<T>::from_float2(make_float2(y.x * scale, y.y * scale));
          }
        }
      }
    }
  }
}

// The parts of a row added up, in their order. A block per row.
template <class T>
__global__ void __launch_bounds__(128) add_parts_kernel(const LatentArgs a) {
  __shared__ float weights[kMaxParts];
  pdl_trigger();
  pdl_wait();
  const int64_t index = blockIdx.x;
  const int64_t all_rows = static_cast<int64_t>(a.num_heads) * a.num_tokens;
  if (index % a.num_tokens >= a.cu_seqlens_q[a.num_seqs]) return;
  if (threadIdx.x < kWarp) {
    const int part = threadIdx.x;
    float2 sum = make_float2(-INFINITY, 0.f);
    if (part < a.parts) sum = a.sums[part * all_rows + index];
    const float top = warp_max(sum.x);
    float weight = sum.x == -INFINITY ? 0.f : exp2f(sum.x - top);
    const float total = warp_sum(weight * sum.y);
    weights[part] = total == 0.f ? 0.f : weight / total;
  }
  __syncthreads();
  for (int column = threadIdx.x; column < a.rank; column += blockDim.x) {
    float y = 0.f;
    for (int part = 0; part < a.parts; ++part) {
      const float weight = weights[part];
      if (weight == 0.f) continue;  // nobody wrote that part
      y = fmaf(weight, a.partial[(part * all_rows + index) * a.rank + column], y);
    }
    static_cast<T*>(a.out)[index * a.rank + column] = Traits<T>::from_float(y);
  }
}

// A slot's latent, value by value.
template <class T, bool kCodes>
struct Latent {
  const T* values;  // of codes: so that values[L] is the first of the tail
  const uint8_t* codes;
  float unit;
  int rank;

  __device__ __forceinline__ Latent(const LatentArgs& a, int64_t slot) : rank(a.rank) {
    if constexpr (kCodes) {
      values = static_cast<const T*>(a.tail) + slot * a.rope - rank;
      codes = static_cast<const uint8_t*>(a.cache) + slot * rank;
      unit = a.scales[slot] * kE4m3Unit;
    } else {
      values = static_cast<const T*>(a.cache) + slot * (rank + a.rope);
    }
  }
  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (kCodes) {
      if (i < rank) return __low2float(e4m3_halves(uint32_t{codes[i]} << 8)) * unit;
    }
    return Traits<T>::to_float(values[i]);
  }
};

// Any dtype and size: a block per row, a warp per score.
template <class T, bool kCodes>
__global__ void __launch_bounds__(kThreads) latent_attention_plain_kernel(const LatentArgs a) {
  extern __shared__ float query[];  // [L + R], then the output [L]
  __shared__ float scores[kWarps];
  const int size = a.rank + a.rope;
  float* const out = query + size;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  pdl_trigger();
  pdl_wait();
  const int64_t index = blockIdx.x;
  const int token = static_cast<int>(index % a.num_tokens);
  if (token >= a.cu_seqlens_q[a.num_seqs]) return;
  int seq = 0;
  while (a.cu_seqlens_q[seq + 1] <= token) ++seq;
  const LatentSpan span(a, seq);
  if (span.length > a.max_span_len) return;
  for (int i = threadIdx.x; i < size; i += kThreads) {
    query[i] = Traits<T>::to_float(
        i < a.rank ? static_cast<const T*>(a.q_latent)[index * a.rank + i]
                   : static_cast<const T*>(a.q_rope)[index * a.rope + i - a.rank]);
  }
  for (int i = threadIdx.x; i < a.rank; i += kThreads) out[i] = 0.f;
  const int32_t* table = a.block_tables + static_cast<int64_t>(seq) * a.max_blocks;
  const auto latent = [&](int p) {
    const int64_t slot =
        static_cast<int64_t>(table[p / a.block_size]) * a.block_size + p % a.block_size;
    return Latent<T, kCodes>(a, slot);
  };
  float largest = -INFINITY, sum = 0.f;
  const int own = token - span.start, end = span.last(own);
  __syncthreads();
  for (int first = 0; first < end; first += kWarps) {
    const int p = first + warp;
    float score = -INFINITY;
    if (p < end && span.sees(a, own, p)) {
      const Latent<T, kCodes> row = latent(p);
      float dot = 0.f;
      for (int i = lane; i < size; i += kWarp) dot = fmaf(query[i], row[i], dot);
      score = warp_sum(dot) * a.scale_log2;
    }
    if (lane == 0) scores[warp] = score;
    __syncthreads();
    float top = largest;
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, scores[w]);
    const float factor = top == -INFINITY ? 1.f : exp2f(largest - top);
    sum *= factor;
    float weights[kWarps];
    for (int w = 0; w < kWarps; ++w) {
      weights[w] = scores[w] == -INFINITY ? 0.f : exp2f(scores[w] - top);
      sum += weights[w];
    }
    largest = top;
    for (int i = threadIdx.x; i < a.rank; i += kThreads) {
      float y = out[i] * factor;
      for (int w = 0; w < kWarps; ++w) {
        if (scores[w] == -INFINITY) continue;
        y = fmaf(weights[w], latent(first + w)[i], y);
      }
      out[i] = y;
    }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < a.rank; i += kThreads) {
    static_cast<T*>(a.out)[index * a.rank + i] =
        Traits<T>::from_float(sum == 0.f ? 0.f : out[i] / sum);
  }
}

LatentKernel kernel_of(const LatentAttentionParams& p, const AttentionLimits& limits) {
  LatentProblem problem;
  problem.dtype = p.dtype;
  problem.num_heads = p.num_heads;
  problem.latent_rank = p.latent_rank;
  problem.rope_size = p.rope_size;
  problem.has_codes = p.scales != nullptr;
  problem.block_size = p.block_size;
  problem.num_blocks = p.num_blocks;
  problem.num_tokens = p.batch.num_tokens;
  problem.max_query_len = limits.max_query_len;
  problem.max_shared_bytes = max_shared_bytes();
  problem.is_batch_invariant = is_batch_invariant;
  return select_latent_attention(problem, compute_capability(),
                                 forced_candidate("latent_attention"));
}

// Rows of a block of the mma kernel; 0: another kernel's.
int rows_of_block(LatentKernel kernel) {
  return kernel == LatentKernel::kMma16   ? 16
         : kernel == LatentKernel::kMma32 ? 32
         : kernel == LatentKernel::kMma64 ? 64
                                          : 0;
}

int64_t most_items(const LatentAttentionParams& p, int rows) {
  const int64_t all = p.batch.num_tokens * p.num_heads;
  return std::min(all, all / rows + p.batch.num_seqs);
}

// How many parts a context has: those that keep all multiprocessors busy.
int num_parts(const LatentAttentionParams& p, const AttentionLimits& limits, LatentKernel kernel) {
  const int rows = rows_of_block(kernel);
  if (rows == 0 || is_batch_invariant) return 1;
  const int64_t items = std::max<int64_t>(1, most_items(p, rows));
  const int64_t most = std::min<int64_t>(kMaxParts, ceil_div(limits.max_context_len, kLeastPart));
  return static_cast<int>(std::clamp<int64_t>(num_multiprocessors() / items, 1, most));
}

// How the sm90 kernel shares a call out. Parts of equal work where blocks would be idle; not in the
// batch-invariant mode, nor where many groups of rows read contexts that L2 does not hold: side by
// side from the first token on they read them together.
LatentPlan plan_sm90(const LatentAttentionParams& p, const AttentionLimits& limits, int num_sms) {
  constexpr int64_t kLeastTiles = 2, kTile = 64;  // of keys: as its kernel's
  constexpr int64_t kMaxGroups = 16;              // a multiprocessor's, that are worth looking for
  constexpr int64_t kLongContext = 16384, kMaxLongGroups = 4;
  LatentPlan plan;
  plan.lanes = p.num_heads > kLatentRows ? 2 : 1;
  const int64_t rows = p.num_heads * limits.max_query_len;  // of a span
  const int64_t group_rows = kLatentRows * plan.lanes, units = num_sms / plan.lanes;
  const int64_t groups = p.batch.num_tokens * p.num_heads / group_rows + p.batch.num_seqs;
  const bool is_long = limits.max_context_len > kLongContext;
  plan.reads_once = rows <= group_rows;
  plan.shares = !is_batch_invariant &&
                (plan.reads_once || groups <= units * (is_long ? kMaxLongGroups : kMaxGroups));
  plan.place_rows = static_cast<int>(std::min<int64_t>(rows, kLatentRows));
  const int64_t tiles = std::max<int64_t>(1, ceil_div(limits.max_context_len, kTile));
  plan.units = static_cast<int>(plan.shares ? std::min(units, ceil_div(groups * tiles, kLeastTiles))
                                            : groups);
  return plan;
}

// Rows of partial results of all parts.
int64_t partial_rows(const LatentAttentionParams& p, const AttentionLimits& limits,
                     LatentKernel kernel) {
  if (kernel == LatentKernel::kSm90) {
    const LatentPlan plan = plan_sm90(p, limits, num_multiprocessors());
    return plan.num_places() * plan.place_rows;
  }
  const int parts = num_parts(p, limits, kernel);
  return parts == 1 ? 0 : parts * p.num_heads * p.batch.num_tokens;
}

template <class T, int kM, int kTile, bool kCodes>
Status run_mma(const LatentArgs& a, const LatentAttentionParams& p, const Launch& launch_on) {
  REGATTA_RETURN_IF_ERROR(
      launch(latent_attention_kernel<T, kM, kTile, kCodes>,
             LaunchConfig(launch_on, grid_of(most_items(p, kM), a.parts), kThreads,
                          latent_tile_bytes(kM, kTile, kCodes, a.rank, a.rope)),
             "latent_attention", a));
  if (a.parts == 1) return {};
  return launch(add_parts_kernel<T>, {launch_on, p.num_heads * p.batch.num_tokens, 128},
                "latent_attention_parts", a);
}

template <class T, bool kCodes>
Status run(const LatentArgs& a, const LatentAttentionParams& p, LatentKernel kernel,
           const Launch& launch_on) {
  if constexpr (sizeof(T) == 2) {
    switch (rows_of_block(kernel)) {
      case 16:
        return run_mma<T, 16, 64, kCodes>(a, p, launch_on);
      case 32:
        return run_mma<T, 32, 64, kCodes>(a, p, launch_on);
      case 64:
        return run_mma<T, 64, 32, kCodes>(a, p, launch_on);
      default:
        break;
    }
  }
  return launch(latent_attention_plain_kernel<T, kCodes>,
                {launch_on, p.num_heads * p.batch.num_tokens, kThreads,
                 (2 * p.latent_rank + p.rope_size) * 4},
                "latent_attention", a);
}

}  // namespace

int64_t latent_attention_workspace_bytes(const LatentAttentionParams& p,
                                         const AttentionLimits& limits) {
  return partial_rows(p, limits, kernel_of(p, limits)) *
         (p.latent_rank * 4 + static_cast<int64_t>(sizeof(float2)));
}

Status latent_attention(const LatentAttentionParams& p, const AttentionLimits& limits,
                        void* workspace, const Launch& launch_on) {
  if (p.batch.num_tokens == 0) return {};
  LatentArgs a = {};
  a.q_latent = p.q_latent;
  a.q_rope = p.q_rope;
  a.cache = p.cache;
  a.tail = p.tail;
  a.scales = p.scales;
  a.out = p.out;
  a.cu_seqlens_q = p.batch.cu_seqlens_q;
  a.context_lens = p.batch.context_lens;
  a.block_tables = p.batch.block_tables;
  a.tree_mask = reinterpret_cast<const uint32_t*>(p.batch.tree_mask);
  a.tree_words = p.batch.tree_words;
  a.max_blocks = p.batch.max_blocks;
  a.num_tokens = static_cast<int>(p.batch.num_tokens);
  a.num_seqs = static_cast<int>(p.batch.num_seqs);
  a.num_heads = static_cast<int>(p.num_heads);
  a.rank = static_cast<int>(p.latent_rank);
  a.rope = static_cast<int>(p.rope_size);
  a.block_size = static_cast<int>(p.block_size);
  a.max_span_len = static_cast<int>(limits.max_query_len);
  a.scale_log2 = p.softmax_scale * 1.44269504f;
  const LatentKernel kernel = kernel_of(p, limits);
  const int64_t rows = partial_rows(p, limits, kernel);
  if (rows > 0) {
    a.partial = static_cast<float*>(workspace);
    a.sums = reinterpret_cast<float2*>(a.partial + rows * p.latent_rank);
  }
  if (kernel == LatentKernel::kSm90) {
    return launch_latent_attention_sm90(a, plan_sm90(p, limits, num_multiprocessors()), p.dtype,
                                        p.num_blocks * p.block_size, launch_on);
  }
  a.parts = num_parts(p, limits, kernel);
  return dispatch_dtype(p.dtype, "latent_attention", [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    return p.scales != nullptr ? run<T, true>(a, p, kernel, launch_on)
                               : run<T, false>(a, p, kernel, launch_on);
  });
}

}  // namespace regatta::cuda
