// See experts.h: the choice, and rows sorted by expert.
//
// Architectures: all; float32, bf16, fp16. Of few tokens one block does it all. Else a warp chooses
// for a token: scores in shared memory, K rounds of a warp's maximum. Then a counting sort whose
// blocks need nothing of each other: each takes a chunk of pairs, counts the experts of all pairs
// and of those ahead of its own, and copies its rows to their places, a warp per row. Of many pairs
// a first launch counts each chunk, and the blocks add the counts up. Ranks are counted, not drawn
// by atomics: the same pairs always go to the same places. Bound: bytes, 2 P H values. Source: own.
#include <algorithm>

#include "cuda/common.cuh"
#include "cuda/experts/choose.cuh"
#include "cuda/experts/experts.h"

namespace regatta::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kFewPairs = 4096;    // up to which every block counts all ids itself
constexpr int kFewChunk = kWarps;  // pairs of a block: one for each warp
constexpr int kMostChunk = 256;
constexpr int kManyPairs =
    16384;  // from which on chunks are of the most pairs: all counts are read
constexpr int kChooseWarps = 4;
constexpr int kAloneTokens = 4, kAlonePairs = 64;  // of which one block chooses and sorts

struct Args {
  const int32_t* ids;
  const char* x;
  char* sorted;
  int32_t* ends;
  int32_t* places;
  const int32_t* counts;  // [chunks, E], or null
  int num_pairs, top_k, num_experts, chunk;
  int64_t row_bytes;
};

__global__ void __launch_bounds__(kChooseWarps* kWarp) choose_kernel(const ChooseArgs a) {
  __shared__ float scores[kChooseWarps][kMaxExperts], choices[kChooseWarps][kMaxExperts];
  const int warp = threadIdx.x / kWarp, token = blockIdx.x * kChooseWarps + warp;
  pdl_trigger();
  pdl_wait();
  if (token < a.num_tokens) choose(a, token, scores[warp], choices[warp]);
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
      int sum = e < num_experts ? all[e] : 0;
#pragma unroll
      for (int o = 1; o < kWarp; o *= 2) {
        const int left = __shfl_up_sync(~0u, sum, o);
        if (static_cast<int>(threadIdx.x) >= o) sum += left;
      }
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
    int rank = 0;  // pairs of this expert that stand ahead within the chunk
    for (int j0 = 0; j0 < i; j0 += kWarp) {
      const int j = j0 + lane;
      rank += __popc(__ballot_sync(~0u, j < i && mine[j] == e));
    }
    copy_row(a, first + i, ends[e] - all[e] + ahead[e] + rank);
  }
}

// All of it by one block: a place is the number of pairs of lower experts, and of the same expert's
// ahead.
__global__ void __launch_bounds__(kThreads)
    choose_and_sort_kernel(const ChooseArgs choice, const Args a) {
  __shared__ float scores[kAloneTokens][kMaxExperts], choices[kAloneTokens][kMaxExperts];
  __shared__ int ids[kAlonePairs];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int thread = static_cast<int>(threadIdx.x);
  pdl_trigger();
  pdl_wait();
  if (warp < choice.num_tokens) choose(choice, warp, scores[warp], choices[warp]);
  __syncthreads();
  if (thread < a.num_pairs) ids[thread] = a.ids[thread];
  __syncthreads();
  for (int e = thread; e < a.num_experts; e += kThreads) {
    int end = 0;
    for (int j = 0; j < a.num_pairs; ++j) end += ids[j] <= e;
    a.ends[e] = end;
  }
  for (int i = warp; i < a.num_pairs; i += kWarps) {
    int place = 0;
    for (int j0 = 0; j0 < a.num_pairs; j0 += kWarp) {
      const int j = j0 + lane;
      const bool stands_ahead = j < a.num_pairs && (ids[j] < ids[i] || (ids[j] == ids[i] && j < i));
      place += __popc(__ballot_sync(~0u, stands_ahead));
    }
    copy_row(a, i, place);
  }
}

}  // namespace

namespace {

// Pairs of a block. Smaller ones keep more multiprocessors at work.
int64_t chunk_of(int64_t num_pairs) {
  return num_pairs <= kFewPairs ? kFewChunk : num_pairs < kManyPairs ? kMostChunk / 4 : kMostChunk;
}

}  // namespace

int64_t sort_counts(int64_t num_pairs, int64_t num_experts) {
  return num_pairs <= kFewPairs ? 0 : ceil_div(num_pairs, chunk_of(num_pairs)) * num_experts;
}

Status choose_and_sort(const ChooseAndSortParams& p, const Launch& launch_on) {
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
  a.chunk = static_cast<int>(chunk_of(pairs));
  a.row_bytes = p.hidden_size * dtype_size(p.dtype);
  LaunchConfig config;
  config.block = dim3(kThreads);
  config.stream = launch_on.stream;
  config.pdl = launch_on.pdl;
  if (p.choose.num_tokens <= kAloneTokens && pairs <= kAlonePairs) {
    return launch(choose_and_sort_kernel, config, "choose_and_sort", p.choose, a);
  }
  config.grid = dim3(static_cast<unsigned>(ceil_div(p.choose.num_tokens, kChooseWarps)));
  config.block = dim3(kChooseWarps * kWarp);
  Status status = launch(choose_kernel, config, "choose", p.choose);
  if (!status.ok()) return status;
  config.grid = dim3(static_cast<unsigned>(ceil_div(pairs, int64_t{a.chunk})));
  config.block = dim3(kThreads);
  if (!few) {
    status = launch(count_kernel, config, "count_experts", a.ids, p.counts, a.num_pairs,
                    a.num_experts, a.chunk);
    if (!status.ok()) return status;
  }
  return launch(sort_kernel, config, "sort_by_expert", a);
}

}  // namespace regatta::cuda
