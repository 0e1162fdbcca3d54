// Picks one token per row of logits without sorting the row.
//
// Architectures: sm_75 and later (clusters of blocks per row on sm_90). Logits are float32 [L, V].
// Definition: regatta/sample.h; tokens are taken in descending order of logit, lower index first.
// Algorithm, per row, by one block or a cluster of blocks that each hold a slice
//  1. Largest logit and its lowest index (greedy rows end here), smallest finite logit.
//  2. Histogram over 2048 linear bins of d = (largest - logit) / temperature: counts, and weights
//     as 24-bit integers, whose sums do not depend on the order of atomics. Prefix sums tell in
//     which bins the borders of top-k, top-p, typical_p and min_p, and the drawn token, can lie.
//  3. Only these bins' tokens (a few hundred of 128k) are gathered, sorted, and resolved exactly.
//  If
//     too many share them, a radix selection over the bits of the logits replaces this step.
// Source: sort-free sampling by threshold search is FlashInfer's idea (2025); ours is exact, as the
// CPU twin: the same token for the same seed, up to the rounding of exp().
// Bound: three reads of the row.
#include <algorithm>
#include <cfloat>
#include <cstddef>

#include "cuda/hopper.cuh"
#include "regatta/philox.h"
#include "row.cuh"

namespace regatta::cuda {
namespace {

constexpr int kBins = 2 * kThreads;
constexpr int kMaxCandidates = 4096;
constexpr int kFewCandidates = 1024;  // where a block has 64 KiB of shared memory (sm_75)
constexpr float kRange = 40.f;        // weights below e^-40 are counted but weigh nothing
constexpr float kOne = 16777216.f;    // 2^24: weights of a bin are in (e^-0.02, 1]
constexpr int kMaxCluster = 8;

struct Shared {
  uint32_t count[kBins];
  uint32_t mass_low[kBins], mass_high[kBins];  // sums of weights * 2^24
  double mass_end[kBins];                      // of all bins up to this one, leader only
  int count_end[kBins];                        // leader only
  double warp_mass[kWarps];
  int warp_count[kWarps];
  uint64_t warp_best[kWarps];
  float warp_least[kWarps];
  uint64_t best;  // of the slice
  float least;
  int num_candidates;
  int bin_low[4], bin_high[4];  // what to gather: borders of top_k, top_p, the draw, min_p
  int mode;
  int found[4];
  double result[4];
  double mass;      // that typical_p narrows,
  float center;     // its mean distance (leader only),
  uint32_t radius;  // and how far from that the typical ones end, by its bits
  unsigned long long sums[2];
  uint32_t prefix;
  uint64_t candidates[kMaxCandidates];  // leader only; last, since a launch may have room for fewer
};

enum Mode : int { kGather, kExact, kFailed };

// The same object in another block of the cluster.
template <class P>
__device__ __forceinline__ P* remote(P* local, int rank, int cluster) {
#ifdef REGATTA_SM90
  if (cluster > 1) {
    uint64_t address;
    asm volatile("mapa.u64 %0, %1, %2;"
                 : "=l"(address)
                 : "l"(reinterpret_cast<uint64_t>(local)), "r"(rank));
    return reinterpret_cast<P*>(address);
  }
#endif
  return local;
}

__device__ __forceinline__ void row_sync(int cluster) {
  if (cluster > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
}

__device__ __forceinline__ float from_ordered(uint32_t word) {
  return __uint_as_float(word & 0x80000000u ? word & 0x7fffffffu : ~word);
}

// f(logit, index) for every token of the slice [begin, end); begin is a multiple of 4.
template <class F>
__device__ __forceinline__ void for_each_logit(const float* row, int begin, int end, bool aligned,
                                               F&& f) {
  if (aligned) {
    constexpr int kAhead = 4;  // 16-byte loads in flight
    int i = begin + static_cast<int>(threadIdx.x) * 4;
    const int vector_end = begin + (end - begin) / 4 * 4;
    for (; i + (kAhead - 1) * kThreads * 4 < vector_end; i += kAhead * kThreads * 4) {
      float4 x[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        x[a] = *reinterpret_cast<const float4*>(row + i + a * kThreads * 4);
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int at = i + a * kThreads * 4;
        f(x[a].x, at), f(x[a].y, at + 1), f(x[a].z, at + 2), f(x[a].w, at + 3);
      }
    }
    for (; i < vector_end; i += kThreads * 4) {
      const float4 x = *reinterpret_cast<const float4*>(row + i);
      f(x.x, i), f(x.y, i + 1), f(x.z, i + 2), f(x.w, i + 3);
    }
    i = vector_end + static_cast<int>(threadIdx.x);
    if (i < end) f(row[i], i);
  } else {
    for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += kThreads) f(row[i], i);
  }
}

__device__ __forceinline__ void add_mass(uint32_t* low, uint32_t* high, uint32_t x) {
  const uint32_t old = atomicAdd(low, x);
  if (old + x < old) atomicAdd(high, 1u);
}

// Inclusive prefix sums over the block's threads, in a fixed order.
__device__ __forceinline__ void block_scan(Shared& s, double* mass, int* count) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
  for (int o = 1; o < kWarp; o *= 2) {
    const double m = __shfl_up_sync(~0u, *mass, o);
    const int c = __shfl_up_sync(~0u, *count, o);
    if (lane >= o) *mass += m, *count += c;
  }
  if (lane == kWarp - 1) s.warp_mass[warp] = *mass, s.warp_count[warp] = *count;
  __syncthreads();
  if (warp == 0) {
    double m = s.warp_mass[lane];
    int c = s.warp_count[lane];
#pragma unroll
    for (int o = 1; o < kWarp; o *= 2) {
      const double dm = __shfl_up_sync(~0u, m, o);
      const int dc = __shfl_up_sync(~0u, c, o);
      if (lane >= o) m += dm, c += dc;
    }
    s.warp_mass[lane] = m;
    s.warp_count[lane] = c;
  }
  __syncthreads();
  if (warp > 0) *mass += s.warp_mass[warp - 1], *count += s.warp_count[warp - 1];
  __syncthreads();
}

// Adds the cluster's histograms into the leader's own arrays, for bins t and t + kThreads.
__device__ __forceinline__ void gather_histogram(Shared& s, int bin, int cluster, uint64_t* mass,
                                                 uint32_t* count) {
  *mass = 0, *count = 0;
  for (int rank = 0; rank < cluster; ++rank) {
    *mass += static_cast<uint64_t>(*remote(&s.mass_high[bin], rank, cluster)) << 32;
    *mass += *remote(&s.mass_low[bin], rank, cluster);
    *count += *remote(&s.count[bin], rank, cluster);
  }
}

struct Row {
  const float* logits;
  int begin, end, rank, cluster;
  bool aligned;
  float largest, inverse_temperature;
  // Exact selections leave out tokens with d > farthest or |d - center| > radius.
  float farthest = INFINITY, center = 0.f, radius = INFINITY;

  __device__ __forceinline__ float distance(float logit) const {
    return (largest - logit) * inverse_temperature;
  }
  __device__ __forceinline__ bool keeps(float logit, float d) const {
    return logit > -INFINITY && d <= farthest && fabsf(d - center) <= radius;
  }
};

// Weights as integers: 2^40 per unit, so that 128k weights of 1 stay below 2^57.
constexpr double kUnit = 1.0 / (double{kOne} * 65536.0);

__device__ __forceinline__ uint64_t weight_units(float d) {
  return static_cast<uint64_t>(static_cast<double>(expf(-d)) / kUnit);
}

// Result of an exact selection: the token class (its word), what lies before it, and how many equal
// tokens it has.
struct Selected {
  uint32_t word;
  double mass_before, mass;  // of the tokens before the class, of the class
  double weight;             // of one token of the class, if it is a class of equal logits
  int count_before, equals;
};

enum class Order { kLogit, kTypical };  // the largest logit first; the least |d - center| first

// Exact radix selection over the words of an order, descending: the first class at which the
// running count reaches `count_target` (by_count), or the running mass reaches (strict: exceeds)
// `mass_target`.
template <Order kOrder>
__device__ __noinline__ Selected radix_select(Shared& s, const Row& row, bool by_count,
                                              int count_target, double mass_target, bool strict) {
  constexpr int kShifts[3] = {21, 10, 0}, kBits[3] = {11, 11, 10};
  uint32_t prefix = 0, mask = 0;
  double mass_before = 0.0;
  int count_before = 0;
  for (int level = 0; level < 3; ++level) {
    for (int b = threadIdx.x; b < kBins; b += kThreads)
      s.count[b] = s.mass_low[b] = s.mass_high[b] = 0;
    __syncthreads();
    const int shift = kShifts[level], last = (1 << kBits[level]) - 1;
    for_each_logit(row.logits, row.begin, row.end, row.aligned, [&](float logit, int) {
      const float d = row.distance(logit);
      const uint32_t word =
          kOrder == Order::kLogit ? ordered(logit) : ~__float_as_uint(fabsf(d - row.center));
      if ((word & mask) != prefix || !row.keeps(logit, d)) return;
      const int bin = last - static_cast<int>(word >> shift & last);  // descending
      const uint64_t mass = weight_units(d);
      atomicAdd(&s.count[bin], 1u);
      add_mass(&s.mass_low[bin], &s.mass_high[bin], static_cast<uint32_t>(mass));
      if (mass >> 32) atomicAdd(&s.mass_high[bin], static_cast<uint32_t>(mass >> 32));
    });
    row_sync(row.cluster);
    if (row.rank == 0) {
      const int b0 = 2 * threadIdx.x, b1 = b0 + 1;
      uint64_t m0, m1;
      uint32_t c0, c1;
      gather_histogram(s, b0, row.cluster, &m0, &c0);
      gather_histogram(s, b1, row.cluster, &m1, &c1);
      double mass = (m0 + m1) * kUnit;
      int count = c0 + c1;
      block_scan(s, &mass, &count);
      s.mass_end[b1] = mass, s.count_end[b1] = count;
      s.mass_end[b0] = mass - m1 * kUnit, s.count_end[b0] = count - c1;
      if (threadIdx.x == 0) s.found[0] = kBins;
      __syncthreads();
      for (int b = b0; b <= b1; ++b) {
        const double m = mass_before + s.mass_end[b];
        const bool reached = by_count ? count_before + s.count_end[b] >= count_target
                             : strict ? m > mass_target
                                      : m >= mass_target;
        // Rounding may leave a mass target just out of reach: then the last class that holds
        // tokens.
        const bool ends = s.count_end[b] == s.count_end[kBins - 1];
        if ((b == b0 ? c0 : c1) > 0 && (reached || ends)) atomicMin(&s.found[0], b);
      }
      __syncthreads();
      const int bin = s.found[0];
      if (threadIdx.x == 0) {
        s.prefix = prefix | static_cast<uint32_t>(last - bin) << shift;
        s.result[0] = mass_before + (bin > 0 ? s.mass_end[bin - 1] : 0.0);
        s.result[1] = s.mass_end[bin] - (bin > 0 ? s.mass_end[bin - 1] : 0.0);
        s.found[1] = count_before + (bin > 0 ? s.count_end[bin - 1] : 0);
        s.found[2] = s.count_end[bin] - (bin > 0 ? s.count_end[bin - 1] : 0);
      }
    }
    row_sync(row.cluster);
    prefix = *remote(&s.prefix, 0, row.cluster);
    mass_before = *remote(&s.result[0], 0, row.cluster);
    count_before = *remote(&s.found[1], 0, row.cluster);
    mask |= static_cast<uint32_t>(last) << shift;
    row_sync(row.cluster);
  }
  Selected selected;
  selected.word = prefix;
  selected.mass_before = mass_before;
  selected.count_before = count_before;
  selected.mass = *remote(&s.result[1], 0, row.cluster);
  selected.equals = *remote(&s.found[2], 0, row.cluster);
  selected.weight = static_cast<double>(expf(-row.distance(from_ordered(prefix))));
  row_sync(row.cluster);
  return selected;
}

// Index of the token with this word that has `skip` equal ones before it. The leader reads the row.
__device__ __noinline__ int find_equal(Shared& s, const Row& row, int vocab_size, uint32_t word,
                                       int skip) {
  if (row.rank != 0) return -1;
  if (threadIdx.x == 0) s.found[0] = -1;
  __syncthreads();
  int before = 0;
  for (int base = 0; base < vocab_size; base += kThreads) {
    const int i = base + threadIdx.x;
    int count = i < vocab_size && ordered(row.logits[i]) == word ? 1 : 0;
    const bool mine = count == 1;
    double unused = 0.0;
    block_scan(s, &unused, &count);
    if (mine && before + count - 1 == skip) s.found[0] = i;
    before += s.warp_count[kWarps - 1];
    __syncthreads();
    if (before > skip) break;
  }
  return s.found[0];
}

// Sums of tokens' weights and of weights times distances. In whole units, so that neither depends
// on the order of addition.
struct WeightSums {
  unsigned long long sums[2] = {0, 0};

  __device__ __forceinline__ void add(float d) {
    const double weight = expf(-d);
    sums[0] += weight_units(d);
    if (weight > 0.0) sums[1] += static_cast<uint64_t>(weight * d / kUnit);
  }

  // Adds this thread's to the block's, by whole warps.
  __device__ __forceinline__ void add_to(Shared& s) {
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int o = kWarp / 2; o > 0; o /= 2) sums[i] += __shfl_xor_sync(~0u, sums[i], o);
      if (threadIdx.x % kWarp == 0) atomicAdd(&s.sums[i], sums[i]);
    }
  }

  // The cluster's, when all blocks have theirs.
  static __device__ __forceinline__ void total(Shared& s, int cluster, double* mass,
                                               double* moment) {
    unsigned long long total[2] = {0, 0};
    for (int rank = 0; rank < cluster; ++rank) {
      for (int i = 0; i < 2; ++i) total[i] += *remote(&s.sums[i], rank, cluster);
    }
    *mass = total[0] * kUnit;
    *moment = total[1] * kUnit;
  }
};

// Of the tokens that the row keeps.
__device__ __noinline__ void sum_weights(Shared& s, const Row& row, double* mass, double* moment) {
  if (threadIdx.x < 2) s.sums[threadIdx.x] = 0;
  row_sync(row.cluster);
  WeightSums sums;
  for_each_logit(row.logits, row.begin, row.end, row.aligned, [&](float logit, int) {
    const float d = row.distance(logit);
    if (row.keeps(logit, d)) sums.add(d);
  });
  sums.add_to(s);
  row_sync(row.cluster);
  WeightSums::total(s, row.cluster, mass, moment);
  row_sync(row.cluster);
}

// farthest: where min_p ends.
__device__ __noinline__ int exact_draw(Shared& s, Row row, int vocab_size, int top_k, float top_p,
                                       float farthest, float typical_p, float uniform) {
  const bool narrowed = farthest < INFINITY || typical_p < 1.f;
  double kept = DBL_MAX;
  float border = INFINITY;  // distance of the last token that top_k and top_p keep
  if (top_k > 0) {
    const Selected k = radix_select<Order::kLogit>(s, row, true, top_k, 0.0, false);
    kept = k.mass_before + k.weight * min(k.equals, top_k - k.count_before);
    border = row.distance(from_ordered(k.word));
  } else if (top_p < 1.f || !narrowed) {
    double moment;
    sum_weights(s, row, &kept, &moment);
  }
  auto equals_for = [](const Selected& c, double target, bool strict) {  // tokens needed, >= 1
    const double missing = (target - c.mass_before) / c.weight;
    const double needed = strict ? floor(missing) + 1.0 : ceil(missing);
    return static_cast<int>(fmin(fmax(needed, 1.0), static_cast<double>(c.equals)));
  };
  if (top_p < 1.f) {
    const double target = top_p * kept;
    const Selected p = radix_select<Order::kLogit>(s, row, false, 0, target, false);
    kept = fmin(kept, p.mass_before + p.weight * equals_for(p, target, false));
    border = fminf(border, row.distance(from_ordered(p.word)));
  }
  if (narrowed) {
    row.farthest = fminf(farthest, border);
    double mass, moment;
    sum_weights(s, row, &mass, &moment);
    kept = fmin(kept, mass);
    if (typical_p < 1.f) {
      row.center = static_cast<float>(moment / mass);
      const Selected last =
          radix_select<Order::kTypical>(s, row, false, 0, typical_p * mass, false);
      row.radius = __uint_as_float(~last.word);
      kept = last.mass_before + last.mass;
    }
  }
  const double target = uniform * kept;
  const Selected drawn = radix_select<Order::kLogit>(s, row, false, 0, target, true);
  return find_equal(s, row, vocab_size, drawn.word, equals_for(drawn, target, true) - 1);
}

// First bin whose end reaches (strict: exceeds) a mass; all threads get it.
__device__ __forceinline__ int bin_of_mass(const Shared& s, double target, bool strict) {
  int low = 0, high = kBins - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (strict ? s.mass_end[middle] > target : s.mass_end[middle] >= target) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

__global__ void __launch_bounds__(kThreads)
    sample_kernel(const SampleParams params, int cluster, int max_candidates) {
  extern __shared__ __align__(16) uint8_t raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  const int tid = threadIdx.x, lane = tid % kWarp, warp = tid / kWarp;
  const int rank = cluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int64_t index = blockIdx.x / cluster;
  pdl_trigger();
  pdl_wait();

  const int vocab_size = static_cast<int>(params.vocab_size);
  Row row;
  row.logits = params.logits + index * params.vocab_size;
  row.rank = rank;
  row.cluster = cluster;
  row.aligned = params.vocab_size % 4 == 0;
  const int slice = ((vocab_size + cluster - 1) / cluster + 3) / 4 * 4;
  row.begin = min(rank * slice, vocab_size);
  row.end = min(row.begin + slice, vocab_size);
  const float temperature = params.temperature[index];
  row.inverse_temperature = 1.f / fmaxf(temperature, 1e-30f);
  int top_k = params.top_k[index];
  const float top_p = params.top_p[index];
  const bool greedy = temperature == 0.f || top_k == 1;
  if (top_k >= vocab_size || top_k < 0) top_k = 0;

  // 1. Largest and smallest.
  {
    uint64_t best = 0;
    float least = INFINITY;
    for_each_logit(row.logits, row.begin, row.end, row.aligned, [&](float logit, int i) {
      const uint64_t key = static_cast<uint64_t>(ordered(logit)) << 32 | static_cast<uint32_t>(~i);
      best = best > key ? best : key;
      if (logit > -INFINITY) least = fminf(least, logit);
    });
    const auto merge_lanes = [&] {
#pragma unroll
      for (int o = kWarp / 2; o > 0; o /= 2) {
        const uint64_t other = __shfl_xor_sync(~0u, best, o);
        best = best > other ? best : other;
        least = fminf(least, __shfl_xor_sync(~0u, least, o));
      }
    };
    merge_lanes();
    if (lane == 0) s.warp_best[warp] = best, s.warp_least[warp] = least;
    for (int b = tid; b < kBins; b += kThreads) s.count[b] = s.mass_low[b] = s.mass_high[b] = 0;
    if (tid == 0) s.num_candidates = 0, s.sums[0] = s.sums[1] = 0;
    __syncthreads();
    if (warp == 0) {
      best = s.warp_best[lane];
      least = s.warp_least[lane];
      merge_lanes();
      if (lane == 0) s.best = best, s.least = least;
    }
    row_sync(cluster);
  }
  uint64_t best = 0;
  float least = INFINITY;
  for (int r = 0; r < cluster; ++r) {
    const uint64_t other = *remote(&s.best, r, cluster);
    best = best > other ? best : other;
    least = fminf(least, *remote(&s.least, r, cluster));
  }
  const uint32_t best_word = static_cast<uint32_t>(best >> 32);
  row.largest = from_ordered(best_word);
  const bool failed = best_word == ~0u || (!greedy && !isfinite(row.largest));
  if (greedy || failed) {
    if (rank == 0 && tid == 0) {
      params.token_ids[index] = failed ? -1 : static_cast<int>(~static_cast<uint32_t>(best));
    }
    row_sync(cluster);  // nobody leaves while its shared memory is read
    return;
  }

  const float uniform = philox_uniform(static_cast<uint64_t>(params.seeds[index]),
                                       static_cast<uint64_t>(params.offsets[index]));
  const float min_p = params.min_p != nullptr ? params.min_p[index] : 0.f;
  const float farthest = min_p > 0.f ? -logf(min_p) : INFINITY;
  const float typical_p = params.typical_p != nullptr ? params.typical_p[index] : 1.f;
  auto draw_exactly = [&] {
    const int token = exact_draw(s, row, vocab_size, top_k, top_p, farthest, typical_p, uniform);
    if (rank == 0 && tid == 0) params.token_ids[index] = token;
    row_sync(cluster);
  };
  const bool typical = typical_p > 0.f && typical_p < 1.f;
  const bool all_typical = typical && top_k == 0 && top_p >= 1.f && farthest == INFINITY;

  // 2. Histogram.
  const float range = fminf(fmaxf(row.distance(least), 1e-3f), kRange);
  const float bins_per_unit = kBins / range, width = range / kBins;
  auto bin_of = [&](float d) {
    return min(static_cast<int>(fminf(d * bins_per_unit, static_cast<float>(kBins))), kBins - 1);
  };
  WeightSums sums;
  for_each_logit(row.logits, row.begin, row.end, row.aligned, [&](float logit, int) {
    const float d = row.distance(logit);
    if (logit == -INFINITY) return;
    if (all_typical) sums.add(d);
    const int bin = bin_of(d);
    if (top_k > 0) atomicAdd(&s.count[bin], 1u);
    if (d < kRange) {
      const float x = fmaf(bin, -width, d);  // e^-x by its series: x < 0.02 but for rounding
      const float w = fmaf(-x, fmaf(-x, fmaf(-x, 1.f / 6.f, 0.5f), 1.f), 1.f);
      add_mass(&s.mass_low[bin], &s.mass_high[bin], static_cast<uint32_t>(w * kOne + 0.5f));
    }
  });
  if (all_typical) sums.add_to(s);
  row_sync(cluster);
  if (rank == 0) {
    const int b0 = 2 * tid, b1 = b0 + 1;
    uint64_t m0, m1;
    uint32_t c0, c1;
    gather_histogram(s, b0, cluster, &m0, &c0);
    gather_histogram(s, b1, cluster, &m1, &c1);
    const double mass1 = m1 / double{kOne} * exp(-static_cast<double>(width) * b1);
    const double mass0 = m0 / double{kOne} * exp(-static_cast<double>(width) * b0);
    if (top_k == 0) {  // upper bounds, only to see whether the candidates fit
      c0 = static_cast<uint32_t>(m0 / (0.98 * kOne)) + 1;
      c1 = static_cast<uint32_t>(m1 / (0.98 * kOne)) + 1;
    }
    double mass = mass0 + mass1;
    int count = static_cast<int>(c0 + c1);
    block_scan(s, &mass, &count);
    s.mass_end[b0] = mass - mass1, s.mass_end[b1] = mass;
    s.count_end[b0] = count - static_cast<int>(c1), s.count_end[b1] = count;
    __syncthreads();
    if (tid == 0) {
      auto mass_before = [&](int bin) { return bin > 0 ? s.mass_end[bin - 1] : 0.0; };
      auto count_before = [&](int bin) { return bin > 0 ? s.count_end[bin - 1] : 0; };
      constexpr double kSlack = 1e-7;  // bins' masses are rounded; look a little wider
      int low[4] = {1, 1, 1, 1}, high[4] = {0, 0, 0, 0};  // empty
      double kept_low = s.mass_end[kBins - 1], kept_high = kept_low;
      if (top_k > 0 && top_k < s.count_end[kBins - 1]) {
        int from = 0, to = kBins - 1;
        while (from < to) {
          const int middle = (from + to) / 2;
          if (s.count_end[middle] >= top_k) {
            to = middle;
          } else {
            from = middle + 1;
          }
        }
        low[0] = high[0] = from;
        kept_low = mass_before(from), kept_high = s.mass_end[from];
      }
      if (top_p < 1.f) {
        low[1] = bin_of_mass(s, top_p * kept_low * (1 - kSlack), false);
        high[1] = bin_of_mass(s, top_p * kept_high * (1 + kSlack), false);
        kept_low = mass_before(low[1]), kept_high = fmin(kept_high, s.mass_end[high[1]]);
      }
      if (farthest < range) {
        low[3] = high[3] = bin_of(farthest);
        kept_low = fmin(kept_low, mass_before(low[3]));
        kept_high = fmin(kept_high, s.mass_end[low[3]]);
      }
      double draw_low = uniform * kept_low, draw_high = uniform * kept_high;
      if (all_typical) {
        double moment;
        WeightSums::total(s, cluster, &s.mass, &moment);
        const float center = s.center = static_cast<float>(moment / s.mass);
        // Bins of the distances from center - r to center + r, all, or those wholly between.
        auto mass_within = [&](int steps, bool whole) {
          const float begin = center - steps * width, end = center + steps * width;
          int first = bin_of(fmaxf(begin, 0.f)), last = bin_of(end);
          if (whole && begin > 0.f) ++first;
          if (whole && end < range) --last;
          return first <= last ? s.mass_end[last] - mass_before(first) : 0.0;
        };
        auto steps_until = [&](double mass, bool whole) {
          int from = 0, to = kBins;
          while (from < to) {
            const int middle = (from + to) / 2;
            if (mass_within(middle, whole) >= mass) {
              to = middle;
            } else {
              from = middle + 1;
            }
          }
          return from;
        };
        const double target = typical_p * s.mass;
        const float inner = max(steps_until(target * (1 - kSlack), false) - 1, 0) * width;
        const float outer = steps_until(target * (1 + kSlack), true) * width;
        low[0] = bin_of(fmaxf(center - outer, 0.f)), high[0] = bin_of(fmaxf(center - inner, 0.f));
        low[1] = bin_of(center + inner), high[1] = bin_of(center + outer);
        draw_low = (1.0 - uniform) * mass_before(low[0]) + uniform * mass_before(low[1]);
        draw_high = (1.0 - uniform) * s.mass_end[high[0]] + uniform * s.mass_end[high[1]];
      }
      low[2] = bin_of_mass(s, draw_low * (1 - kSlack), true);
      high[2] = bin_of_mass(s, draw_high * (1 + kSlack), true);
      if (typical && !all_typical) {  // all that the others may keep
        const bool narrowed = low[0] <= high[0] || low[1] <= high[1] || low[3] <= high[3];
        low[2] = 0;
        high[2] = narrowed ? max(max(high[0], high[1]), high[3]) : kBins - 1;
      }
      int total = 0;
      for (int i = 0; i < 4; ++i) {
        s.bin_low[i] = low[i], s.bin_high[i] = high[i];
        if (low[i] <= high[i]) total += s.count_end[high[i]] - count_before(low[i]);
      }
      s.mode = total > max_candidates / (typical ? 2 : 1) ? kExact : kGather;
      for (int r = 1; r < cluster; ++r) {
        for (int i = 0; i < 4; ++i) {
          *remote(&s.bin_low[i], r, cluster) = low[i];
          *remote(&s.bin_high[i], r, cluster) = high[i];
        }
        *remote(&s.mode, r, cluster) = s.mode;
      }
    }
  }
  row_sync(cluster);
  if (s.mode == kExact) {
    draw_exactly();
    return;
  }

  // 3. Candidates, as words that sort in the order of the definition.
  const int low0 = s.bin_low[0], low1 = s.bin_low[1], low2 = s.bin_low[2], low3 = s.bin_low[3];
  const int high0 = s.bin_high[0], high1 = s.bin_high[1], high2 = s.bin_high[2];
  const int high3 = s.bin_high[3];
  uint64_t* const candidates = remote(s.candidates, 0, cluster);
  int* const num_candidates = remote(&s.num_candidates, 0, cluster);
  for_each_logit(row.logits, row.begin, row.end, row.aligned, [&](float logit, int i) {
    const float d = row.distance(logit);
    // Nobody counted those without a weight, and they are never drawn.
    if (logit == -INFINITY || (top_k == 0 && d >= kRange)) return;
    const int bin = bin_of(d);
    if ((bin >= low2 && bin <= high2) || (bin >= low1 && bin <= high1) ||
        (bin >= low0 && bin <= high0) || (bin >= low3 && bin <= high3)) {
      const int at = atomicAdd(num_candidates, 1);
      if (at < max_candidates) {
        candidates[at] = static_cast<uint64_t>(~ordered(logit)) << 32 | static_cast<uint32_t>(i);
      }
    }
  });
  row_sync(cluster);
  if (rank != 0) return;

  const int total = min(s.num_candidates, max_candidates);
  int padded = kWarp;
  while (padded < total) padded *= 2;
  for (int i = total + tid; i < padded; i += kThreads) s.candidates[i] = ~uint64_t{0};
  int* const first_of_bin = reinterpret_cast<int*>(s.count);
  for (int b = tid; b < kBins; b += kThreads) first_of_bin[b] = kMaxCandidates;
  if (tid < 4) s.found[tid] = kMaxCandidates;
  if (tid == 0) s.radius = __float_as_uint(INFINITY);
  __syncthreads();
  for (int size = 2; size <= padded; size *= 2) {  // bitonic
    for (int stride = size / 2; stride > 0; stride /= 2) {
      for (int i = tid; i < padded / 2; i += kThreads) {
        const int a = i / stride * 2 * stride + i % stride, b = a + stride;
        const uint64_t x = s.candidates[a], y = s.candidates[b];
        if ((x > y) == ((a & size) == 0)) s.candidates[a] = y, s.candidates[b] = x;
      }
      if (padded / 2 > kWarp) {
        __syncthreads();
      } else {
        __syncwarp();
      }
    }
  }
  __syncthreads();

  // Each thread owns a run of candidates: position of each = mass up to and including it.
  constexpr int kRun = kMaxCandidates / kThreads;
  int bins[kRun];
  double ends[kRun], running = 0.0;
  const int run = (total + kThreads - 1) / kThreads;
#pragma unroll
  for (int k = 0; k < kRun; ++k) {
    const int i = tid * run + k;
    bins[k] = -1;
    if (k < run && i < total) {
      const float d = row.distance(from_ordered(~static_cast<uint32_t>(s.candidates[i] >> 32)));
      bins[k] = bin_of(d);
      running += static_cast<double>(expf(-d));
      atomicMin(&first_of_bin[bins[k]], i);
    }
    ends[k] = running;
  }
  double scanned = running;
  int unused = 0;
  block_scan(s, &scanned, &unused);
  // Mass of the candidates in front of each bin's first one, kept where the bin's counts were.
  double* const before_bin = reinterpret_cast<double*>(s.mass_low);  // mass_low and mass_high
#pragma unroll
  for (int k = 0; k < kRun; ++k) {
    if (bins[k] >= 0 && first_of_bin[bins[k]] == tid * run + k) {
      before_bin[bins[k]] = scanned - running + (k > 0 ? ends[k - 1] : 0.0);
    }
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kRun; ++k) {
    if (bins[k] >= 0) {
      const int b = bins[k];
      ends[k] += scanned - running - before_bin[b] + (b > 0 ? s.mass_end[b - 1] : 0.0);
    }
  }
  double kept = s.mass_end[kBins - 1];
  if (top_k > 0 && low0 <= high0) {
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      if (bins[k] < 0) continue;
      const int b = bins[k];
      const int count = (b > 0 ? s.count_end[b - 1] : 0) + tid * run + k - first_of_bin[b] + 1;
      if (count == top_k) s.result[0] = ends[k];
    }
    __syncthreads();
    kept = s.result[0];
  }
  auto first_reaching = [&](int slot, int bin, double target, bool strict) {
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      if (bins[k] >= bin && (strict ? ends[k] > target : ends[k] >= target)) {
        atomicMin(&s.found[slot], tid * run + k);
        break;
      }
    }
    __syncthreads();
    return s.found[slot];
  };
  if (top_p < 1.f && low1 <= high1) {
    const int i = first_reaching(1, low1, top_p * kept, false);
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      if (tid * run + k == i && bins[k] >= 0) s.result[3] = ends[k];
    }
    __syncthreads();
    if (i < total) kept = fmin(kept, s.result[3]);
  }
  auto distance_of = [&](int i) {
    return row.distance(from_ordered(~static_cast<uint32_t>(s.candidates[i] >> 32)));
  };
  if (low3 <= high3) {
    auto is_within = [&](int i) {
      const float d = distance_of(i);
      return bin_of(d) < low3 || (bin_of(d) == low3 && d <= farthest);
    };
    if (tid == 0) s.result[1] = low3 > 0 ? s.mass_end[low3 - 1] : 0.0;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      const int i = tid * run + k;
      if (bins[k] == low3 && is_within(i) && (i + 1 >= total || !is_within(i + 1))) {
        s.result[1] = ends[k];
      }
    }
    __syncthreads();
    kept = fmin(kept, s.result[1]);
  }
  if (typical) {
    double* const end_of = reinterpret_cast<double*>(s.candidates + max_candidates / 2);
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      if (bins[k] >= 0) end_of[tid * run + k] = ends[k];
    }
    int size = total;  // of those that the others keep, with all equals of the last
    const bool is_cut = low0 <= high0 || low1 <= high1 || low3 <= high3;
    if (!all_typical && is_cut) size = min(first_reaching(3, 0, kept, false) + 1, total);
    __syncthreads();
    // Where min_p ends with a bin, its mass is rounded.
    if (size > 1 && distance_of(size - 1) > farthest) --size;
    while (size < total && distance_of(size) == distance_of(size - 1)) ++size;
    float center = s.center;
    double mass = s.mass;
    if (!all_typical) {
      double moment = 0.0;
#pragma unroll
      for (int k = 0; k < kRun; ++k) {
        if (bins[k] < 0 || tid * run + k >= size) continue;
        const float d = distance_of(tid * run + k);
        moment += static_cast<double>(expf(-d)) * d;
      }
      block_scan(s, &moment, &unused);
      mass = size > 0 ? end_of[size - 1] : 0.0;
      center = static_cast<float>(s.warp_mass[kWarps - 1] / mass);
    }
    // Mass in front of the bins in which the typical ones begin and in which they end.
    const double before_begin = all_typical && low0 > 0 ? s.mass_end[low0 - 1] : 0.0;
    const double before_end = all_typical && low1 > 0 ? s.mass_end[low1 - 1] : 0.0;
    struct Kept {
      int begin, end;  // candidates
      double above, mass;
    };
    auto kept_within = [&](float radius) {
      auto first_where = [&](int from, auto&& is_so) {
        int to = size;
        while (from < to) {
          const int middle = (from + to) / 2;
          if (is_so(distance_of(middle))) {
            to = middle;
          } else {
            from = middle + 1;
          }
        }
        return from;
      };
      Kept k;
      k.begin = first_where(0, [&](float d) { return center - d <= radius; });
      k.end = first_where(k.begin, [&](float d) { return d - center > radius; });
      k.above = k.begin > 0 ? end_of[k.begin - 1] : before_begin;
      k.mass = fmax(k.end > 0 ? end_of[k.end - 1] : 0.0, before_end) - k.above;
      return k;
    };
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      const int b = bins[k];
      const bool on_border = (b >= low0 && b <= high0) || (b >= low1 && b <= high1);
      if (b < 0 || tid * run + k >= size || (all_typical && !on_border)) continue;
      const float radius = fabsf(distance_of(tid * run + k) - center);
      if (kept_within(radius).mass >= typical_p * mass) {
        atomicMin(&s.radius, __float_as_uint(radius));
      }
    }
    __syncthreads();
    const Kept all = kept_within(__uint_as_float(s.radius));
    const int i = first_reaching(2, low2, all.above + uniform * all.mass, true);
    if (tid == 0) {
      const int drawn = max(min(i, all.end - 1), all.begin);
      params.token_ids[index] =
          drawn < total ? static_cast<int>(static_cast<uint32_t>(s.candidates[drawn])) : -1;
    }
    return;
  }
  int drawn = first_reaching(2, low2, uniform * kept, true);
  if (drawn >= total) {  // out of reach by rounding: the last candidate of the draw's bins
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      if (bins[k] >= low2 && bins[k] <= high2)
        atomicMin(&s.found[0], kMaxCandidates - 1 - tid * run - k);
    }
    __syncthreads();
    drawn = kMaxCandidates - 1 - s.found[0];
  }
  if (tid == 0) {
    params.token_ids[index] =
        drawn >= 0 ? static_cast<int>(static_cast<uint32_t>(s.candidates[drawn])) : -1;
  }
}

}  // namespace

Status sample(const SampleParams& params, const Launch& launch_on) {
  if (params.num_rows == 0) return {};
  REGATTA_RETURN_IF_ERROR(check_vocab_size("sample", params.vocab_size));
  const int num_sms = num_multiprocessors();
  // Blocks per row: as many as run at once, one per multiprocessor. Larger clusters leave some
  // multiprocessors out (a cluster stays within a graphics cluster of 16 or 18), hence the margins.
  int cluster = 1;
  if (has_dependent_launch()) {
    while (cluster < kMaxCluster &&
           params.num_rows * cluster * 2 <= (cluster == 1 ? num_sms : num_sms * 3 / 4) &&
           params.vocab_size / cluster >= 4 * kThreads) {
      cluster *= 2;
    }
  }
  const bool has_room = static_cast<size_t>(max_shared_bytes()) >= sizeof(Shared);
  const int max_candidates = has_room ? kMaxCandidates : kFewCandidates;
  LaunchConfig config(launch_on, params.num_rows * cluster, kThreads,
                      offsetof(Shared, candidates) + max_candidates * sizeof(uint64_t));
  config.cluster_x = static_cast<unsigned>(cluster);
  return launch(sample_kernel, config, "sample", params, cluster, max_candidates);
}

}  // namespace regatta::cuda
