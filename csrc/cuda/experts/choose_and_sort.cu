// See experts.h: the choice, and rows sorted by expert.
//
// Architectures: all; float32, bf16, fp16. A warp chooses for a token: its lanes sort their
// experts, and K times the best of all lanes' first ones is taken. A step's tokens (up to 64 on
// sm_90; 8 elsewhere) are one launch: the blocks of a cluster choose for a share of the tokens each
// and tell each other whom, so that each knows all pairs. Clusters all do the same, and copy other
// rows: a pair's place is how many pairs stand ahead of it, which a warp counts. The row travels
// meanwhile: whose it is is known before the choice. Else the choice is a launch, and then a
// counting sort whose blocks need nothing of each other: each takes a chunk of pairs, counts the
// experts of all pairs and of those ahead of its own, and copies its rows to their places, a warp
// per row. Of many pairs a launch between counts each chunk, and the blocks add the counts up.
// Ranks are counted, not drawn by atomics: the same pairs always go to the same places. Bound:
// bytes, 2 P H values; for a step latency. Source: own.
#include <algorithm>
#include <type_traits>

#include "cuda/common.cuh"
#include "cuda/experts/choose.cuh"
#include "cuda/experts/experts.h"
#include "cuda/experts/forced.h"
#include "cuda/experts/select.h"
#include "cuda/hopper.cuh"

namespace regatta::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kFewChunk = kWarps;  // pairs of a block: one for each warp
constexpr int kMostChunk = 256;
constexpr int kManyPairs =
    16384;  // from which on chunks are of the most pairs: all counts are read
constexpr int kChooseWarps = 4;

// Of one launch.
constexpr int kTogetherWarps = 16;
constexpr int kTogetherThreads = kTogetherWarps * kWarp;
constexpr int kMostBlocks = 8;    // of a cluster, on every device that has them
constexpr int kPieceVectors = 4;  // of 16 bytes that a lane copies at a time
constexpr int kPieceBytes = kPieceVectors * kWarp * 16;
constexpr int kRound = kWarp * 4;    // pairs that a warp looks at at a time
static_assert(kFewPairs < 1 << 16);  // a pair and its expert are a word

struct Args {
  const int32_t* ids;
  const char* x;
  char* sorted;
  int32_t* ends;
  int32_t* places;
  const int32_t* counts;  // [chunks, E], or null
  int num_pairs, top_k, num_experts, num_own, chunk;
  int64_t row_bytes;
};

// A token's choice into the lists.
__device__ __forceinline__ void keep(const ChooseArgs& a, int token, const Choice& choice) {
  const int lane = threadIdx.x % kWarp, top_k = static_cast<int>(a.router.top_k);
  if (lane >= top_k) return;
  a.ids[token * top_k + lane] = own_number(a, choice.id);
  a.shares[token * top_k + lane] = choice.share;
}

template <int kPerLane>
__global__ void __launch_bounds__(kChooseWarps* kWarp) choose_kernel(const ChooseArgs a) {
  __shared__ float scores[kChooseWarps][kPerLane * kWarp], choices[kChooseWarps][kPerLane * kWarp];
  const int warp = threadIdx.x / kWarp, token = blockIdx.x * kChooseWarps + warp;
  pdl_trigger();
  pdl_wait();
  if (token >= a.num_tokens) return;
  float logits[kPerLane];
  load_logits(a, token, logits);
  keep(a, token, choose_among(a, logits, scores[warp], choices[warp]));
}

__global__ void __launch_bounds__(kThreads)
    count_kernel(const int32_t* ids, int32_t* counts, int num_pairs, int num_experts, int chunk) {
  __shared__ int count[kMaxExperts];
  for (int e = threadIdx.x; e < num_experts; e += kThreads) count[e] = 0;
  __syncthreads();
  pdl_trigger();
  pdl_wait();
  const int thread = static_cast<int>(threadIdx.x), pair = blockIdx.x * chunk + thread;
  if (thread < chunk && pair < num_pairs) atomicAdd(&count[__ldcg(ids + pair)], 1);
  __syncthreads();
  for (int e = threadIdx.x; e < num_experts; e += kThreads) {
    counts[static_cast<int64_t>(blockIdx.x) * num_experts + e] = count[e];
  }
}

// all[e]: pairs of expert e; ahead[e]: of them those of earlier chunks.
__device__ __forceinline__ void count_all(const Args& a, int* all, int* ahead) {
  for (int e = threadIdx.x; e < a.num_experts; e += kThreads) all[e] = ahead[e] = 0;
  __syncthreads();
  if (a.counts == nullptr) {
    const int first = blockIdx.x * a.chunk;
    for (int p = threadIdx.x; p < a.num_pairs; p += kThreads) {
      const int e = __ldcg(a.ids + p);
      atomicAdd(&all[e], 1);
      if (p < first) atomicAdd(&ahead[e], 1);
    }
  } else {
    // A thread adds up one expert's counts of every so many chunks.
    const int chunks = gridDim.x;
    const int lanes = max(1, kThreads / a.num_experts);
    const int lane = threadIdx.x / a.num_experts;
    for (int e = threadIdx.x % a.num_experts; lane < lanes && e < a.num_experts; e += kThreads) {
      int sum = 0, before = 0;
      for (int c = lane; c < chunks; c += lanes) {
        const int n = __ldcg(a.counts + static_cast<int64_t>(c) * a.num_experts + e);
        sum += n;
        if (c < static_cast<int>(blockIdx.x)) before += n;
      }
      atomicAdd(&all[e], sum);
      atomicAdd(&ahead[e], before);
    }
  }
  __syncthreads();
}

// ends[e] = all[0] + ... + all[e], by the first warp.
__device__ __forceinline__ void add_up(const int* all, int* ends, int num_experts) {
  if (threadIdx.x < kWarp) {
    int before = 0;
    for (int e0 = 0; e0 < num_experts; e0 += kWarp) {
      const int e = e0 + threadIdx.x;
      const int sum =
          warp_inclusive_scan(e < num_experts ? all[e] : 0, static_cast<int>(threadIdx.x));
      if (e < num_experts) ends[e] = before + sum;
      before += __shfl_sync(~0u, sum, kWarp - 1);
    }
  }
  __syncthreads();
}

// A pair's row of x to its place, by a warp.
__device__ __forceinline__ void copy_row(const Args& a, int pair, int place) {
  const int lane = threadIdx.x % kWarp;
  const char* from = a.x + pair / a.top_k * a.row_bytes;
  char* to = a.sorted + place * a.row_bytes;
  if (lane == 0) a.places[pair] = place;
  if (a.row_bytes % 16 == 0) {
    constexpr int kAtOnce = 8;  // loads on their way
    for (int64_t start = lane * 16; start < a.row_bytes; start += kAtOnce * kWarp * 16) {
      uint4 v[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t at = start + i * kWarp * 16;
        if (at < a.row_bytes) v[i] = __ldcg(reinterpret_cast<const uint4*>(from + at));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t at = start + i * kWarp * 16;
        if (at < a.row_bytes) *reinterpret_cast<uint4*>(to + at) = v[i];
      }
    }
  } else {
    for (int64_t at = lane * 2; at < a.row_bytes; at += kWarp * 2) {
      *reinterpret_cast<uint16_t*>(to + at) = *reinterpret_cast<const uint16_t*>(from + at);
    }
  }
}

__global__ void __launch_bounds__(kThreads) sort_kernel(const Args a) {
  __shared__ int all[kMaxExperts], ahead[kMaxExperts], ends[kMaxExperts], mine[kMostChunk];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int first = blockIdx.x * a.chunk, count = min(a.chunk, a.num_pairs - first);
  const int thread = static_cast<int>(threadIdx.x);
  pdl_trigger();
  pdl_wait();
  if (thread < count) mine[thread] = __ldcg(a.ids + first + thread);
  count_all(a, all, ahead);
  add_up(all, ends, a.num_experts);
  if (blockIdx.x == 0) {
    for (int e = thread; e < a.num_experts; e += kThreads) a.ends[e] = ends[e];
  }
  for (int i = warp; i < count; i += kWarps) {
    const int e = mine[i];
    if (e >= a.num_own) {
      if (lane == 0) a.places[first + i] = -1;
      continue;
    }
    int rank = 0;  // pairs of this expert that stand ahead within the chunk
    for (int j0 = 0; j0 < i; j0 += kWarp) {
      const int j = j0 + lane;
      rank += __popc(__ballot_sync(~0u, j < i && mine[j] == e));
    }
    copy_row(a, first + i, ends[e] - all[e] + ahead[e] + rank);
  }
}

// Part of a row on its way: a warp's.
struct Piece {
  uint4 v[kPieceVectors];

  __device__ __forceinline__ void load(const Args& a, int pair, int64_t start) {
    const char* from = a.x + pair / a.top_k * a.row_bytes;
#pragma unroll
    for (int i = 0; i < kPieceVectors; ++i) {
      const int64_t at = start + (i * kWarp + threadIdx.x % kWarp) * 16;
      if (at < a.row_bytes) v[i] = __ldcg(reinterpret_cast<const uint4*>(from + at));
    }
  }
  __device__ __forceinline__ void store(const Args& a, int place, int64_t start) const {
    char* to = a.sorted + place * a.row_bytes;
#pragma unroll
    for (int i = 0; i < kPieceVectors; ++i) {
      const int64_t at = start + (i * kWarp + threadIdx.x % kWarp) * 16;
      if (at < a.row_bytes) *reinterpret_cast<uint4*>(to + at) = v[i];
    }
  }
};

// How many of these words are lower, by a warp. count: whole rounds.
__device__ __forceinline__ int count_below(const uint32_t* words, int count, uint32_t word) {
  int below = 0;
#pragma unroll 4
  for (int at = threadIdx.x % kWarp * 4; at < count; at += kRound) {
    const uint4 four = *reinterpret_cast<const uint4*>(words + at);
    below += (four.x < word) + (four.y < word) + (four.z < word) + (four.w < word);
  }
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(~0u, below);
#else
#pragma unroll
  for (int o = kWarp / 2; o > 0; o /= 2) below += __shfl_xor_sync(~0u, below, o);
  return below;
#endif
}

// grid: clusters of `blocks` blocks. Shared memory: the pairs as words in the order of their
// places, whole rounds of them; then each warp's room to choose in.
template <int kPerLane>
__global__ void __launch_bounds__(kTogetherThreads)
    choose_and_sort_kernel(const ChooseArgs choice, const Args a, int blocks) {
  extern __shared__ __align__(16) uint32_t words[];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int rank = blocks > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int num_words = round_up(a.num_pairs, kRound);
  const bool has_groups = choice.router.top_groups < choice.router.num_groups;
  float* const scores =
      reinterpret_cast<float*>(words + num_words) + warp * (has_groups ? 2 : 1) * kPerLane * kWarp;
  // Before another block's shared memory is written, it must have begun.
  if (blocks > 1) cluster_arrive_relaxed();
  for (int i = a.num_pairs + threadIdx.x; i < num_words; i += kTogetherThreads) words[i] = ~0u;
  pdl_trigger();
  pdl_wait();
  // Warps take pieces that follow each other, but warps of a block are far apart: of few pieces
  // every block has some.
  const int pieces = static_cast<int>(ceil_div(a.row_bytes, int64_t{kPieceBytes}));
  const int own = warp * gridDim.x + blockIdx.x, warps = gridDim.x * kTogetherWarps;
  const int each = ceil_div(a.num_pairs * pieces, warps);
  const int end = min((own + 1) * each, a.num_pairs * pieces);
  int task = own * each;
  Piece piece;
  if (task < end) piece.load(a, task / pieces, task % pieces * kPieceBytes);
  if (blocks > 1) cluster_wait();
  for (int token = warp * blocks + rank; token < choice.num_tokens;
       token += blocks * kTogetherWarps) {
    float logits[kPerLane];
    load_logits(choice, token, logits);
    const Choice chosen = choose_among(choice, logits, scores, scores + kPerLane * kWarp);
    const int pair = token * a.top_k + lane;
    const uint32_t word = static_cast<uint32_t>(own_number(choice, chosen.id)) << 16 | pair;
    if (lane < a.top_k) {
      if (blocks == 1) words[pair] = word;
      for (int to = 0; blocks > 1 && to < blocks; ++to) store_cluster_word(words + pair, to, word);
    }
    if (static_cast<int>(blockIdx.x) < blocks) keep(choice, token, chosen);
    __syncwarp();  // the room is used again
  }
  if (blocks > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
  int place = 0;
  for (bool first = true; task < end; ++task, first = false) {
    const int pair = task / pieces, part = task % pieces;
    if (static_cast<int>(words[pair] >> 16) >= a.num_own) {
      if (part == 0 && lane == 0) a.places[pair] = -1;
      continue;
    }
    if (!first) piece.load(a, pair, part * kPieceBytes);
    if (first || part == 0) place = count_below(words, num_words, words[pair]);
    piece.store(a, place, part * kPieceBytes);
    if (part == 0 && lane == 0) a.places[pair] = place;
  }
  for (int e = own; e < a.num_experts; e += warps) {
    const int until = count_below(words, num_words, static_cast<uint32_t>(e + 1) << 16);
    if (lane == 0) a.ends[e] = until;
  }
}

// Calls with(kPerLane) for this many experts: of a lane, as a type.
template <class With>
Status dispatch_experts(int64_t num_experts, With&& with) {
  if (num_experts <= 2 * kWarp) return with(std::integral_constant<int, 2>());
  if (num_experts <= 4 * kWarp) return with(std::integral_constant<int, 4>());
  if (num_experts <= 8 * kWarp) return with(std::integral_constant<int, 8>());
  return with(std::integral_constant<int, static_cast<int>(kMaxExperts) / kWarp>());
}

// Pairs of a block. Smaller ones keep more multiprocessors at work.
int64_t chunk_of(int64_t num_pairs) {
  return num_pairs <= kFewPairs ? kFewChunk : num_pairs < kManyPairs ? kMostChunk / 4 : kMostChunk;
}

Status run_together(const ChooseArgs& choice, const Args& a, const Launch& launch_on) {
  int blocks = 1;  // of a cluster
  while (blocks < kMostBlocks && blocks * kTokensOfBlock < choice.num_tokens) blocks *= 2;
  const int64_t pieces = a.num_pairs * ceil_div(a.row_bytes, int64_t{kPieceBytes});
  const int64_t clusters = std::min<int64_t>(ceil_div(pieces, int64_t{kTogetherWarps} * blocks),
                                             std::max(1, num_multiprocessors() / blocks));
  LaunchConfig config(launch_on, clusters * blocks, kTogetherThreads);
  config.cluster_x = static_cast<unsigned>(blocks);
  const bool has_groups = choice.router.top_groups < choice.router.num_groups;
  return dispatch_experts(choice.router.num_experts, [&](auto per_lane) {
    const int room = kTogetherWarps * (has_groups ? 2 : 1) * per_lane() * kWarp;
    config.shared_bytes = (round_up(a.num_pairs, kRound) + room) * 4;
    return launch(choose_and_sort_kernel<per_lane()>, config, "choose_and_sort", choice, a, blocks);
  });
}

}  // namespace

int64_t sort_counts(int64_t num_pairs, int64_t num_experts) {
  return num_pairs <= kFewPairs ? 0 : ceil_div(num_pairs, chunk_of(num_pairs)) * num_experts;
}

bool sorts_together(const ChooseAndSortParams& p) {
  ExpertProblem problem;
  problem.dtype = p.dtype;
  problem.num_tokens = p.choose.num_tokens;
  problem.hidden_size = p.hidden_size;
  problem.top_k = p.choose.router.top_k;
  return select_sort(problem, experts_capability(compute_capability())) == SortKernel::kTogether;
}

Status choose_and_sort(const ChooseAndSortParams& p, const Launch& launch_on) {
  return choose_and_sort(p, sorts_together(p), launch_on);
}

Status choose_and_sort(const ChooseAndSortParams& p, bool together, const Launch& launch_on) {
  const Router& router = p.choose.router;
  if (router.num_experts > kMaxExperts || router.top_k > kMaxChosen || router.num_groups > kWarp) {
    return Status::error("choose_and_sort: at most " + std::to_string(kMaxExperts) + " experts, " +
                         std::to_string(kMaxChosen) + " of them chosen, in " +
                         std::to_string(kWarp) + " groups");
  }
  const int64_t pairs = p.choose.num_tokens * router.top_k;
  if (pairs == 0) return {};
  const bool few = sort_counts(pairs, router.num_experts) == 0;
  Args a = {};
  a.ids = p.choose.ids;
  a.x = static_cast<const char*>(p.x);
  a.sorted = static_cast<char*>(p.sorted);
  a.ends = p.ends;
  a.places = p.places;
  a.counts = few ? nullptr : p.counts;
  a.num_pairs = static_cast<int>(pairs);
  a.top_k = static_cast<int>(router.top_k);
  a.num_experts = static_cast<int>(router.num_experts);
  a.num_own = p.choose.num_own;
  a.chunk = static_cast<int>(chunk_of(pairs));
  a.row_bytes = p.hidden_size * dtype_size(p.dtype);
  if (together) return run_together(p.choose, a, launch_on);
  REGATTA_RETURN_IF_ERROR(dispatch_experts(router.num_experts, [&](auto per_lane) {
    return launch(choose_kernel<per_lane()>,
                  {launch_on, ceil_div(p.choose.num_tokens, kChooseWarps), kChooseWarps * kWarp},
                  "choose", p.choose);
  }));
  const LaunchConfig config(launch_on, ceil_div(pairs, int64_t{a.chunk}), kThreads);
  if (!few) {
    REGATTA_RETURN_IF_ERROR(launch(count_kernel, config, "count_experts", a.ids, p.counts,
                                   a.num_pairs, a.num_experts, a.chunk));
  }
  return launch(sort_kernel, config, "sort_by_expert", a);
}

}  // namespace regatta::cuda
