// See low_rank.h: each row's sums times the B of its adapter, and the residual or the function.
//
// Architectures: all; float32, bf16, fp16.
// Algorithm
//   1. Tiles (16 bits, many rows; stretches of columns of one part): a block adds up shrink()'s
//      pieces of up to 16 rows of an adapter. A warp multiplies them by 64 columns of B, mma
//      m16n8k16: eight ranks of a page, and the same again times what rounding took from the sums.
//   2. Rows (few; float32; odd columns): a thread has up to 16 bytes of a row's columns, adds up
//      the row's pieces itself, and goes over the ranks of its adapter.
// B of two pages is asked for while the launch ahead ends. Every sum's order is the row's alone.
// Bound: the bytes of B, and of the output for many rows; latency for few. Source: own.
#include <type_traits>

#include "cuda/adapters/low_rank.h"
#include "cuda/adapters/tiles.cuh"
#include "cuda/common.cuh"

namespace regatta::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kMostShared = 96 << 10;
constexpr int kTileWarps = 4;

template <class T>
struct Args {
  const float* sums;
  const float* squares;
  const int32_t* ids;
  float epsilon;
  int in_features, num_parts, max_pages, splits;
  int part_ends[kMaxAdaptedParts - 1];  // of columns; no less than all, where there are fewer parts
  bool ready;                           // ids may be read ahead of pdl_wait()
  SortedRows sorted;

  __device__ __forceinline__ int part_of(int column) const {
    return (column >= part_ends[0]) + (column >= part_ends[1]);
  }
};

// Neighbouring values of a row.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Unit {
  T v[kCount];
};

// grid: (rows, stretches of columns).
template <class T, Ending kEnding, int kUnit>
__global__ void __launch_bounds__(kThreads)
    expand_rows_kernel(const Args<T> args, const PageTables tables, const Outputs<T> to) {
  constexpr int kParts = kEnding == Ending::kGated ? 2 : 1;
  using Columns = Unit<T, kUnit>;
  const int64_t row = blockIdx.x;
  const int column = (blockIdx.y * kThreads + threadIdx.x) * kUnit;
  const bool is_inside = column < to.width;
  pdl_trigger();
  if (!args.ready) pdl_wait();
  const int adapter = args.ids[row];
  Columns ranks[kPagesAhead][kParts][kRanks];
  const auto load_page = [&](int page, Columns(&columns)[kParts][kRanks]) {
#pragma unroll
    for (int s = 0; s < kParts; ++s) {
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        const int64_t rank = static_cast<int64_t>(page) * kRanks + r;
        const T* from = to.b + rank * to.out_features + s * to.width + column;
        columns[s][r] = {};
        if (page >= 0 && is_inside) columns[s][r] = *reinterpret_cast<const Columns*>(from);
      }
    }
  };
#pragma unroll
  for (int i = 0; i < kPagesAhead; ++i) load_page(tables.page(adapter, i), ranks[i]);
  if (args.ready) pdl_wait();
  if (!is_inside) return;

  Columns source[kParts] = {};
  float sums[kParts][kUnit] = {};
#pragma unroll
  for (int s = 0; s < kParts; ++s) {
    const T* from = to.residual + row * to.out_features + s * to.width + column;
    if (to.residual != nullptr) source[s] = *reinterpret_cast<const Columns*>(from);
  }
  const int64_t first_piece = row * args.splits;
  float factor = 1.f;
  if (args.squares != nullptr && adapter >= 0) {
    float square = 0.f;
#pragma unroll 8
    for (int split = 0; split < args.splits; ++split) {
      square += __ldcg(args.squares + first_piece + split);
    }
    factor = rsqrtf(square / args.in_features + args.epsilon);
  }
  const auto multiply = [&](int number, const Columns(&columns)[kParts][kRanks]) {
#pragma unroll
    for (int s = 0; s < kParts; ++s) {
      const int part = args.part_of(s * to.width + column);
      float whole[kRanks] = {};
#pragma unroll 4
      for (int split = 0; split < args.splits; ++split) {
        const int64_t piece = first_piece + split;
        const int64_t of_page = (piece * args.num_parts + part) * args.max_pages + number;
        const auto* from = reinterpret_cast<const float4*>(args.sums + of_page * kRanks);
#pragma unroll
        for (int i = 0; i < kRanks / 4; ++i) {
          const float4 more = __ldcg(from + i);
          whole[4 * i] += more.x, whole[4 * i + 1] += more.y;
          whole[4 * i + 2] += more.z, whole[4 * i + 3] += more.w;
        }
      }
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        const float sum = whole[r] * factor;
#pragma unroll
        for (int i = 0; i < kUnit; ++i) {
          sums[s][i] = fmaf(sum, Traits<T>::to_float(columns[s][r].v[i]), sums[s][i]);
        }
      }
    }
  };
#pragma unroll
  for (int i = 0; i < kPagesAhead; ++i) {
    if (tables.page(adapter, i) >= 0) multiply(i, ranks[i]);
  }
  for (int i = kPagesAhead; tables.page(adapter, i) >= 0; ++i) {
    load_page(tables.page(adapter, i), ranks[0]);
    multiply(i, ranks[0]);
  }
#pragma unroll
  for (int s = 0; s < kParts; ++s) {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) sums[s][i] += Traits<T>::to_float(source[s].v[i]);
  }
  if constexpr (kEnding != Ending::kSum) apply(to.function, sums[0]);
  Columns out;
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    const float up = kEnding == Ending::kGated ? sums[kParts - 1][i] : 1.f;
    out.v[i] = Traits<T>::from_float(sums[0][i] * up);
  }
  *reinterpret_cast<Columns*>(to.out + row * to.width + column) = out;
}

// The sums of a tile's rows with every page of its adapter, of parts `part` and behind, as
// operands: pairs [num_parts, R, kTileRows, kRanks / 2].
template <class T>
__device__ __forceinline__ void pack_sums(const Args<T>& args, const Tile& tile, int count,
                                          int part, int num_parts, uint2* pairs) {
  constexpr int kPieces = 8;  // that are asked for at once
  const int of_part = args.max_pages * kPagePairs;
  for (int i = threadIdx.x; i < num_parts * of_part; i += kTileWarps * kWarp) {
    const int number = i % of_part / kPagePairs, row_number = i % kPagePairs / (kRanks / 2);
    if (row_number >= count || tile.page(number) < 0) continue;
    const int64_t first = static_cast<int64_t>(tile.row(row_number)) * args.splits;
    const int own_part = part + i / of_part, rank = i % (kRanks / 2) * 2;
    float2 sum = make_float2(0.f, 0.f);
    float square = 0.f;
    for (int split = 0; split < args.splits; split += kPieces) {
      float2 more[kPieces];
      float squares[kPieces];
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        const int64_t piece = first + min(split + j, args.splits - 1);
        const int64_t page = (piece * args.num_parts + own_part) * args.max_pages + number;
        more[j] = __ldcg(reinterpret_cast<const float2*>(args.sums + page * kRanks + rank));
        squares[j] = args.squares == nullptr ? 0.f : __ldcg(args.squares + piece);
      }
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        if (split + j >= args.splits) break;
        sum.x += more[j].x, sum.y += more[j].y, square += squares[j];
      }
    }
    if (args.squares != nullptr) {
      const float factor = rsqrtf(square / args.in_features + args.epsilon);
      sum.x *= factor, sum.y *= factor;
    }
    pairs[i] = rounded_pair<T>(sum);
  }
}

// grid: (stretches of columns, tiles).
template <class T, Ending kEnding>
__global__ void __launch_bounds__(kTileWarps* kWarp, kEnding == Ending::kGated ? 3 : 4)
    expand_tiles_kernel(const Args<T> args, const PageTables tables, const Outputs<T> to) {
  extern __shared__ uint2 pairs[];
  const int group = threadIdx.x % kWarp / 4;
  const int block_first = blockIdx.x * kTileWarps * kStretchColumns;
  // Those of the block's columns; gated, of gates and ups.
  const int part = args.part_of(block_first);
  const int last = min(block_first + kTileWarps * kStretchColumns, to.width) - 1;
  const int num_parts = kEnding == Ending::kGated ? 2 : args.part_of(last) - part + 1;
  Stretch<T, kEnding> stretch(to, block_first + threadIdx.x / kWarp * kStretchColumns);
  const uint2* own = pairs;
  if (kEnding != Ending::kGated) {
    own += (args.part_of(min(stretch.first, to.width - 1)) - part) * args.max_pages * kPagePairs;
  }
  pdl_trigger();
  bool waited = false;
  for (int index = blockIdx.y;; index += gridDim.y) {
    const Tile tile(args.sorted, tables, index);
    const int count = tile.count();
    const int rows[2] = {tile.row(group), tile.row(group + 8)};
    int pages[kPagesAhead];
#pragma unroll
    for (int i = 0; i < kPagesAhead; ++i) pages[i] = tile.page(i);
    if (count == 0) break;
    typename Stretch<T, kEnding>::Columns ahead[kPagesAhead];
#pragma unroll
    for (int i = 0; i < kPagesAhead; ++i) ahead[i] = stretch.load(pages[i]);
    if (!waited) pdl_wait();
    waited = true;
    stretch.begin(rows);
    __syncthreads();  // what was there has been read
    pack_sums(args, tile, count, part, num_parts, pairs);
    __syncthreads();
    const int part_stride = args.max_pages * kPagePairs;
#pragma unroll
    for (int i = 0; i < kPagesAhead; ++i) {
      if (pages[i] >= 0) stretch.multiply(ahead[i], own + i * kPagePairs, part_stride);
    }
    for (int i = kPagesAhead; tile.page(i) >= 0; ++i) {
      stretch.multiply(stretch.load(tile.page(i)), own + i * kPagePairs, part_stride);
    }
    stretch.end(rows, count);
  }
  if (!waited) pdl_wait();
}

// Of a tile's sums in shared memory.
int64_t pair_bytes(const ExpandParams& p) {
  return int64_t{sizeof(uint2)} * p.num_parts * p.rows.max_pages * kPagePairs;
}

// Whether every part, and so every half of a gated linear, is of whole units of so many columns.
bool is_of_units(const ExpandParams& p, int64_t unit) {
  bool is_whole = p.out_features % unit == 0;
  for (int64_t i = 0; i < p.num_parts; ++i) is_whole = is_whole && p.part_ends[i] % unit == 0;
  return is_whole;
}

template <class T, Ending kEnding, int kUnit>
Status run_rows(const Args<T>& args, const Outputs<T>& to, const ExpandParams& p,
                const Launch& launch_on) {
  const dim3 grid = grid_of(p.num_rows, ceil_div(to.width, kThreads * kUnit));
  return launch(expand_rows_kernel<T, kEnding, kUnit>, {launch_on, grid, kThreads}, "expand", args,
                tables_of(p.rows, p.which, p.weights.num_pages), to);
}

template <class T, Ending kEnding>
Status run(const ExpandParams& p, const Launch& launch_on) {
  constexpr int kParts = kEnding == Ending::kGated ? 2 : 1;
  constexpr int kUnit = Vec16<T>::kSize / kParts;
  Args<T> args = {};
  args.sums = p.sums;
  args.squares = p.squares;
  args.ids = p.rows.ids;
  args.epsilon = p.epsilon;
  args.in_features = static_cast<int>(p.in_features);
  args.num_parts = static_cast<int>(p.num_parts);
  args.max_pages = static_cast<int>(p.rows.max_pages);
  args.splits = static_cast<int>(shrink_splits(p.in_features));
  for (int i = 0; i + 1 < kMaxAdaptedParts; ++i) {
    args.part_ends[i] = static_cast<int>(i < p.num_parts ? p.part_ends[i] : p.out_features);
  }
  args.ready = p.ready;
  args.sorted = p.sorted;
  Outputs<T> to = {};
  to.b = static_cast<const T*>(p.weights.b);
  to.residual = static_cast<const T*>(p.residual);
  to.out = static_cast<T*>(p.out);
  to.out_features = static_cast<int>(p.out_features);
  to.width = to.out_features / kParts;
  if (p.activation != nullptr) to.function = p.activation->function;
  if constexpr (sizeof(T) == 2) {
    const bool fits = is_of_units(p, kStretchColumns) && pair_bytes(p) <= kMostShared;
    if (fits && takes_tiles(p.dtype, p.num_rows)) {
      const dim3 grid =
          grid_of(ceil_div(to.width, kTileWarps * kStretchColumns), num_tile_blocks(p.num_rows));
      return launch(expand_tiles_kernel<T, kEnding>,
                    {launch_on, grid, kTileWarps * kWarp, pair_bytes(p)}, "expand", args,
                    tables_of(p.rows, p.which, p.weights.num_pages), to);
    }
  }
  return is_of_units(p, kUnit) ? run_rows<T, kEnding, kUnit>(args, to, p, launch_on)
                               : run_rows<T, kEnding, 1>(args, to, p, launch_on);
}

}  // namespace

Status expand(const ExpandParams& p, const Launch& launch_on) {
  if (p.num_rows == 0) return {};
  if (p.num_parts > kMaxAdaptedParts) return Status::error("expand: too many parts");
  return dispatch_dtype(p.dtype, "expand", [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    if (p.activation == nullptr) return run<T, Ending::kSum>(p, launch_on);
    return p.activation->gated ? run<T, Ending::kGated>(p, launch_on)
                               : run<T, Ending::kFunction>(p, launch_on);
  });
}

}  // namespace regatta::cuda
