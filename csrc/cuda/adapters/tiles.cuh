// What shrink.cu and expand.cu share: an adapter's pages, tiles, sums of their rows as an operand,
// and what becomes of 64 columns of outputs.
#pragma once

#include <cstdint>

#include "cuda/activation/functions.cuh"
#include "cuda/adapters/low_rank.h"
#include "cuda/common.cuh"

namespace regatta::cuda {
namespace {

constexpr int kRanks = static_cast<int>(kPageRanks);
constexpr int kPageValues = kTileRows * kRanks;     // sums of a tile's rows with a page
constexpr int kPagePairs = kTileRows * kRanks / 2;  // the same as pairs of ranks
constexpr int kStretchColumns = 64;                 // of outputs, of a warp at once
constexpr int kPagesAhead = 2;  // whose B is asked for while the launch ahead ends

// Where pages of adapters are, of one linear.
struct PageTables {
  const int32_t* pages;
  int max_pages, num_pages, which;

  // Page `number` of an adapter's, -1: there is none. Those there are come first.
  __device__ __forceinline__ int page(int adapter, int number) const {
    if (adapter < 0 || number >= max_pages) return -1;
    const int64_t row = static_cast<int64_t>(adapter) * kNumAdapted + which;
    const int page = pages[row * max_pages + number];
    return page < num_pages ? page : -1;
  }
};

inline PageTables tables_of(const AdapterRows& rows, Adapted which, int64_t num_pages) {
  return {rows.pages, static_cast<int>(rows.max_pages), static_cast<int>(num_pages),
          static_cast<int>(which)};
}

// A tile's record, of one linear.
struct Tile {
  const int32_t* record;
  int max_pages, num_pages, which;

  __device__ __forceinline__ Tile(const SortedRows& sorted, const PageTables& tables, int index)
      : record(sorted.tiles + static_cast<int64_t>(index) * sorted.stride),
        max_pages(tables.max_pages),
        num_pages(tables.num_pages),
        which(tables.which) {}
  __device__ __forceinline__ int count() const { return __ldcg(record); }
  __device__ __forceinline__ int row(int i) const { return __ldcg(record + kTileFirstRow + i); }
  // As PageTables has them.
  __device__ __forceinline__ int page(int number) const {
    if (number >= max_pages) return -1;
    const int page = __ldcg(record + kTileFirstRow + kTileRows + which * max_pages + number);
    return page < num_pages ? page : -1;
  }
};

// Two sums as an operand: both rounded, and what that took from them.
template <class T>
__device__ __forceinline__ uint2 rounded_pair(float2 sums) {
  const auto high = Traits<T>::from_float2(sums);
  const float2 kept = Traits<T>::to_float2(high);
  return {
      bit_cast<uint32_t>(high),
      bit_cast<uint32_t>(Traits<T>::from_float2(make_float2(sums.x - kept.x, sums.y - kept.y)))};
}

// What a tile's outputs are: residual and sums, a function of them, or one of gates and ups.
enum class Ending : uint8_t { kSum, kFunction, kGated };

template <class T>
struct Outputs {
  const T* b;
  const T* residual;
  T* out;
  int width, out_features;  // of outputs; of the linear: gated twice as many
  Function function;
};

// 64 columns of outputs of a tile, by a warp: gated, of gates and ups each.
template <class T, Ending kEnding>
struct Stretch {
  static constexpr int kParts = kEnding == Ending::kGated ? 2 : 1;
  static constexpr int kUnit = Vec16<T>::kSize;
  // A lane's 8 columns of two ranks of a page.
  struct Columns {
    uint4 ranks[kParts][2];
  };

  const Outputs<T>& to;
  const int first;  // column
  Vec16<T> source[kParts][2][2];
  float sums[kParts][8][4];

  __device__ __forceinline__ Stretch(const Outputs<T>& to, int first) : to(to), first(first) {}

  __device__ __forceinline__ Columns load(int page) const {
    const int lane = threadIdx.x % kWarp, column = first + lane / 4 * kUnit;
    Columns columns;
#pragma unroll
    for (int s = 0; s < kParts; ++s) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int64_t rank = static_cast<int64_t>(page) * kRanks + lane % 4 * 2 + r;
        columns.ranks[s][r] = page >= 0 && column < to.width
                                  ? *reinterpret_cast<const uint4*>(to.b + rank * to.out_features +
                                                                    s * to.width + column)
                                  : make_uint4(0, 0, 0, 0);
      }
    }
    return columns;
  }

  // Columns that a lane ends with: 8, twice, of two rows.
  __device__ __forceinline__ int column_of(int half) const {
    return first + (threadIdx.x % 4 * 2 + half) * kUnit;
  }

  __device__ __forceinline__ void begin(const int (&rows)[2]) {
#pragma unroll
    for (int s = 0; s < kParts; ++s) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int64_t at = static_cast<int64_t>(rows[h]) * to.out_features + s * to.width;
          source[s][h][half] = {};
          if (to.residual != nullptr && column_of(half) < to.width) {
            source[s][h][half] = load16(to.residual + at + column_of(half));
          }
        }
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[s][j][i] = 0.f;
      }
    }
  }

  // pairs: [kTileRows, kRanks / 2] rounded_pair() of the page's sums; part s of a gated linear is
  // s * part_stride on.
  __device__ __forceinline__ void multiply(const Columns& columns, const uint2* pairs,
                                           int part_stride) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int s = 0; s < kParts; ++s) {
      const uint2 low = pairs[s * part_stride + lane];
      const uint2 high = pairs[s * part_stride + kPagePairs / 2 + lane];
      const uint32_t a[4] = {low.x, high.x, low.y, high.y};
      const uint4 &even = columns.ranks[s][0], &odd = columns.ranks[s][1];
      const uint32_t evens[4] = {even.x, even.y, even.z, even.w};
      const uint32_t odds[4] = {odd.x, odd.y, odd.z, odd.w};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t b = __byte_perm(evens[j / 2], odds[j / 2], j % 2 == 0 ? 0x5410 : 0x7632);
        mma_m16n8k16<T>(sums[s][j], a, b, b);
      }
    }
  }

  __device__ __forceinline__ void end(const int (&rows)[2], int num_rows) const {
    const int group = threadIdx.x % kWarp / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (group + 8 * h >= num_rows || column_of(half) >= to.width) continue;
        float values[kParts][kUnit];
#pragma unroll
        for (int s = 0; s < kParts; ++s) {
#pragma unroll
          for (int j = 0; j < kUnit; ++j) {
            values[s][j] = source[s][h][half].get(j) + sums[s][j][2 * h + half];
          }
        }
        if constexpr (kEnding != Ending::kSum) apply(to.function, values[0]);
        if constexpr (kEnding == Ending::kGated) {
#pragma unroll
          for (int j = 0; j < kUnit; ++j) values[0][j] *= values[1][j];
        }
        Vec16<T> out;
#pragma unroll
        for (int j = 0; j < kUnit; ++j) out.set(j, values[0][j]);
        store16(to.out + static_cast<int64_t>(rows[h]) * to.width + column_of(half), out);
      }
    }
  }
};

// Sixteen bytes of A times those of a norm's weight.
template <class T>
__device__ __forceinline__ uint4 times(uint4 a, uint4 norm) {
  using Pair = typename Traits<T>::Pair;
  const auto each = [](uint32_t x, uint32_t y) {
    return bit_cast<uint32_t>(__hmul2(bit_cast<Pair>(x), bit_cast<Pair>(y)));
  };
  return {each(a.x, norm.x), each(a.y, norm.y), each(a.z, norm.z), each(a.w, norm.w)};
}

// sums += x A^T of 32 columns: a lane has 16 bytes of two rows, and of one rank.
template <class T>
__device__ __forceinline__ void multiply_columns(float (&sums)[4], const uint4 (&x)[2], uint4 a) {
  const uint32_t first[4] = {x[0].x, x[1].x, x[0].y, x[1].y};
  const uint32_t second[4] = {x[0].z, x[1].z, x[0].w, x[1].w};
  mma_m16n8k16<T>(sums, first, a.x, a.y);
  mma_m16n8k16<T>(sums, second, a.z, a.w);
}

template <class T>
__device__ __forceinline__ float sum_of_squares(uint4 x, float sum) {
  const Vec16<T> values = bit_cast<Vec16<T>>(x);
#pragma unroll
  for (int e = 0; e < Vec16<T>::kSize; ++e) sum = fmaf(values.get(e), values.get(e), sum);
  return sum;
}

}  // namespace
}  // namespace regatta::cuda
