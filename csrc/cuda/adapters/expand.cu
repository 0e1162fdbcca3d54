// See low_rank.h: each row's sums times the B of its adapter, and the residual or the function.
//
// Architectures: all; float32, bf16, fp16.
// Algorithm
//   Tiles (16 bits; units of columns that are whole and of one part): a warp has 64 columns, gated
//   of gates and of ups, of the up to 16 rows of an adapter that a tile holds. It adds up the
//   pieces that shrink() left of their sums, and multiplies them by B, mma m16n8k16: eight ranks of
//   a page, and the same again times what rounding took from the sums. A lane reads 16 bytes of two
//   ranks, so that eight products leave it 8 neighbouring columns, twice, of two rows. B of two
//   pages is asked for while the launch ahead ends. Rows: a block has a stretch of columns and up
//   to kTokens rows. First it adds up the pieces, and the norm's factor, in shared memory; then
//   each thread owns 16 bytes of columns (one column, where parts or rows are odd) and goes over
//   the pages of row after row: B comes from L1 where rows beside each other have the same adapter.
//   A function is another launch.
// Every sum's order is the row's alone.
// Bound: the bytes of B, and of the output for many rows. Source: own.
#include <algorithm>
#include <type_traits>

#include "cuda/adapters/low_rank.h"
#include "cuda/adapters/tiles.cuh"
#include "cuda/common.cuh"

namespace regatta::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kFewRows = 64;
constexpr int kManyTokens = 16;
constexpr size_t kMostShared = 96 << 10;

// Of tiles.
constexpr int kTileWarps = 4;
constexpr unsigned kMostTileBlocks = 1024;

template <class T>
struct Args {
  const float* sums;
  const float* squares;
  float epsilon;
  const T* b;
  const int32_t* ids;
  const int32_t* pages;
  const T* residual;
  T* out;
  int num_rows, in_features, out_features, num_parts, max_pages, num_pages, which, splits;
  int part_ends[kMaxAdaptedParts - 1];  // of columns; no less than all, where there are fewer parts
  SortedRows sorted;
};

// The pages of a row's adapter, or null.
template <class T>
__device__ __forceinline__ const int32_t* pages_of(const Args<T>& args, int row) {
  const int id = args.ids[row];
  if (id < 0) return nullptr;
  return args.pages + (static_cast<int64_t>(id) * kNumAdapted + args.which) * args.max_pages;
}

// made [count, parts, R, kPageRanks]: the rows' sums whole, times the norm's factor.
template <class T>
__device__ __forceinline__ void add_pieces(const Args<T>& args, int first, int count, float* made) {
  const int of_row = args.num_parts * args.max_pages * static_cast<int>(kPageRanks);
  for (int i = threadIdx.x; i < count * of_row; i += kThreads) {
    const int row = first + i / of_row, at = i % of_row;
    const int32_t* pages = pages_of(args, row);
    const int number = at / static_cast<int>(kPageRanks) % args.max_pages;
    // Behind the adapter's last page, and of other rows, nothing was written.
    if (pages == nullptr || pages[number] < 0 || pages[number] >= args.num_pages) continue;
    float sum = 0.f, square = 0.f;
    for (int split = 0; split < args.splits; ++split) {
      const int64_t piece = static_cast<int64_t>(row) * args.splits + split;
      sum += args.sums[piece * of_row + at];
      if (args.squares != nullptr) square += args.squares[piece];
    }
    if (args.squares != nullptr) sum *= rsqrtf(square / args.in_features + args.epsilon);
    made[i] = sum;
  }
}

// grid: (stretches of columns, tiles of rows).
template <class T, bool kVector, int kTokens>
__global__ void __launch_bounds__(kThreads) expand_kernel(const Args<T> args) {
  constexpr int kUnit = kVector ? Vec16<T>::kSize : 1;
  extern __shared__ float made[];
  const int first = blockIdx.y * kTokens;
  const int count = min(kTokens, args.num_rows - first);
  const int column = (blockIdx.x * kThreads + threadIdx.x) * kUnit;
  pdl_trigger();
  pdl_wait();
  add_pieces(args, first, count, made);
  __syncthreads();
  if (column >= args.out_features) return;
  const int part = (column >= args.part_ends[0]) + (column >= args.part_ends[1]);
  const int of_part = args.max_pages * static_cast<int>(kPageRanks);
  for (int t = 0; t < count; ++t) {
    const int row = first + t;
    const int64_t at = static_cast<int64_t>(row) * args.out_features + column;
    float sum[kUnit] = {};
    const int32_t* pages = pages_of(args, row);
    const float* sums = made + (t * args.num_parts + part) * of_part;
    for (int number = 0; pages != nullptr && number < args.max_pages; ++number) {
      const int page = pages[number];
      if (page < 0 || page >= args.num_pages) break;
      const T* b = args.b + static_cast<int64_t>(page) * kPageRanks * args.out_features + column;
#pragma unroll
      for (int r = 0; r < kPageRanks; ++r) {
        const float factor = sums[number * kPageRanks + r];
        const T* from = b + static_cast<int64_t>(r) * args.out_features;
        if constexpr (kVector) {
          const Vec16<T> values = load16(from);
#pragma unroll
          for (int i = 0; i < kUnit; ++i) sum[i] = fmaf(factor, values.get(i), sum[i]);
        } else {
          sum[0] = fmaf(factor, Traits<T>::to_float(*from), sum[0]);
        }
      }
    }
    if constexpr (kVector) {
      Vec16<T> out = {};
      if (args.residual != nullptr) out = load16(args.residual + at);
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        if (args.residual == nullptr || pages != nullptr) out.set(i, out.get(i) + sum[i]);
      }
      store16(args.out + at, out);
    } else {
      const float source = args.residual == nullptr ? 0.f : Traits<T>::to_float(args.residual[at]);
      args.out[at] = Traits<T>::from_float(source + sum[0]);
    }
  }
}

// The sums of a tile's rows with every page of its adapter, of parts `part` and behind, as
// operands: pairs [num_parts, R, kTileRows, kRanks / 2].
template <class T>
__device__ __forceinline__ void pack_sums(const Args<T>& args, const PageTables& tables,
                                          const RowTile& tile, int part, int num_parts,
                                          uint2* pairs) {
  constexpr int kPieces = 8;  // that are asked for at once
  const int of_part = args.max_pages * kPagePairs;
  for (int i = threadIdx.x; i < num_parts * of_part; i += kTileWarps * kWarp) {
    const int number = i % of_part / kPagePairs, row_number = i % kPagePairs / (kRanks / 2);
    if (row_number >= tile.count || tables.page(tile.adapter, number) < 0) continue;
    const int64_t first = static_cast<int64_t>(row_of(args.sorted, tile, row_number)) * args.splits;
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
  const auto part_of = [&](int column) {
    return (column >= args.part_ends[0]) + (column >= args.part_ends[1]);
  };
  // Those of the block's columns; gated, of gates and ups.
  const int part = part_of(block_first);
  const int last = min(block_first + kTileWarps * kStretchColumns, to.width) - 1;
  const int num_parts = kEnding == Ending::kGated ? 2 : part_of(last) - part + 1;
  Stretch<T, kEnding> stretch(to, block_first + threadIdx.x / kWarp * kStretchColumns);
  const uint2* own = pairs;
  if (kEnding != Ending::kGated) {
    own += (part_of(min(stretch.first, to.width - 1)) - part) * args.max_pages * kPagePairs;
  }
  pdl_trigger();
  bool waited = false;
  const int num_tiles = __ldcg(args.sorted.num_tiles);
  for (int index = blockIdx.y; index < num_tiles; index += gridDim.y) {
    const RowTile tile = tile_at(args.sorted, index);
    const int rows[2] = {row_of(args.sorted, tile, group), row_of(args.sorted, tile, group + 8)};
    typename Stretch<T, kEnding>::Columns ahead[kPagesAhead];
#pragma unroll
    for (int i = 0; i < kPagesAhead; ++i) ahead[i] = stretch.load(tables.page(tile.adapter, i));
    if (!waited) pdl_wait();
    waited = true;
    stretch.begin(rows);
    __syncthreads();  // what was there has been read
    pack_sums(args, tables, tile, part, num_parts, pairs);
    __syncthreads();
    const int part_stride = args.max_pages * kPagePairs;
    stretch.multiply_all(tables, tile.adapter, ahead, own, part_stride);
    stretch.end(rows, tile.count);
  }
  if (!waited) pdl_wait();
}

// Of a tile's sums in shared memory.
size_t pair_bytes(const ExpandParams& p) {
  return sizeof(uint2) * static_cast<size_t>(p.num_parts * p.rows.max_pages * kPagePairs);
}

template <class T, Ending kEnding>
Status run_tiles(const Args<T>& args, const ExpandParams& p, const Launch& launch_on) {
  Outputs<T> to;
  to.b = args.b;
  to.residual = args.residual;
  to.out = args.out;
  to.out_features = args.out_features;
  to.width = args.out_features / Stretch<T, kEnding>::kParts;
  to.function = p.activation == nullptr ? Function::kSilu : p.activation->function;
  const int64_t tiles = max_row_tiles(p.num_rows, p.rows.num_adapters);
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(ceil_div(to.width, kTileWarps * kStretchColumns)),
                     static_cast<unsigned>(std::min<int64_t>(tiles, kMostTileBlocks)));
  config.block = dim3(kTileWarps * kWarp);
  config.shared_bytes = pair_bytes(p);
  config.stream = launch_on.stream;
  config.pdl = launch_on.pdl;
  return launch(expand_tiles_kernel<T, kEnding>, config, "expand", args,
                tables_of(p.rows, p.which, p.weights.num_pages), to);
}

// Whether every unit of columns is whole, every stretch is of one part, and a function is a plain
// one.
bool fits_tiles(const ExpandParams& p) {
  bool fits = p.out_features % kStretchColumns == 0 && pair_bytes(p) <= kMostShared;
  fits = fits && (p.activation == nullptr || p.activation->is_plain());
  for (int64_t i = 0; i < p.num_parts; ++i) fits = fits && p.part_ends[i] % kStretchColumns == 0;
  return fits;
}

template <class T, bool kVector, int kTokens>
Status run_tokens(const Args<T>& args, const Launch& launch_on) {
  constexpr int kUnit = kVector ? Vec16<T>::kSize : 1;
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(ceil_div(args.out_features, kThreads * kUnit)),
                     static_cast<unsigned>(ceil_div(args.num_rows, kTokens)));
  config.block = dim3(kThreads);
  config.shared_bytes =
      sizeof(float) * kTokens * args.num_parts * args.max_pages * static_cast<size_t>(kPageRanks);
  config.stream = launch_on.stream;
  config.pdl = launch_on.pdl;
  return launch(expand_kernel<T, kVector, kTokens>, config, "expand", args);
}

template <class T, bool kVector>
Status run_vector(const Args<T>& args, const Launch& launch_on) {
  const size_t of_row = sizeof(float) * args.num_parts * args.max_pages * kPageRanks;
  const bool few = args.num_rows <= kFewRows || kManyTokens * of_row > kMostShared;
  return few ? run_tokens<T, kVector, 1>(args, launch_on)
             : run_tokens<T, kVector, kManyTokens>(args, launch_on);
}

template <class T>
Status run(const ExpandParams& p, const Launch& launch_on) {
  Args<T> args = {};
  args.sums = p.sums;
  args.squares = p.squares;
  args.epsilon = p.epsilon;
  args.b = static_cast<const T*>(p.weights.b);
  args.ids = p.rows.ids;
  args.pages = p.rows.pages;
  args.residual = static_cast<const T*>(p.activation == nullptr ? p.residual : p.made);
  args.out = static_cast<T*>(p.out);
  args.num_rows = static_cast<int>(p.num_rows);
  args.in_features = static_cast<int>(p.in_features);
  args.out_features = static_cast<int>(p.out_features);
  args.num_parts = static_cast<int>(p.num_parts);
  args.max_pages = static_cast<int>(p.rows.max_pages);
  args.num_pages = static_cast<int>(p.weights.num_pages);
  args.which = static_cast<int>(p.which);
  args.splits = static_cast<int>(shrink_splits(p.in_features));
  bool whole = p.out_features % Vec16<T>::kSize == 0;
  for (int i = 0; i + 1 < kMaxAdaptedParts; ++i) {
    const int64_t end = i < p.num_parts ? p.part_ends[i] : p.out_features;
    args.part_ends[i] = static_cast<int>(end);
    whole = whole && end % Vec16<T>::kSize == 0;
  }
  args.sorted = p.sorted;
  if constexpr (takes_tiles(Traits<T>::dtype)) {
    if (fits_tiles(p)) {
      if (p.activation == nullptr) return run_tiles<T, Ending::kSum>(args, p, launch_on);
      return p.activation->gated ? run_tiles<T, Ending::kGated>(args, p, launch_on)
                                 : run_tiles<T, Ending::kFunction>(args, p, launch_on);
    }
  }
  if (p.activation != nullptr) args.out = static_cast<T*>(p.made);
  const Status status =
      whole ? run_vector<T, true>(args, launch_on) : run_vector<T, false>(args, launch_on);
  if (!status.ok() || p.activation == nullptr) return status;
  const int64_t width = p.out_features / (p.activation->gated ? 2 : 1);
  return activate({p.made, p.out, p.num_rows, width, p.dtype, *p.activation}, launch_on);
}

}  // namespace

Status expand(const ExpandParams& p, const Launch& launch_on) {
  if (p.num_rows == 0) return {};
  if (p.num_parts > kMaxAdaptedParts) return Status::error("expand: too many parts");
  return dispatch_dtype(p.dtype, "expand", [&](auto* t) {
    return run<std::remove_pointer_t<decltype(t)>>(p, launch_on);
  });
}

}  // namespace regatta::cuda
