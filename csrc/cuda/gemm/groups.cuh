// Groups of rows of x that have a weight each (experts): which of them a block works on.
//
// How many rows each has is known on the device alone. Grids are large enough for any (tiles.h:
// max_group_tiles), and blocks behind the last tile end at once. A tile may begin at any row; those
// behind its group's end are the next group's, are multiplied with the wrong weight, and not
// written. Rows behind the last group's end belong to none: nothing is computed of them.
//
// Kernels whose ends are not ready let the next launch begin behind their pdl_wait(): to that one
// they are.
#pragma once

#include "cuda/common.cuh"
#include "cuda/gemm/gemm_epilogue.cuh"
#include "cuda/gemm/tiles.h"
#include "regatta/gemm.h"

namespace regatta::cuda {

struct Groups {
  const int32_t* ends = nullptr;  // [count]
  int count = 0;                  // 0: all rows have one weight
  bool ready = false;             // the ends may be read ahead of pdl_wait()
};

inline Groups make_groups(const GemmParams& p) {
  Groups groups;
  groups.ends = p.group_ends;
  groups.count = static_cast<int>(p.num_groups);
  groups.ready = p.group_ends_ready;
  return groups;
}

struct GroupTile {
  int group;       // -1: there is no such tile
  int first, end;  // rows of x: where the tile begins, and its group ends
};

// Tile `index` of kTokens rows over all groups, by a whole warp. Behind pdl_wait(), or of ends that
// are ready.
template <int kTokens>
__device__ __forceinline__ GroupTile find_group_tile(const Groups& groups, int index) {
  constexpr int kEach = 4;  // groups of a lane, so that up to 128 wait for memory once
  const int lane = threadIdx.x % kWarp;
  const auto tiles = [](int rows) { return (rows + kTokens - 1) / kTokens; };
  int tiles_before = 0, begin = 0;  // of the groups that the warp has seen
  for (int first = 0; first < groups.count; first += kWarp * kEach) {
    int ends[kEach], own = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      ends[i] = __ldcg(groups.ends + min(first + lane * kEach + i, groups.count - 1));
    }
    const int previous = __shfl_up_sync(~0u, ends[kEach - 1], 1);
    const int start = lane == 0 ? begin : previous;
#pragma unroll
    for (int i = 0; i < kEach; ++i) own += tiles(ends[i] - (i == 0 ? start : ends[i - 1]));
    const int until = warp_inclusive_scan(own) + tiles_before;
    const unsigned has = __ballot_sync(~0u, until - own <= index && index < until);
    if (has != 0) {
      GroupTile tile = {-1, 0, 0};
      int at = until - own;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int row = i == 0 ? start : ends[i - 1], count = tiles(ends[i] - row);
        if (at <= index && index < at + count) {
          tile = {first + lane * kEach + i, row + (index - at) * kTokens, ends[i]};
        }
        at += count;
      }
      const int holder = __ffs(has) - 1;
      tile.group = __shfl_sync(~0u, tile.group, holder);
      tile.first = __shfl_sync(~0u, tile.first, holder);
      tile.end = __shfl_sync(~0u, tile.end, holder);
      return tile;
    }
    tiles_before = __shfl_sync(~0u, until, kWarp - 1);
    begin = __shfl_sync(~0u, ends[kEach - 1], kWarp - 1);
  }
  return {-1, 0, 0};
}

// The ends of all groups into shared memory, and those of their tiles; tiles_of(rows): of a group
// of so many. By a block, which waits for all of it afterwards. Behind pdl_wait(), or of ends that
// are ready.
template <class TilesOf>
__device__ __forceinline__ void sum_group_tiles(const Groups& groups, int* row_ends, int* tile_ends,
                                                TilesOf&& tiles_of) {
  for (int g = threadIdx.x; g < groups.count; g += blockDim.x) {
    row_ends[g] = __ldcg(groups.ends + g);
  }
  __syncthreads();
  if (threadIdx.x >= kWarp) return;
  int before = 0;
  for (int first = 0; first < groups.count; first += kWarp) {
    const int g = first + static_cast<int>(threadIdx.x);
    const bool inside = g < groups.count;
    const int tiles = inside ? tiles_of(row_ends[g] - (g == 0 ? 0 : row_ends[g - 1])) : 0;
    const int until = warp_inclusive_scan(tiles, static_cast<int>(threadIdx.x)) + before;
    if (inside) tile_ends[g] = until;
    before = __shfl_sync(~0u, until, kWarp - 1);
  }
}

// What lies ahead of each group, in shared memory: [G + 1] each, the last one being that of all.
// For threads that look for tiles alone.
struct Ahead {
  int *rows, *tiles;

  // The last group that begins at or ahead of this tile: the one that has it.
  __device__ __forceinline__ int group_of(const Groups& groups, int tile) const {
    int group = 0;
    for (int next = groups.count; next - group > 1;) {
      const int middle = (group + next) / 2;
      (tiles[middle] <= tile ? group : next) = middle;
    }
    return group;
  }
};

template <class TilesOf>
__device__ __forceinline__ void count_ahead(const Groups& groups, const Ahead& ahead,
                                            TilesOf&& tiles_of) {
  if (threadIdx.x == 0) ahead.rows[0] = ahead.tiles[0] = 0;
  sum_group_tiles(groups, ahead.rows + 1, ahead.tiles + 1, tiles_of);
}

// Where the rows of groups end, and their tiles: in shared memory, for warps that look for tiles.
// Not by pointers, as Ahead has them: gemm_packed_groups_sm90 has no registers for those.
struct GroupTable {
  int row_ends[kMaxGroups], tile_ends[kMaxGroups];

  // The group of a tile, by a whole warp.
  __device__ __forceinline__ int group_of(int tile, int count) const {
    const int lane = threadIdx.x % kWarp;
    int group = 0;  // as many end ahead of it
    for (int g = 0; g < count; g += kWarp) {
      const bool ends = g + lane < count && tile_ends[g + lane] <= tile;
      group += __popc(__ballot_sync(~0u, ends));
    }
    return group;
  }

  // Tile `index` of kTokens rows, which there is, by a whole warp.
  template <int kTokens>
  __device__ __forceinline__ GroupTile tile(int index, int count) const {
    const int group = group_of(index, count);
    const int first_tile = group == 0 ? 0 : tile_ends[group - 1];
    const int first_row = group == 0 ? 0 : row_ends[group - 1];
    return {group, first_row + (index - first_tile) * kTokens, row_ends[group]};
  }
};

template <int kTokens>
__device__ __forceinline__ void make_group_table(const Groups& groups, GroupTable* table) {
  sum_group_tiles(groups, table->row_ends, table->tile_ends,
                  [](int rows) { return (rows + kTokens - 1) / kTokens; });
}

// Rows of `num_rows` that a group has: the first ones. Likewise, by any thread.
__device__ __forceinline__ int rows_of_groups(const Groups& groups, int num_rows) {
  return min(num_rows, __ldcg(groups.ends + groups.count - 1));
}

// The group of a row that has one, by a whole warp; likewise.
__device__ __forceinline__ int find_group(const Groups& groups, int row) {
  const int lane = threadIdx.x % kWarp;
  int group = 0;  // as many as end ahead of the row
#pragma unroll 4
  for (int first = 0; first < groups.count; first += kWarp) {
    const int end = __ldcg(groups.ends + min(first + lane, groups.count - 1));
    group += __popc(__ballot_sync(~0u, first + lane < groups.count && end <= row));
  }
  return group;
}

// What follows the product with the weight of a group, whose biases and scales are [G, N]. Without
// groups, as it was.
template <class Out, bool kGrouped>
__device__ __forceinline__ decltype(auto) epilogue_of(const Epilogue& p, int group) {
  if constexpr (kGrouped) {
    Epilogue own = p;
    const int64_t first = static_cast<int64_t>(group) * p.out_features;
    if (p.bias != nullptr) own.bias = static_cast<const Out*>(p.bias) + first;
    if (p.weight_scale != nullptr) own.weight_scale = p.weight_scale + first;
    return own;
  } else {
    return (p);
  }
}

}  // namespace regatta::cuda
