// See low_rank.h: the rows of each adapter, in tiles.
//
// Architectures: all. Algorithm: a counting sort by one block, once for all linears of a call.
// Within an adapter the order is that of atomics; what is made of a row knows nothing of its place.
// Bound: latency. Source: own.
#include "cuda/adapters/low_rank.h"
#include "cuda/common.cuh"

namespace regatta::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int64_t kMostShared = 48 << 10;

struct Args {
  const int32_t* ids;
  int num_rows, num_groups;  // groups: rows without an adapter, then those of each
  int32_t* order;
  RowTile* tiles;
  int32_t* num_tiles;
};

// It lets no launch begin ahead of its end, behind which what it wrote is there for all of them.
__global__ void __launch_bounds__(kThreads) sort_rows_kernel(const Args a) {
  extern __shared__ int32_t shared[];
  int32_t* begins = shared;                     // [num_groups + 1]
  int32_t* places = begins + a.num_groups + 1;  // [num_groups]: first counts
  int32_t* firsts = places + a.num_groups;      // [num_groups] tiles
  for (int g = threadIdx.x; g < a.num_groups; g += kThreads) places[g] = 0;
  pdl_wait();
  __syncthreads();
  const auto group_of = [&](int row) { return max(__ldcg(a.ids + row), -1) + 1; };
  for (int row = threadIdx.x; row < a.num_rows; row += kThreads) {
    atomicAdd(&places[group_of(row)], 1);
  }
  __syncthreads();
  if (threadIdx.x < kWarp) {  // each lane some neighbouring groups
    const int each = (a.num_groups + kWarp - 1) / kWarp, lane = threadIdx.x;
    const int first = min(lane * each, a.num_groups), last = min(first + each, a.num_groups);
    int rows = 0, tiles = 0;
    for (int g = first; g < last; ++g) {
      rows += places[g], tiles += (places[g] + kTileRows - 1) / kTileRows;
    }
    int rows_until = rows, tiles_until = tiles;
#pragma unroll
    for (int o = 1; o < kWarp; o *= 2) {
      const int more_rows = __shfl_up_sync(~0u, rows_until, o);
      const int more_tiles = __shfl_up_sync(~0u, tiles_until, o);
      if (lane >= o) rows_until += more_rows, tiles_until += more_tiles;
    }
    if (lane == kWarp - 1) {
      begins[a.num_groups] = rows_until;
      *a.num_tiles = tiles_until;
    }
    rows = rows_until - rows, tiles = tiles_until - tiles;
    for (int g = first; g < last; ++g) {
      const int count = places[g];
      begins[g] = places[g] = rows, firsts[g] = tiles;
      rows += count, tiles += (count + kTileRows - 1) / kTileRows;
    }
  }
  __syncthreads();
  for (int row = threadIdx.x; row < a.num_rows; row += kThreads) {
    a.order[atomicAdd(&places[group_of(row)], 1)] = row;
  }
  for (int g = threadIdx.x; g < a.num_groups; g += kThreads) {
    const int end = begins[g + 1];
    RowTile* tile = a.tiles + firsts[g];
    for (int row = begins[g]; row < end; row += kTileRows) {
      *tile++ = {g - 1, row, min(kTileRows, end - row), 0};
    }
  }
  __threadfence();
}

}  // namespace

Status sort_rows(const SortRowsParams& p, const Launch& launch_on) {
  if (p.num_rows == 0) return {};
  Args args = {};
  args.ids = p.rows.ids;
  args.num_rows = static_cast<int>(p.num_rows);
  args.num_groups = static_cast<int>(p.rows.num_adapters + 1);
  args.order = p.sorted.order;
  args.tiles = p.sorted.tiles;
  args.num_tiles = p.sorted.num_tiles;
  LaunchConfig config;
  config.block = dim3(kThreads);
  config.shared_bytes = sizeof(int32_t) * (3 * static_cast<size_t>(args.num_groups) + 1);
  if (config.shared_bytes > kMostShared) {
    return Status::error("sort_rows: " + std::to_string(p.rows.num_adapters) +
                         " adapters in a step (allowed: up to 4,000)");
  }
  config.stream = launch_on.stream;
  config.pdl = launch_on.pdl;
  return launch(sort_rows_kernel, config, "sort_rows", args);
}

}  // namespace regatta::cuda
