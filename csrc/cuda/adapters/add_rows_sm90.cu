// See low_rank.h: what adapters add to few rows of a product, in one launch.
//
// Architectures: sm_90 (clusters); bf16, fp16.
// Algorithm: a cluster has a row. Each of its blocks has a slice of K, and a slice of N.
//   1. A warp has a rank, and multiplies the block's slice of x by that rank of every page of the
//      adapter, part by part.
//   2. Blocks write their sums into each other's shared memory, and add all of them in the order of
//      the blocks.
//   3. A thread has 8 columns of the block's slice of N, and goes over the ranks.
//   The first pages of A are asked for while the launch ahead ends, those of B come into L2. Where
//   the product takes codes, a cluster more makes those of the row: see shrink.cu.
// Bound: latency. Source: own.
#include "cuda/adapters/low_rank.h"
#include "cuda/adapters/row_codes.cuh"
#include "cuda/adapters/tiles.cuh"
#include "cuda/hopper.cuh"

namespace regatta::cuda {
namespace {

constexpr int kBlocks = 8;                          // of a cluster
constexpr int kUnit = 8;                            // columns, 16 bytes
constexpr int kUnitsAhead = 16;                     // of A, that a lane asks for ahead of the wait
constexpr int kMostPairs = 64;                      // of parts and pages
constexpr int kMostSums = kMostPairs * kRanks + 1;  // and of squares

template <class T>
struct Args {
  const T* x;
  const T* norm_weight;
  const T* a;
  const T* b;
  const T* residual;
  T* out;
  const int32_t* ids;
  float epsilon;
  int in_features, out_features, num_parts, max_pages;
  int part_ends[kMaxAdaptedParts - 1];  // as expand() has them
  bool ready;                           // ids may be read ahead of pdl_wait()
};

__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

// Units of a slice, as even as may be.
__device__ __forceinline__ int slice_units(int columns) {
  return (columns / kUnit + kBlocks - 1) / kBlocks;
}

// kUnits: of a block's slice of K that a lane has. grid: (kBlocks, rows, 1 and where there are
// codes 1 more).
template <class T, int kUnits, class C>
__global__ void __launch_bounds__(kRowThreads, 1)
    add_rows_kernel(const Args<T> args, const PageTables tables, const QuantizeRowsParams codes) {
  constexpr int kPairsAhead = kUnitsAhead / kUnits;
  __shared__ float own[kMostSums], sums[kBlocks][kMostSums];
  const int64_t row = blockIdx.y;
  const int rank = static_cast<int>(cluster_rank());
  pdl_trigger();
  cluster_arrive_relaxed();  // before another block's shared memory is written, it must have begun
  if constexpr (C::kVectors > 0) {
    if (blockIdx.z > 0) {
      cluster_wait();
      if (rank == 0) quantize<T, C>(codes, row);
      return;
    }
  }
  if (!args.ready) pdl_wait();
  const int adapter = args.ids[row];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int num_pairs = args.num_parts * args.max_pages;
  const int k_units = slice_units(args.in_features), k_first = rank * k_units;
  const int k_count = min(k_units, args.in_features / kUnit - k_first);
  const int n_units = slice_units(args.out_features), n_first = rank * n_units;
  const int n_count = min(n_units, args.out_features / kUnit - n_first);

  // Of A: this warp's rank of a pair of part and page.
  const auto load_a = [&](int pair, Vec16<T>(&a)[kUnits]) {
    const int number = pair % args.max_pages, part = pair / args.max_pages;
    const int page = pair < num_pairs ? tables.page(adapter, number) : -1;
    const int64_t at = (static_cast<int64_t>(page) * args.num_parts + part) * kRanks + warp;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int unit = u * kWarp + lane;
      a[u] = {};
      if (page < 0 || unit >= k_count) continue;
      a[u] = load16(args.a + at * args.in_features + (k_first + unit) * kUnit);
    }
  };
  // Of B: a page's ranks of 8 columns.
  const auto load_b = [&](int number, int unit, Vec16<T>(&b)[kRanks]) {
    const int page = tables.page(adapter, number);
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      const int64_t at = static_cast<int64_t>(page) * kRanks + r;
      b[r] = {};
      if (page < 0 || unit >= n_count) continue;
      b[r] = load16(args.b + at * args.out_features + (n_first + unit) * kUnit);
    }
  };
  // Into L2, where they are asked for with a thread for each 128 bytes.
  const auto prefetch_b = [&](int number) {
    const int page = tables.page(adapter, number);
    if (page < 0 || threadIdx.x % kUnit != 0) return;
    for (int unit = threadIdx.x; unit < n_count; unit += kRowThreads) {
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        const int64_t at = static_cast<int64_t>(page) * kRanks + r;
        prefetch_l2(args.b + at * args.out_features + (n_first + unit) * kUnit);
      }
    }
  };
  const auto load_row = [&](const T* row, Vec16<T>(&to)[kUnits]) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int unit = u * kWarp + lane;
      to[u] = {};
      if (unit < k_count) to[u] = load16(row + (k_first + unit) * kUnit);
    }
  };
  Vec16<T> a[kPairsAhead][kUnits];
#pragma unroll
  for (int i = 0; i < kPairsAhead; ++i) load_a(i, a[i]);
  for (int i = 0; i < kPagesAhead; ++i) prefetch_b(i);
  if (args.ready) pdl_wait();

  const int num_sums = num_pairs * kRanks;
  float x[kUnits][kUnit];  // times the norm's weight
  {
    Vec16<T> values[kUnits], norm[kUnits];
    load_row(args.x + row * args.in_features, values);
    if (args.norm_weight != nullptr) load_row(args.norm_weight, norm);
    float square = 0.f;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        x[u][i] = values[u].get(i);
        square = fmaf(x[u][i], x[u][i], square);
        if (args.norm_weight != nullptr) x[u][i] *= norm[u].get(i);
      }
    }
    if (warp == 0) {
      square = warp_sum(square);
      if (lane == 0) own[num_sums] = square;
    }
  }
  const auto multiply = [&](int pair, const Vec16<T>(&with)[kUnits]) {
    float sum = 0.f;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) sum = fmaf(x[u][i], with[u].get(i), sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) own[pair * kRanks + warp] = sum;
  };
#pragma unroll
  for (int i = 0; i < kPairsAhead; ++i) {
    if (i < num_pairs) multiply(i, a[i]);
  }
  for (int i = kPairsAhead; i < num_pairs; ++i) {
    load_a(i, a[0]);
    multiply(i, a[0]);
  }
  Vec16<T> b[kPagesAhead][kRanks];
#pragma unroll
  for (int i = 0; i < kPagesAhead; ++i) load_b(i, threadIdx.x, b[i]);
  __syncthreads();
  cluster_wait();
  for (int i = threadIdx.x; i < (num_sums + 1) * kBlocks; i += kRowThreads) {
    store_cluster_float(&sums[rank][i / kBlocks], i % kBlocks, own[i / kBlocks]);
  }
  cluster_arrive();
  cluster_wait();
  const auto whole = [&](int i) {
    float sum = 0.f;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) sum += sums[block][i];
    return sum;
  };
  float factor = 1.f;
  if (args.norm_weight != nullptr) {
    factor = rsqrtf(whole(num_sums) / args.in_features + args.epsilon);
  }
  for (int i = threadIdx.x; i < num_sums; i += kRowThreads) own[i] = whole(i) * factor;
  __syncthreads();

  for (int unit = threadIdx.x; unit < n_count; unit += kRowThreads) {
    const int column = (n_first + unit) * kUnit;
    const int part = (column >= args.part_ends[0]) + (column >= args.part_ends[1]);
    const int64_t at = row * args.out_features + column;
    Vec16<T> source = {}, out;
    if (args.residual != nullptr) source = load16(args.residual + at);
    float y[kUnit] = {};
    const auto add = [&](int number, const Vec16<T>(&columns)[kRanks]) {
      const float* of_page = own + (part * args.max_pages + number) * kRanks;
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
#pragma unroll
        for (int i = 0; i < kUnit; ++i) y[i] = fmaf(of_page[r], columns[r].get(i), y[i]);
      }
    };
    const bool is_first = unit == static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < kPagesAhead; ++i) {
      if (tables.page(adapter, i) < 0) continue;
      if (!is_first) load_b(i, unit, b[i]);
      add(i, b[i]);
    }
    for (int i = kPagesAhead; tables.page(adapter, i) >= 0; ++i) {
      load_b(i, unit, b[0]);
      add(i, b[0]);
    }
#pragma unroll
    for (int i = 0; i < kUnit; ++i) out.set(i, y[i] + source.get(i));
    store16(args.out + at, out);
  }
}

template <class T, int64_t kColumns>
Status run(const ShrinkParams& down, const ExpandParams& up, const Launch& launch_on) {
  Args<T> args = {};
  args.x = static_cast<const T*>(down.x);
  args.norm_weight = static_cast<const T*>(down.norm_weight);
  args.a = static_cast<const T*>(down.weights.a);
  args.b = static_cast<const T*>(up.weights.b);
  args.residual = static_cast<const T*>(up.residual);
  args.out = static_cast<T*>(up.out);
  args.ids = down.rows.ids;
  args.epsilon = up.epsilon;
  args.in_features = static_cast<int>(down.in_features);
  args.out_features = static_cast<int>(up.out_features);
  args.num_parts = static_cast<int>(down.num_parts);
  args.max_pages = static_cast<int>(down.rows.max_pages);
  for (int i = 0; i + 1 < kMaxAdaptedParts; ++i) {
    args.part_ends[i] = static_cast<int>(i < up.num_parts ? up.part_ends[i] : up.out_features);
  }
  args.ready = down.ready;
  LaunchConfig config;
  config.grid =
      dim3(kBlocks, static_cast<unsigned>(down.num_rows), down.quantize.codes != nullptr ? 2 : 1);
  config.block = dim3(kRowThreads);
  config.stream = launch_on.stream;
  config.pdl = launch_on.pdl;
  config.cluster_x = kBlocks;
  const PageTables tables = tables_of(down.rows, down.which, down.weights.num_pages);
  constexpr int kUnits = static_cast<int>(kColumns / (kBlocks * kWarp * kUnit));
  return dispatch_codes<kColumns>(down.quantize, [&](auto kind) {
    return launch(add_rows_kernel<T, kUnits, decltype(kind)>, config, "add_rows", args, tables,
                  down.quantize);
  });
}

template <class T>
Status run_columns(const ShrinkParams& down, const ExpandParams& up, const Launch& launch_on) {
  return down.in_features <= kFewColumns ? run<T, kFewColumns>(down, up, launch_on)
                                         : run<T, kMostColumns>(down, up, launch_on);
}

}  // namespace

bool takes_add_rows(const ShrinkParams& down, const ExpandParams& up) {
  bool is_whole = down.in_features % kUnit == 0 && up.out_features % kUnit == 0;
  for (int64_t i = 0; i < up.num_parts; ++i) is_whole = is_whole && up.part_ends[i] % kUnit == 0;
  return compute_capability() == 90 && down.dtype != DType::kFloat32 && is_whole &&
         down.num_rows > 0 && down.rows.max_pages > 0 && up.activation == nullptr &&
         !takes_tiles(down.dtype, down.num_rows) && down.in_features <= kMostColumns &&
         down.num_parts * down.rows.max_pages <= kMostPairs;
}

Status add_rows(const ShrinkParams& down, const ExpandParams& up, const Launch& launch_on) {
  return down.dtype == DType::kBFloat16 ? run_columns<__nv_bfloat16>(down, up, launch_on)
                                        : run_columns<__half>(down, up, launch_on);
}

}  // namespace regatta::cuda
