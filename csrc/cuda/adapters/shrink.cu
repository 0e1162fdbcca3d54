// See low_rank.h: each row times the A of its adapter.
//
// Architectures: all; float32, bf16, fp16.
// Algorithm: a block has one page of one part, a piece of kColumns columns, and up to kTokens rows;
// each of its warps has one rank: its columns of A stay in registers while the rows beside each
// other have the same adapter. Every sum's order is the row's alone: pieces are added up later, in
// order. Bound: the bytes of A, once for rows beside each other. Source: own; gathering by row is
// Punica's (2023).
#include <type_traits>

#include "cuda/adapters/low_rank.h"
#include "cuda/common.cuh"

namespace regatta::cuda {
namespace {

constexpr int kThreads = static_cast<int>(kPageRanks) * kWarp;
constexpr int kColumns = 2048;  // of K, that a block sums
constexpr int64_t kFewRows = 64;

template <class T>
struct Args {
  const T* x;
  const T* norm_weight;
  const T* a;
  const int32_t* ids;
  const int32_t* pages;
  float* sums;
  float* squares;
  int num_rows, width, num_parts, max_pages, num_pages, which, splits;
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

// grid: (pages of parts of pieces, tiles of rows).
template <class T, bool kVector, int kTokens>
__global__ void __launch_bounds__(kThreads) shrink_kernel(const Args<T> args) {
  constexpr int kSize = Vec16<T>::kSize, kUnits = kColumns / kWarp / kSize;
  const int rank = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int split = blockIdx.x % args.splits;
  const int part = blockIdx.x / args.splits % args.num_parts;
  const int number = blockIdx.x / args.splits / args.num_parts;
  const int first = blockIdx.y * kTokens;
  const int count = min(kTokens, args.num_rows - first);
  const int column = split * kColumns + lane * kSize;
  const bool sums_squares = args.norm_weight != nullptr && part == 0 && number == 0 && rank == 0;
  pdl_trigger();
  pdl_wait();
  float factor[kUnits][kSize];  // of A, times the norm's weight
  int loaded = -1;
  for (int t = 0; t < count; ++t) {
    const int row = first + t, id = args.ids[row];
    if (id < 0) continue;
    const int page =
        args.pages[(static_cast<int64_t>(id) * kNumAdapted + args.which) * args.max_pages + number];
    if (page < 0 || page >= args.num_pages) continue;
    if (page != loaded) {
      loaded = page;
      const int64_t at = (static_cast<int64_t>(page) * args.num_parts + part) * kPageRanks + rank;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        const int from = column + u * kWarp * kSize;
        const Vec16<T> a = load_unit<kVector>(args.a + at * args.width, from, args.width);
#pragma unroll
        for (int i = 0; i < kSize; ++i) factor[u][i] = a.get(i);
        if (args.norm_weight == nullptr) continue;
        const Vec16<T> norm = load_unit<kVector>(args.norm_weight, from, args.width);
#pragma unroll
        for (int i = 0; i < kSize; ++i) factor[u][i] *= norm.get(i);
      }
    }
    const T* x = args.x + static_cast<int64_t>(row) * args.width;
    float dot = 0.f, square = 0.f;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const Vec16<T> v = load_unit<kVector>(x, column + u * kWarp * kSize, args.width);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const float value = v.get(i);
        dot = fmaf(value, factor[u][i], dot);
        if (sums_squares) square = fmaf(value, value, square);
      }
    }
    dot = warp_sum(dot);
    const int64_t piece = static_cast<int64_t>(row) * args.splits + split;
    if (lane == 0) {
      const int64_t of_page = (piece * args.num_parts + part) * args.max_pages + number;
      args.sums[of_page * kPageRanks + rank] = dot;
    }
    if (sums_squares) {
      square = warp_sum(square);
      if (lane == 0) args.squares[piece] = square;
    }
  }
}

template <class T, bool kVector, int kTokens>
Status run_tokens(const Args<T>& args, const Launch& launch_on) {
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(args.splits * args.num_parts * args.max_pages),
                     static_cast<unsigned>(ceil_div(args.num_rows, kTokens)));
  config.block = dim3(kThreads);
  config.stream = launch_on.stream;
  config.pdl = launch_on.pdl;
  return launch(shrink_kernel<T, kVector, kTokens>, config, "shrink", args);
}

template <class T, bool kVector>
Status run_vector(const Args<T>& args, const Launch& launch_on) {
  return args.num_rows <= kFewRows ? run_tokens<T, kVector, 1>(args, launch_on)
                                   : run_tokens<T, kVector, 16>(args, launch_on);
}

template <class T>
Status run(const ShrinkParams& p, const Launch& launch_on) {
  Args<T> args = {};
  args.x = static_cast<const T*>(p.x);
  args.norm_weight = static_cast<const T*>(p.norm_weight);
  args.a = static_cast<const T*>(p.weights.a);
  args.ids = p.rows.ids;
  args.pages = p.rows.pages;
  args.sums = p.sums;
  args.squares = p.squares;
  args.num_rows = static_cast<int>(p.num_rows);
  args.width = static_cast<int>(p.in_features);
  args.num_parts = static_cast<int>(p.num_parts);
  args.max_pages = static_cast<int>(p.rows.max_pages);
  args.num_pages = static_cast<int>(p.weights.num_pages);
  args.which = static_cast<int>(p.which);
  args.splits = static_cast<int>(shrink_splits(p.in_features));
  return p.in_features % Vec16<T>::kSize == 0 ? run_vector<T, true>(args, launch_on)
                                              : run_vector<T, false>(args, launch_on);
}

}  // namespace

int64_t shrink_splits(int64_t in_features) { return ceil_div(in_features, kColumns); }

Status shrink(const ShrinkParams& p, const Launch& launch_on) {
  if (p.num_rows == 0 || p.rows.max_pages == 0) return {};
  return dispatch_dtype(p.dtype, "shrink", [&](auto* t) {
    return run<std::remove_pointer_t<decltype(t)>>(p, launch_on);
  });
}

}  // namespace regatta::cuda
