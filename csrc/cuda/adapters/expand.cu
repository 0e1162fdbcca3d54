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

#include "cuda/activation/functions.cuh"
#include "cuda/adapters/low_rank.h"
#include "cuda/common.cuh"

namespace regatta::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kFewRows = 64;
constexpr int kManyTokens = 16;
constexpr size_t kMostShared = 96 << 10;

// Of tiles.
constexpr int kWarpColumns = 64;
constexpr int kTileWarps = 4;
constexpr int kPair = 2;  // pages whose B is asked for ahead
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
  Function function;  // of tiles, where these make it
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

// What a tile's outputs are: residual and sums, a function of them, or one of gates and ups.
enum class Ending : uint8_t { kSum, kFunction, kGated };

// A lane's 8 columns of two ranks of a page, for each of a warp's stretches of columns.
template <int kStretches>
struct Columns {
  uint4 ranks[kStretches][2];
};

// Operand b of eight products: the pair of both ranks of column j.
__device__ __forceinline__ uint32_t pair_of_column(const uint4 (&ranks)[2], int j) {
  const uint32_t low[4] = {ranks[0].x, ranks[0].y, ranks[0].z, ranks[0].w};
  const uint32_t high[4] = {ranks[1].x, ranks[1].y, ranks[1].z, ranks[1].w};
  return __byte_perm(low[j / 2], high[j / 2], j % 2 == 0 ? 0x5410 : 0x7632);
}

template <class T>
__device__ __forceinline__ uint32_t word_of(float2 values) {
  return bit_cast<uint32_t>(Traits<T>::from_float2(values));
}

// grid: (stretches of columns, tiles).
template <class T, Ending kEnding>
__global__ void __launch_bounds__(kTileWarps* kWarp, kEnding == Ending::kGated ? 3 : 4)
    expand_tiles_kernel(const Args<T> args) {
  constexpr bool kIsGated = kEnding == Ending::kGated;
  constexpr int kStretches = kIsGated ? 2 : 1;
  constexpr int kUnit = Vec16<T>::kSize;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int group = lane / 4, unit = lane % 4;
  const int width = args.out_features / kStretches;
  const int first = (blockIdx.x * kTileWarps + warp) * kWarpColumns;
  pdl_trigger();
  bool waited = false;
  const int num_tiles = __ldcg(args.sorted.num_tiles);
  for (int index = blockIdx.y; first < width && index < num_tiles; index += gridDim.y) {
    const RowTile tile =
        bit_cast<RowTile>(__ldcg(reinterpret_cast<const int4*>(args.sorted.tiles) + index));
    int rows[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      rows[h] = __ldcg(args.sorted.order + tile.first + min(group + 8 * h, tile.count - 1));
    }
    const int32_t* pages =
        args.pages +
        (static_cast<int64_t>(max(tile.adapter, 0)) * kNumAdapted + args.which) * args.max_pages;
    const auto page_of = [&](int number) {
      const int page = tile.adapter >= 0 && number < args.max_pages ? pages[number] : -1;
      return page < args.num_pages ? page : -1;
    };
    const auto load = [&](int page, Columns<kStretches>& to) {
      const int column = first + group * kUnit;
#pragma unroll
      for (int s = 0; s < kStretches; ++s) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const T* from =
              args.b +
              (static_cast<int64_t>(page) * kPageRanks + 2 * unit + r) * args.out_features +
              s * width + column;
          to.ranks[s][r] = page >= 0 && column < width ? *reinterpret_cast<const uint4*>(from)
                                                       : make_uint4(0, 0, 0, 0);
        }
      }
    };
    Columns<kStretches> ahead[kPair];
#pragma unroll
    for (int i = 0; i < kPair; ++i) load(page_of(i), ahead[i]);
    if (!waited) pdl_wait();
    waited = true;

    // The residual, asked for ahead of the products: columns 16 unit .. of both rows.
    Vec16<T> source[kStretches][2][2];
    const auto column_of = [&](int half) { return first + (2 * unit + half) * kUnit; };
#pragma unroll
    for (int s = 0; s < kStretches; ++s) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int64_t at = static_cast<int64_t>(rows[h]) * args.out_features + s * width;
          source[s][h][half] = {};
          if (args.residual != nullptr && column_of(half) < width) {
            source[s][h][half] = load16(args.residual + at + column_of(half));
          }
        }
      }
    }
    float factor[2] = {1.f, 1.f};
    if (args.squares != nullptr && tile.adapter >= 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float square = 0.f;
#pragma unroll 4
        for (int split = 0; split < args.splits; ++split) {
          square += __ldcg(args.squares + static_cast<int64_t>(rows[h]) * args.splits + split);
        }
        factor[h] = rsqrtf(square / args.in_features + args.epsilon);
      }
    }
    float sums[kStretches][8][4] = {};
    const auto multiply = [&](int number, const Columns<kStretches>& columns) {
#pragma unroll
      for (int s = 0; s < kStretches; ++s) {
        const int column = s * width + first;
        const int part = (column >= args.part_ends[0]) + (column >= args.part_ends[1]);
        float2 whole[2];  // of ranks 2 unit, 2 unit + 1 of both rows
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          whole[h] = make_float2(0.f, 0.f);
#pragma unroll 4
          for (int split = 0; split < args.splits; ++split) {
            const int64_t piece = static_cast<int64_t>(rows[h]) * args.splits + split;
            const int64_t of_page = (piece * args.num_parts + part) * args.max_pages + number;
            const float2 more = __ldcg(
                reinterpret_cast<const float2*>(args.sums + of_page * kPageRanks + 2 * unit));
            whole[h].x += more.x, whole[h].y += more.y;
          }
          whole[h].x *= factor[h], whole[h].y *= factor[h];
        }
        uint32_t a[4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const auto high = Traits<T>::from_float2(whole[h]);
          const float2 kept = Traits<T>::to_float2(high);
          a[h] = bit_cast<uint32_t>(high);
          a[2 + h] = word_of<T>(make_float2(whole[h].x - kept.x, whole[h].y - kept.y));
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const uint32_t b = pair_of_column(columns.ranks[s], j);
          mma_m16n8k16<T>(sums[s][j], a, b, b);
        }
      }
    };
#pragma unroll
    for (int i = 0; i < kPair; ++i) {
      if (page_of(i) >= 0) multiply(i, ahead[i]);
    }
    for (int number = kPair; page_of(number) >= 0; ++number) {
      Columns<kStretches> columns;
      load(page_of(number), columns);
      multiply(number, columns);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (group + 8 * h >= tile.count || column_of(half) >= width) continue;
        float values[kStretches][kUnit];
#pragma unroll
        for (int s = 0; s < kStretches; ++s) {
#pragma unroll
          for (int j = 0; j < kUnit; ++j) {
            values[s][j] = source[s][h][half].get(j) + sums[s][j][2 * h + half];
          }
        }
        if constexpr (kEnding != Ending::kSum) apply(args.function, values[0]);
        if constexpr (kIsGated) {
#pragma unroll
          for (int j = 0; j < kUnit; ++j) values[0][j] *= values[1][j];
        }
        Vec16<T> out;
#pragma unroll
        for (int j = 0; j < kUnit; ++j) out.set(j, values[0][j]);
        store16(args.out + static_cast<int64_t>(rows[h]) * width + column_of(half), out);
      }
    }
  }
  if (!waited) pdl_wait();
}

template <class T, Ending kEnding>
Status run_tiles(const Args<T>& args, int64_t num_adapters, const Launch& launch_on) {
  const int width = args.out_features / (kEnding == Ending::kGated ? 2 : 1);
  const int64_t tiles = max_row_tiles(args.num_rows, num_adapters);
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(ceil_div(width, kTileWarps * kWarpColumns)),
                     static_cast<unsigned>(std::min<int64_t>(tiles, kMostTileBlocks)));
  config.block = dim3(kTileWarps * kWarp);
  config.stream = launch_on.stream;
  config.pdl = launch_on.pdl;
  return launch(expand_tiles_kernel<T, kEnding>, config, "expand", args);
}

// Whether every unit of columns is whole, every stretch is of one part, and a function is a plain
// one.
bool fits_tiles(const ExpandParams& p) {
  bool fits = p.out_features % kWarpColumns == 0;
  fits = fits && (p.activation == nullptr || p.activation->is_plain());
  for (int64_t i = 0; i < p.num_parts; ++i) fits = fits && p.part_ends[i] % kWarpColumns == 0;
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
  if (p.activation != nullptr) args.function = p.activation->function;
  if constexpr (takes_tiles(Traits<T>::dtype)) {
    if (fits_tiles(p)) {
      const int64_t adapters = p.rows.num_adapters;
      if (p.activation == nullptr) return run_tiles<T, Ending::kSum>(args, adapters, launch_on);
      return p.activation->gated ? run_tiles<T, Ending::kGated>(args, adapters, launch_on)
                                 : run_tiles<T, Ending::kFunction>(args, adapters, launch_on);
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
