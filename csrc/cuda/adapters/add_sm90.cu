// shrink() and expand() of few rows in one launch: see low_rank.h.
//
// Architectures: sm_90.
// Algorithm: a cluster of eight blocks has a tile of up to 16 rows of an adapter. Each block sums
// an eighth of K for all pages of all parts, as shrink.cu does, and tells every block what it has;
// then each has the whole sums and makes an eighth of the columns, as expand.cu does. A and B come
// into L2 while the launch ahead ends. Bound: latency, of three trips to L2 and one between the
// blocks. Source: own.
#include <algorithm>

#include "cuda/adapters/tiles.cuh"
#include "cuda/hopper.cuh"

namespace regatta::cuda {
namespace {

constexpr int kBlocks = 8;  // of a cluster
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kMostClusters = 16;
constexpr int kItems = 6;  // pages of parts that a warp multiplies at once
constexpr int kStepColumns = 32;
constexpr int64_t kMostRows = 256;
constexpr size_t kMostShared = 72 << 10;

struct Input {
  const void* x;
  const void* norm_weight;
  const void* a;
  int width, num_parts, steps;  // steps: of kStepColumns, of a warp
  int part_ends[kMaxAdaptedParts - 1];
  float epsilon;
};

// What a cluster's blocks tell each other, behind what a block's warps do.
struct Shared {
  float* of_warps;           // [kItems, kWarps, kPageValues]
  float* squares_of_warps;   // [kWarps, kTileRows]
  float* of_blocks;          // [kBlocks, parts R, kPageValues]
  float* squares_of_blocks;  // [kBlocks, kTileRows]
  uint2* pairs;              // [parts R, kPagePairs]
};

size_t shared_bytes(int64_t items) {
  return sizeof(float) * static_cast<size_t>(kItems * kWarps * kPageValues + kWarps * kTileRows +
                                             kBlocks * (items * kPageValues + kTileRows)) +
         sizeof(uint2) * static_cast<size_t>(items * kPagePairs);
}

__device__ __forceinline__ Shared split(float* memory, int items) {
  Shared s;
  s.of_warps = memory;
  s.squares_of_warps = s.of_warps + kItems * kWarps * kPageValues;
  s.of_blocks = s.squares_of_warps + kWarps * kTileRows;
  s.squares_of_blocks = s.of_blocks + kBlocks * items * kPageValues;
  s.pairs = reinterpret_cast<uint2*>(s.squares_of_blocks + kBlocks * kTileRows);
  return s;
}

__device__ __forceinline__ void prefetch_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// Into the same place of every block's shared memory.
__device__ __forceinline__ void tell_all(float* place, float value) {
  const uint32_t own = shared_address(place);
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(own), "r"(block));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
  }
}

// grid: (kBlocks, tiles), clusters along x.
template <class T>
__global__ void __launch_bounds__(kThreads, 2)
    add_kernel(const Input in, const SortedRows sorted, const PageTables tables,
               const Outputs<T> to) {
#ifdef REGATTA_SM90
  extern __shared__ float memory[];
  const int items = in.num_parts * tables.max_pages;  // item: a part's page
  const Shared shared = split(memory, items);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int group = lane / 4, unit = lane % 4;
  const int rank = static_cast<int>(cluster_rank());
  const int first_column = (rank * kWarps + warp) * in.steps * kStepColumns + unit * 8;
  const int stretches = to.width / kStretchColumns;
  const int first_stretch = stretches * rank / kBlocks + warp;
  const int last_stretch = stretches * (rank + 1) / kBlocks;
  const auto row_of_a = [&](int page, int part) {
    return static_cast<const T*>(in.a) +
           ((static_cast<int64_t>(page) * in.num_parts + part) * kRanks + group) * in.width;
  };
  const auto load = [&](const T* row, int column) {
    return column < in.width ? *reinterpret_cast<const uint4*>(row + column)
                             : make_uint4(0, 0, 0, 0);
  };
  pdl_trigger();
  cluster_arrive();  // all blocks are there before one writes to another
  bool waited = false;
  const int num_tiles = __ldcg(sorted.num_tiles);
  for (int index = blockIdx.y; index < num_tiles; index += gridDim.y) {
    const RowTile tile = tile_at(sorted, index);
    const int rows[2] = {row_of(sorted, tile, group), row_of(sorted, tile, group + 8)};
    if (!waited) {
      for (int item = 0; item < items; ++item) {
        const int page = tables.page(tile.adapter, item % tables.max_pages);
        for (int step = 0; page >= 0 && step < in.steps; ++step) {
          const int column = first_column + step * kStepColumns;
          if (column < in.width) prefetch_l2(row_of_a(page, item / tables.max_pages) + column);
        }
      }
      for (int s = first_stretch; s < last_stretch; s += kWarps) {
        for (int i = 0; tables.page(tile.adapter, i) >= 0; ++i) {
          const int64_t of = static_cast<int64_t>(tables.page(tile.adapter, i)) * kRanks + group;
          prefetch_l2(to.b + of * to.out_features + s * kStretchColumns + unit * 16);
        }
      }
      cluster_wait();
      pdl_wait();
      waited = true;
    }
    const bool sums_squares = in.norm_weight != nullptr;
    for (int base = 0; tile.adapter >= 0 && base < items; base += kItems) {
      float sums[kItems][4] = {}, squares[2] = {};
      const T* from[kItems];
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int item = base + i;
        const int page = item < items ? tables.page(tile.adapter, item % tables.max_pages) : -1;
        from[i] = page < 0 ? nullptr : row_of_a(page, item / tables.max_pages);
      }
#pragma unroll 2
      for (int step = 0; step < in.steps; ++step) {
        const int column = first_column + step * kStepColumns;
        uint4 x[2], a[kItems], norm = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          a[i] = from[i] != nullptr ? load(from[i], column) : make_uint4(0, 0, 0, 0);
        }
        if (sums_squares) norm = load(static_cast<const T*>(in.norm_weight), column);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          x[h] =
              load(static_cast<const T*>(in.x) + static_cast<int64_t>(rows[h]) * in.width, column);
          if (sums_squares && base == 0) squares[h] = sum_of_squares<T>(x[h], squares[h]);
        }
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          if (from[i] == nullptr) continue;
          multiply_columns<T>(sums[i], x, sums_squares ? times<T>(a[i], norm) : a[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (from[i] == nullptr) continue;
        float* place = shared.of_warps + (i * kWarps + warp) * kPageValues + 2 * unit;
        place[group * kRanks] = sums[i][0], place[group * kRanks + 1] = sums[i][1];
        place[(group + 8) * kRanks] = sums[i][2], place[(group + 8) * kRanks + 1] = sums[i][3];
      }
      if (sums_squares && base == 0) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          squares[h] += __shfl_xor_sync(~0u, squares[h], 1);
          squares[h] += __shfl_xor_sync(~0u, squares[h], 2);
          if (unit == 0) shared.squares_of_warps[warp * kTileRows + group + 8 * h] = squares[h];
        }
      }
      __syncthreads();
      const int of_rows = tile.count * kRanks;
      for (int i = threadIdx.x; i < kItems * of_rows; i += kThreads) {
        const int item = base + i / of_rows, at = i % of_rows;
        if (item >= items || tables.page(tile.adapter, item % tables.max_pages) < 0) continue;
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          sum += shared.of_warps[(i / of_rows * kWarps + w) * kPageValues + at];
        }
        tell_all(shared.of_blocks + (rank * items + item) * kPageValues + at, sum);
      }
      if (sums_squares && base == 0 && threadIdx.x < kTileRows) {
        float square = 0.f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          square += shared.squares_of_warps[w * kTileRows + threadIdx.x];
        }
        tell_all(shared.squares_of_blocks + rank * kTileRows + threadIdx.x, square);
      }
      __syncthreads();  // what the warps left has been read
    }
    cluster_arrive();
    cluster_wait();

    for (int i = threadIdx.x; tile.adapter >= 0 && i < items * kPagePairs; i += kThreads) {
      const int item = i / kPagePairs, at = i % kPagePairs * 2, row = at / kRanks;
      if (row >= tile.count) continue;
      float2 sum = make_float2(0.f, 0.f);
      float square = 0.f;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const float2 more = *reinterpret_cast<const float2*>(
            shared.of_blocks + (block * items + item) * kPageValues + at);
        sum.x += more.x, sum.y += more.y;
        square += shared.squares_of_blocks[block * kTileRows + row];
      }
      if (sums_squares) {
        const float factor = rsqrtf(square / in.width + in.epsilon);
        sum.x *= factor, sum.y *= factor;
      }
      shared.pairs[i] = rounded_pair<T>(sum);
    }
    __syncthreads();

    for (int s = first_stretch; s < last_stretch; s += kWarps) {
      Stretch<T, Ending::kSum> stretch(to, s * kStretchColumns);
      typename Stretch<T, Ending::kSum>::Columns ahead[kPagesAhead];
#pragma unroll
      for (int i = 0; i < kPagesAhead; ++i) ahead[i] = stretch.load(tables.page(tile.adapter, i));
      stretch.begin(rows);
      const int part = (stretch.first >= in.part_ends[0]) + (stretch.first >= in.part_ends[1]);
      stretch.multiply_all(tables, tile.adapter, ahead,
                           shared.pairs + part * tables.max_pages * kPagePairs, 0);
      stretch.end(rows, tile.count);
    }
    if (index + static_cast<int>(gridDim.y) < num_tiles) {
      cluster_arrive();  // the next tile's sums come where these have been read
      cluster_wait();
    }
  }
  if (!waited) {
    cluster_wait();
    pdl_wait();
  }
#else
  wrong_architecture();
#endif
}

template <class T>
Status run(const ShrinkParams& down, const ExpandParams& up, const Launch& launch_on) {
  Input in = {};
  in.x = down.x;
  in.norm_weight = down.norm_weight;
  in.a = down.weights.a;
  in.width = static_cast<int>(down.in_features);
  in.num_parts = static_cast<int>(down.num_parts);
  in.steps = static_cast<int>(ceil_div(down.in_features, kBlocks * kWarps * kStepColumns));
  in.epsilon = up.epsilon;
  for (int i = 0; i + 1 < kMaxAdaptedParts; ++i) {
    in.part_ends[i] = static_cast<int>(i < up.num_parts ? up.part_ends[i] : up.out_features);
  }
  Outputs<T> to = {};
  to.b = static_cast<const T*>(up.weights.b);
  to.residual = static_cast<const T*>(up.residual);
  to.out = static_cast<T*>(up.out);
  to.width = to.out_features = static_cast<int>(up.out_features);
  const int64_t tiles = max_row_tiles(down.num_rows, down.rows.num_adapters);
  LaunchConfig config;
  config.grid = dim3(kBlocks, static_cast<unsigned>(std::min<int64_t>(tiles, kMostClusters)));
  config.block = dim3(kThreads);
  config.cluster_x = kBlocks;
  config.shared_bytes = shared_bytes(down.num_parts * down.rows.max_pages);
  config.stream = launch_on.stream;
  config.pdl = launch_on.pdl;
  return launch(add_kernel<T>, config, "add_adapters", in, down.sorted,
                tables_of(down.rows, down.which, down.weights.num_pages), to);
}

}  // namespace

bool adds_at_once_sm90(const ShrinkParams& down, const ExpandParams& up) {
  bool fits = takes_tiles(down.dtype) && down.num_rows <= kMostRows && up.activation == nullptr &&
              down.in_features % 8 == 0 && up.out_features % kStretchColumns == 0 &&
              shared_bytes(down.num_parts * down.rows.max_pages) <= kMostShared;
  for (int64_t i = 0; i < up.num_parts; ++i) fits = fits && up.part_ends[i] % kStretchColumns == 0;
  return fits;
}

Status add_adapters_sm90(const ShrinkParams& down, const ExpandParams& up,
                         const Launch& launch_on) {
  if (down.num_rows == 0) return {};
  return down.dtype == DType::kBFloat16 ? run<__nv_bfloat16>(down, up, launch_on)
                                        : run<__half>(down, up, launch_on);
}

}  // namespace regatta::cuda
