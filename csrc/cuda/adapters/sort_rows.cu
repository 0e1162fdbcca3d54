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
  const int32_t* pages;
  int num_rows, num_groups;  // groups: rows without an adapter, then those of each
  int num_pages;             // of an adapter, for all linears
  int num_ends;              // records behind the last tile
  SortedRows sorted;
};

// It lets no launch begin ahead of its end, behind which what it wrote is there for all of them.
__global__ void __launch_bounds__(kThreads) sort_rows_kernel(const Args a) {
  extern __shared__ int32_t shared[];
  int32_t* begins = shared;                     // [num_groups + 1]
  int32_t* places = begins + a.num_groups + 1;  // [num_groups]: first counts
  int32_t* firsts = places + a.num_groups;      // [num_groups + 1] tiles
  const int thread = static_cast<int>(threadIdx.x);
  for (int g = thread; g < a.num_groups; g += kThreads) places[g] = 0;
  pdl_wait();
  __syncthreads();
  const auto group_of = [&](int row) { return max(__ldcg(a.ids + row), -1) + 1; };
  for (int row = thread; row < a.num_rows; row += kThreads) atomicAdd(&places[group_of(row)], 1);
  __syncthreads();
  if (thread < kWarp) {  // each lane some neighbouring groups
    const int each = (a.num_groups + kWarp - 1) / kWarp, lane = thread;
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
    if (lane == kWarp - 1) begins[a.num_groups] = rows_until, firsts[a.num_groups] = tiles_until;
    rows = rows_until - rows, tiles = tiles_until - tiles;
    for (int g = first; g < last; ++g) {
      const int count = places[g];
      begins[g] = places[g] = rows, firsts[g] = tiles;
      rows += count, tiles += (count + kTileRows - 1) / kTileRows;
    }
  }
  __syncthreads();
  // A group's tiles by a warp: how many rows, and pages; rows that are not there are row 0.
  for (int g = thread / kWarp; g < a.num_groups; g += kThreads / kWarp) {
    for (int tile = firsts[g]; tile < firsts[g + 1]; ++tile) {
      int32_t* record = a.sorted.tiles + static_cast<int64_t>(tile) * a.sorted.stride;
      const int count = min(kTileRows, begins[g + 1] - begins[g] - (tile - firsts[g]) * kTileRows);
      if (thread % kWarp == 0) record[0] = count;
      for (int i = count + thread % kWarp; i < kTileRows; i += kWarp) record[kTileFirstRow + i] = 0;
      for (int i = thread % kWarp; i < a.num_pages; i += kWarp) {
        const int64_t at = static_cast<int64_t>(g - 1) * a.num_pages + i;
        record[kTileFirstRow + kTileRows + i] = g == 0 ? -1 : __ldcg(a.pages + at);
      }
    }
  }
  for (int i = thread; i < a.num_ends; i += kThreads) {
    a.sorted.tiles[static_cast<int64_t>(firsts[a.num_groups] + i) * a.sorted.stride] = 0;
  }
  for (int row = thread; row < a.num_rows; row += kThreads) {
    const int g = group_of(row), place = atomicAdd(&places[g], 1) - begins[g];
    const int64_t tile = firsts[g] + place / kTileRows;
    a.sorted.tiles[tile * a.sorted.stride + kTileFirstRow + place % kTileRows] = row;
  }
  __threadfence();
}

}  // namespace

Status sort_rows(const SortRowsParams& p, const Launch& launch_on) {
  if (p.num_rows == 0) return {};
  Args args = {};
  args.ids = p.rows.ids;
  args.pages = p.rows.pages;
  args.num_rows = static_cast<int>(p.num_rows);
  args.num_groups = static_cast<int>(p.rows.num_adapters + 1);
  args.num_pages = static_cast<int>(kNumAdapted * p.rows.max_pages);
  args.num_ends = static_cast<int>(num_tile_blocks(p.num_rows));
  args.sorted = p.sorted;
  const LaunchConfig config(launch_on, 1, kThreads,
                            sizeof(int32_t) * (3 * static_cast<size_t>(args.num_groups) + 2));
  if (config.shared_bytes > kMostShared) {
    return Status::error("sort_rows: " + std::to_string(p.rows.num_adapters) +
                         " adapters in a step (allowed: up to 4,000)");
  }
  return launch(sort_rows_kernel, config, "sort_rows", args);
}

}  // namespace regatta::cuda
