// See low_rank.h: each row times the A of its adapter.
//
// Architectures: all; float32, bf16, fp16.
// Algorithm
//   1. Tiles (16 bits, many rows): a block has kColumns columns of one part and up to 16 rows of an
//      adapter. Its warps share the columns and multiply them by the A of two pages, mma m16n8k16;
//      their sums meet in shared memory.
//   2. Rows (few; float32; widths that are not whole units): a block has columns of a page and one
//      row, a warp a rank. Where the product takes codes, one more block makes those of a row.
// A is asked for while the launch ahead ends. Every sum's order is the row's alone.
// Bound: the bytes of A, once for each 16 rows of an adapter; latency for few. Source: own;
// gathering by row is Punica's (2023).
#include <type_traits>

#include "cuda/adapters/low_rank.h"
#include "cuda/adapters/tiles.cuh"
#include "cuda/common.cuh"
#include "cuda/gemm/quantize_row.cuh"

namespace regatta::cuda {
namespace {

constexpr int kThreads = kRanks * kWarp;
constexpr int kColumns = 2048;  // of K, that a block sums

// Of tiles.
constexpr int kTileWarps = 8;
constexpr int kTileThreads = kTileWarps * kWarp;
constexpr int kWarpColumns = kColumns / kTileWarps;
constexpr int kStepColumns = 32;
constexpr int kSteps = kWarpColumns / kStepColumns;
constexpr int kPair = 2;  // pages that a warp has at once

template <class T>
struct Args {
  const T* x;
  const T* norm_weight;
  const T* a;
  const int32_t* ids;
  float* sums;
  float* squares;
  int width, num_parts, max_pages, splits;
  bool ready;  // ids may be read ahead of pdl_wait()
  SortedRows sorted;
};

// 16 bytes of a row from `first` on, what lies past its end as 0.
template <bool kVector, class T>
__device__ __forceinline__ Vec16<T> load_unit(const T* row, int first, int width) {
  Vec16<T> unit = {};
  if (kVector) {
    if (first < width) unit = load16(row + first);
  } else {
#pragma unroll
    for (int i = 0; i < Vec16<T>::kSize; ++i) {
      if (first + i < width) unit.v[i] = row[first + i];
    }
  }
  return unit;
}

// Codes that shrink() makes. kVectors: pieces of a row that a thread has.
struct NoCodes {
  static constexpr int kVectors = 0;
};
template <bool kFp8Codes, RowKind kRowKind, int kPieces>
struct Codes {
  static constexpr bool kFp8 = kFp8Codes;
  static constexpr RowKind kKind = kRowKind;
  static constexpr int kVectors = kPieces;
};
constexpr int kFewVectors = 2, kMostVectors = 8;
constexpr int64_t kMostQuantized = int64_t{kThreads} * 8 * kMostVectors;  // values of a row

// Of a block's row.
template <class T, class C>
__device__ __forceinline__ void quantize(const QuantizeRowsParams& p) {
  using R = Row<T, C::kKind, C::kVectors, kThreads>;
  __shared__ QuantizeScratch scratch;
  const int64_t row = blockIdx.x, width = p.width;
  Vec16<T> x[C::kVectors], weight[R::kNumWeights] = {};
  if constexpr (R::kKeepsWeight) R::load(p.norm_weight, static_cast<int>(width), weight);
  const float fixed = p.static_scale != nullptr ? *p.static_scale : 0.f;
  pdl_wait();
  R::load(static_cast<const T*>(p.x) + row * width, static_cast<int>(width), x);
  uint8_t* codes = static_cast<uint8_t*>(p.codes) + row * width;
  const float scale = quantize_row<T, C::kFp8, C::kKind, C::kVectors, kThreads>(
      p, x, weight, fixed, scratch, 1,
      [&](int at, uint2 eight) { *reinterpret_cast<uint2*>(codes + at) = eight; });
  if (threadIdx.x == 0) p.scale[row] = scale;
}

// grid: (rows, the row's codes where there are some and pages of parts of pieces).
template <class T, bool kVector, class C>
__global__ void __launch_bounds__(kThreads, 2)
    shrink_rows_kernel(const Args<T> args, const PageTables tables,
                       const QuantizeRowsParams codes) {
  constexpr int kSize = Vec16<T>::kSize, kUnits = kColumns / kWarp / kSize;
  constexpr bool kQuantizes = C::kVectors > 0;
  pdl_trigger();
  if constexpr (kQuantizes) {
    if (blockIdx.y == 0) return quantize<T, C>(codes);
  }
  const int rank = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int index = static_cast<int>(blockIdx.y) - kQuantizes;
  const int split = index % args.splits;
  const int part = index / args.splits % args.num_parts;
  const int number = index / args.splits / args.num_parts;
  const int column = split * kColumns + lane * kSize;
  const int64_t row = blockIdx.x;
  if (!args.ready) pdl_wait();
  const int page = tables.page(args.ids[row], number);
  Vec16<T> a[kUnits];  // times the norm's weight
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const int from = column + u * kWarp * kSize;
    const int64_t at = (static_cast<int64_t>(page) * args.num_parts + part) * kRanks + rank;
    a[u] = {};
    if (page < 0) continue;
    a[u] = load_unit<kVector>(args.a + at * args.width, from, args.width);
    if (args.norm_weight == nullptr) continue;
    const Vec16<T> norm = load_unit<kVector>(args.norm_weight, from, args.width);
#pragma unroll
    for (int i = 0; i < kSize; ++i) a[u].set(i, a[u].get(i) * norm.get(i));
  }
  if (args.ready) pdl_wait();
  if (page < 0) return;
  float dot = 0.f, square = 0.f;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const int from = column + u * kWarp * kSize;
    const Vec16<T> x = load_unit<kVector>(args.x + row * args.width, from, args.width);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const float value = x.get(i);
      dot = fmaf(value, a[u].get(i), dot);
      square = fmaf(value, value, square);
    }
  }
  dot = warp_sum(dot);
  const int64_t piece = row * args.splits + split;
  if (lane == 0) {
    const int64_t of_page = (piece * args.num_parts + part) * args.max_pages + number;
    args.sums[of_page * kRanks + rank] = dot;
  }
  if (args.norm_weight != nullptr && part == 0 && number == 0 && rank == 0) {
    square = warp_sum(square);
    if (lane == 0) args.squares[piece] = square;
  }
}

// grid: (pieces of parts, tiles).
template <class T>
__global__ void __launch_bounds__(kTileThreads, 2)
    shrink_tiles_kernel(const Args<T> args, const PageTables tables) {
  __shared__ float shared_sums[kTileWarps][kPair][kPageValues];
  __shared__ float shared_squares[kTileWarps][kTileRows];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int group = lane / 4, unit = lane % 4;
  const int split = blockIdx.x % args.splits, part = blockIdx.x / args.splits;
  const int column = split * kColumns + warp * kWarpColumns + unit * Vec16<T>::kSize;
  const auto load = [&](const T* row, int step) {
    const int at = column + step * kStepColumns;
    return at < args.width ? *reinterpret_cast<const uint4*>(row + at) : make_uint4(0, 0, 0, 0);
  };
  pdl_trigger();
  bool waited = false;
  for (int index = blockIdx.y;; index += gridDim.y) {
    const Tile tile(args.sorted, tables, index);
    const int count = tile.count();
    const int rows[2] = {tile.row(group), tile.row(group + 8)};
    int pages[kPair] = {tile.page(0), tile.page(1)};
    if (count == 0) break;
    for (int number = 0; pages[0] >= 0; number += kPair) {
      uint4 a[kPair][kSteps];
      const bool is_pair = pages[1] >= 0;
#pragma unroll
      for (int i = 0; i < kPair; ++i) {
        const int64_t page = pages[i];
        const T* from = args.a + ((page * args.num_parts + part) * kRanks + group) * args.width;
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          a[i][s] = page >= 0 ? load(from, s) : make_uint4(0, 0, 0, 0);
        }
      }
      if (args.norm_weight != nullptr) {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          const uint4 norm = load(args.norm_weight, s);
#pragma unroll
          for (int i = 0; i < kPair; ++i) a[i][s] = times<T>(a[i][s], norm);
        }
      }
      if (!waited) pdl_wait();
      waited = true;
      const bool sums_squares = args.norm_weight != nullptr && part == 0 && number == 0;
      float sums[kPair][4] = {}, squares[2] = {};
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        uint4 x[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          x[h] = load(args.x + static_cast<int64_t>(rows[h]) * args.width, s);
          if (sums_squares) squares[h] = sum_of_squares<T>(x[h], squares[h]);
        }
#pragma unroll
        for (int i = 0; i < kPair; ++i) multiply_columns<T>(sums[i], x, a[i][s]);
      }
      __syncthreads();  // what was there has been read
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int i = 0; i < kPair; ++i) {
          float* to = &shared_sums[warp][i][(group + 8 * h) * kRanks + 2 * unit];
          to[0] = sums[i][2 * h], to[1] = sums[i][2 * h + 1];
        }
        if (sums_squares) {
          squares[h] += __shfl_xor_sync(~0u, squares[h], 1);
          squares[h] += __shfl_xor_sync(~0u, squares[h], 2);
          if (unit == 0) shared_squares[warp][group + 8 * h] = squares[h];
        }
      }
      __syncthreads();
      static_assert(kPair * kPageValues == kTileThreads);
      const int i = threadIdx.x / kPageValues, at = threadIdx.x % kPageValues;
      if (at / kRanks < count && (i == 0 || is_pair)) {
        float sum = 0.f, square = 0.f;
#pragma unroll
        for (int w = 0; w < kTileWarps; ++w) sum += shared_sums[w][i][at];
        const int64_t row = tile.row(at / kRanks);
        const int64_t piece = row * args.splits + split;
        const int64_t of_page = (piece * args.num_parts + part) * args.max_pages + number + i;
        args.sums[of_page * kRanks + at % kRanks] = sum;
        if (sums_squares && i == 0 && at % kRanks == 0) {
#pragma unroll
          for (int w = 0; w < kTileWarps; ++w) square += shared_squares[w][at / kRanks];
          args.squares[piece] = square;
        }
      }
#pragma unroll
      for (int j = 0; j < kPair; ++j) pages[j] = tile.page(number + kPair + j);
    }
  }
  if (!waited) pdl_wait();
}

template <class T>
using RowsKernel = void (*)(Args<T>, PageTables, QuantizeRowsParams);

template <class T, bool kFp8, RowKind kKind>
RowsKernel<T> coding_kernel(int64_t width) {
  return width <= int64_t{kThreads} * 8 * kFewVectors
             ? shrink_rows_kernel<T, true, Codes<kFp8, kKind, kFewVectors>>
             : shrink_rows_kernel<T, true, Codes<kFp8, kKind, kMostVectors>>;
}

// whole: rows are of whole units, as those that become codes are.
template <class T>
RowsKernel<T> rows_kernel(const QuantizeRowsParams& q, bool whole) {
  if constexpr (sizeof(T) == 2) {
    if (q.codes != nullptr) {
      const bool plain = row_kind(q) == RowKind::kPlain;
      if (q.operands == GemmOperands::kFp8) {
        return plain ? coding_kernel<T, true, RowKind::kPlain>(q.width)
                     : coding_kernel<T, true, RowKind::kNorm>(q.width);
      }
      return plain ? coding_kernel<T, false, RowKind::kPlain>(q.width)
                   : coding_kernel<T, false, RowKind::kNorm>(q.width);
    }
  }
  return whole ? shrink_rows_kernel<T, true, NoCodes> : shrink_rows_kernel<T, false, NoCodes>;
}

template <class T>
Status run(const ShrinkParams& p, const Launch& launch_on) {
  Args<T> args = {};
  args.x = static_cast<const T*>(p.x);
  args.norm_weight = static_cast<const T*>(p.norm_weight);
  args.a = static_cast<const T*>(p.weights.a);
  args.ids = p.rows.ids;
  args.sums = p.sums;
  args.squares = p.squares;
  args.width = static_cast<int>(p.in_features);
  args.num_parts = static_cast<int>(p.num_parts);
  args.max_pages = static_cast<int>(p.rows.max_pages);
  args.splits = static_cast<int>(shrink_splits(p.in_features));
  args.ready = p.ready;
  args.sorted = p.sorted;
  const PageTables tables = tables_of(p.rows, p.which, p.weights.num_pages);
  const bool whole = p.in_features % Vec16<T>::kSize == 0;
  const int64_t pieces = int64_t{args.splits} * args.num_parts;
  if constexpr (sizeof(T) == 2) {
    if (whole && takes_tiles(p.dtype, p.num_rows)) {
      const dim3 grid = grid_of(pieces, num_tile_blocks(p.num_rows));
      return launch(shrink_tiles_kernel<T>, {launch_on, grid, kTileThreads}, "shrink", args,
                    tables);
    }
  }
  const int64_t codes = p.quantize.codes != nullptr;
  return launch(rows_kernel<T>(p.quantize, whole),
                {launch_on, grid_of(p.num_rows, codes + pieces * p.rows.max_pages), kThreads},
                "shrink", args, tables, p.quantize);
}

}  // namespace

int64_t shrink_splits(int64_t in_features) { return ceil_div(in_features, kColumns); }

bool shrink_quantizes(const ShrinkParams& p, const QuantizeRowsParams& q) {
  static_assert(kThreads == kQuantizeThreads);
  return p.num_rows > 0 && p.rows.max_pages > 0 && p.dtype != DType::kFloat32 &&
         !takes_tiles(p.dtype, p.num_rows) && p.in_features % 8 == 0 &&
         p.in_features <= kMostQuantized && row_kind(q) != RowKind::kAny && !q.blocks && !q.gated;
}

Status shrink(const ShrinkParams& p, const Launch& launch_on) {
  if (p.num_rows == 0 || p.rows.max_pages == 0) return {};
  return dispatch_dtype(p.dtype, "shrink", [&](auto* t) {
    return run<std::remove_pointer_t<decltype(t)>>(p, launch_on);
  });
}

}  // namespace regatta::cuda
