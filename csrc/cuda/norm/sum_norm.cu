// See sum_norm.h.
//
// Architectures: all; float32, bf16, fp16. One block per row, whose values stay in shared memory as
// float; each thread reads back what it wrote, so the passes share nothing but sums. The number of
// threads is the width's alone: a row's bits do not depend on the rows beside it. A layer norm
// takes the mean first, then the squares of what is left. Bound: bytes, 3 or 4 rows per row.
#include <algorithm>
#include <type_traits>

#include "cuda/common.cuh"
#include "cuda/norm/sum_norm.h"
#include "cuda/ranks/ranks.h"

namespace regatta::cuda {
namespace {

// A norm of the row as the kernel takes it.
template <class T>
struct RowNorm {
  const T* weight;  // null: no norm
  const T* bias;    // or null
  float epsilon;
  bool layer, plus_one;
};

template <class T>
RowNorm<T> row_norm(const Norm& norm, const NormWeights& weights) {
  if (!norm.is_there) return {};
  return {static_cast<const T*>(weights.weight), static_cast<const T*>(weights.bias), norm.epsilon,
          norm.kind == NormKind::kLayer, norm.plus_one};
}

// MadeOfParts as the kernels take it.
template <class T>
struct Parts {
  const int32_t* places;
  const float* shares;
  int top_k;
  const T* shared;
  const float* shared_gate;
  bool ready;
};

template <class T>
struct Args {
  const T* made;
  Parts<T> parts;
  const T* source;
  T* out;
  T* normed;
  float source_scale, made_scale;
  RowNorm<T> post, next;
  bool post_of_sum;
  int width;
};

// Eight values of a row from `first` on, fewer at the end of one that is not whole.
template <class T, bool kWhole>
struct Piece {
  int first, count;

  template <class From>
  __device__ __forceinline__ void load(const From* from, float (&to)[8]) const {
    if constexpr (kWhole && sizeof(From) == 2) {
      const Vec16<From> v = load16(from + first);
#pragma unroll
      for (int i = 0; i < 8; ++i) to[i] = v.get(i);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) to[i] = i < count ? Traits<From>::to_float(from[first + i]) : 0.f;
    }
  }

  __device__ __forceinline__ void store(T* to, const float (&from)[8]) const {
    if constexpr (kWhole && sizeof(T) == 2) {
      Vec16<T> v;
#pragma unroll
      for (int i = 0; i < 8; ++i) v.set(i, from[i]);
      store16(to + first, v);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i < count) to[first + i] = Traits<T>::from_float(from[i]);
      }
    }
  }
};

// Eight values of what experts made of row blockIdx.x.
template <class T, bool kWhole>
__device__ __forceinline__ void load_parts(const Args<T>& a, const Piece<T, kWhole>& piece,
                                           float (&y)[8]) {
  const Parts<T>& p = a.parts;
  const int64_t row = blockIdx.x;
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = 0.f;
  const auto add = [&](const float (&x)[8], float times) {
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = fmaf(times, x[i], y[i]);
  };
  const auto round = [&] {
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = Traits<T>::to_float(Traits<T>::from_float(y[i]));
  };
  const auto part = [&](int64_t place) { return a.made + place * a.width; };
  float x[8];
  for (int j = 0; j < p.top_k; ++j) {
    const int64_t at = row * p.top_k + j;
    if (p.places[at] < 0) continue;
    piece.load(part(p.places[at]), x);
    add(x, p.shares[at]);
  }
  round();
  if (p.shared == nullptr) return;
  piece.load(p.shared + row * a.width, x);
  add(x, p.shared_gate == nullptr ? 1.f : p.shared_gate[row]);
  round();
}

template <class T, bool kWhole, bool kParts>
__global__ void __launch_bounds__(1024) sum_norm_kernel(const Args<T> a) {
  extern __shared__ float row[];
  __shared__ float sums[32], more_sums[32];
  const int64_t at = static_cast<int64_t>(blockIdx.x) * a.width;
  const auto each = [&](auto&& body) {
    for (int i = threadIdx.x * 8; i < a.width; i += blockDim.x * 8) {
      body(Piece<T, kWhole>{i, min(8, a.width - i)});
    }
  };
  // (x - mean) * scale of the row's values, by this norm.
  const auto statistics = [&](const RowNorm<T>& norm, float* mean, float* scale) {
    float sum = 0.f;
    *mean = 0.f;
    if (norm.layer) {
      each([&](auto piece) {
        for (int i = 0; i < piece.count; ++i) sum += row[piece.first + i];
      });
      *mean = block_sum(sum, sums) / a.width;
      sum = 0.f;
    }
    each([&](auto piece) {
      for (int i = 0; i < piece.count; ++i) {
        const float x = row[piece.first + i] - *mean;
        sum = fmaf(x, x, sum);
      }
    });
    *scale = rsqrtf(block_sum(sum, more_sums) / a.width + norm.epsilon);
    __syncthreads();  // both lists of sums are written again
  };
  const auto apply = [&](const RowNorm<T>& norm, auto piece, float mean, float scale,
                         float (&y)[8]) {
    float weight[8], bias[8] = {};
    piece.load(norm.weight, weight);
    if (norm.bias != nullptr) piece.load(norm.bias, bias);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i >= piece.count) continue;
      const float factor = norm.plus_one ? 1.f + weight[i] : weight[i];
      y[i] = fmaf((row[piece.first + i] - mean) * scale, factor, bias[i]);
    }
  };
  pdl_trigger();
  pdl_wait();
  const bool norms_made = a.post.weight != nullptr && !a.post_of_sum;
  const bool norms_sum = a.post.weight != nullptr && a.post_of_sum;
  float mean = 0.f, scale = 1.f;
  const auto add = [&](auto piece, float (&y)[8]) {
    float from[8];
    if (a.source == nullptr) return;
    piece.load(a.source + at, from);
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = fmaf(a.made_scale, y[i], a.source_scale * from[i]);
  };
  const auto keep = [&](auto piece, const float (&y)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < piece.count) row[piece.first + i] = y[i];
    }
  };
  // What leaves the block is rounded; the next norm is of that.
  const auto leave = [&](auto piece, float (&y)[8]) {
    piece.store(a.out + at, y);
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = Traits<T>::to_float(Traits<T>::from_float(y[i]));
    keep(piece, y);
  };
  each([&](auto piece) {
    float y[8];
    if constexpr (kParts) {
      load_parts(a, piece, y);
    } else {
      piece.load(a.made + at, y);
    }
    if (!norms_made) add(piece, y);
    if (a.post.weight == nullptr) {
      leave(piece, y);
    } else {
      keep(piece, y);
    }
  });
  if (a.post.weight != nullptr) {
    statistics(a.post, &mean, &scale);
    each([&](auto piece) {
      float y[8];
      apply(a.post, piece, mean, scale, y);
      if (!norms_sum) add(piece, y);
      leave(piece, y);
    });
  }
  if (a.next.weight == nullptr) return;
  statistics(a.next, &mean, &scale);
  each([&](auto piece) {
    float y[8];
    apply(a.next, piece, mean, scale, y);
    piece.store(a.normed + at, y);
  });
}

// Where `kCount` of a row's parts lie, from `first` on, and their shares.
template <int kCount>
struct PartList {
  int places[kCount];
  float shares[kCount];

  template <class T>
  __device__ __forceinline__ void load(const Parts<T>& p, int first) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const int64_t at = static_cast<int64_t>(blockIdx.x) * p.top_k + min(first + j, p.top_k - 1);
      places[j] = __ldcg(p.places + at);
      shares[j] = __ldcg(p.shares + at);
    }
  }
};

// Of rows whose blocks have up to kThreads threads: parts that are on their way at once.
template <int kThreads>
constexpr int kPartsAtOnce = kThreads > 512 ? 4 : 8;

// Rows of up to kThreads units of 16 bytes: one unit a thread, in registers; weights come ahead of
// the wait for the launch before, and all that it made at once. exchange: of ranks that sum what
// was made; null: there are none.
template <class T, bool kParts, int kThreads, class ExchangeOrNone>
__device__ __forceinline__ void sum_norm_units(const Args<T>& a, const ExchangeOrNone* exchange) {
  constexpr int kAtOnce = kPartsAtOnce<kThreads>;
  __shared__ float sums[4][32];
  const int first = static_cast<int>(threadIdx.x) * 8;
  const bool inside = first < a.width;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * a.width + first;
  const bool has_post = a.post.weight != nullptr, has_next = a.next.weight != nullptr;
  const Parts<T>& parts = a.parts;
  // As they came: single values would take a register each.
  uint4 weights[2] = {}, biases[2] = {}, source = {}, shared = {};
  const auto load = [&](const T* from, uint4* to) {
    if (inside && from != nullptr) *to = bit_cast<uint4>(load16(from + first));
  };
  const auto of = [](const uint4& bits, int i) { return bit_cast<Vec16<T>>(bits).get(i); };
  load(a.post.weight, &weights[0]);
  load(a.post.bias, &biases[0]);
  load(a.next.weight, &weights[1]);
  load(a.next.bias, &biases[1]);
  PartList<kAtOnce> list;
  float shared_gate = 1.f;
  const auto load_rest = [&] {
    if (inside && a.source != nullptr) source = bit_cast<uint4>(load16_l2(a.source + at));
    if constexpr (kParts) {
      list.load(parts, 0);
      if (inside && parts.shared != nullptr) shared = bit_cast<uint4>(load16_l2(parts.shared + at));
      if (parts.shared_gate != nullptr) shared_gate = __ldcg(parts.shared_gate + blockIdx.x);
    }
  };
  const bool ready = kParts && parts.ready;
  pdl_trigger();
  if (ready) load_rest();
  pdl_wait();
  if (!ready) load_rest();
  float y[8] = {};
  if constexpr (kParts) {
    const auto round = [&] {
#pragma unroll
      for (int i = 0; i < 8; ++i) y[i] = Traits<T>::to_float(Traits<T>::from_float(y[i]));
    };
    for (int from = 0; from < parts.top_k; from += kAtOnce) {
      if (from > 0) list.load(parts, from);
      uint4 rows[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const bool is_there = inside && from + j < parts.top_k && list.places[j] >= 0;
        const T* const row = a.made + list.places[j] * int64_t{a.width} + first;
        rows[j] = is_there ? bit_cast<uint4>(load16(row)) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (from + j >= parts.top_k) break;
#pragma unroll
        for (int i = 0; i < 8; ++i) y[i] = fmaf(list.shares[j], of(rows[j], i), y[i]);
      }
    }
    round();
    if (parts.shared != nullptr) {
#pragma unroll
      for (int i = 0; i < 8; ++i) y[i] = fmaf(shared_gate, of(shared, i), y[i]);
      round();
    }
  } else {
    const Vec16<T> made = inside ? load16(a.made + at) : Vec16<T>{};
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = made.get(i);
  }
  if constexpr (std::is_same_v<ExchangeOrNone, Exchange>) {
    const Exchanging ranks(*exchange);
    const uint32_t units = a.width / 8, unit = blockIdx.x * units + threadIdx.x;
    Vec16<T> made;
#pragma unroll
    for (int i = 0; i < 8; ++i) made.set(i, y[i]);
    const uint4 own = sendable(bit_cast<uint4>(made));
    if (inside) ranks.push(unit, own);
    ranks.count(gridDim.x * units);
    ranks.clear(blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
    if (inside) made = bit_cast<Vec16<T>>(sum_of<T>(ranks, unit, own));
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = made.get(i);
  }
  const auto add = [&] {
    if (a.source == nullptr) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = fmaf(a.made_scale, y[i], a.source_scale * of(source, i));
  };
  // Of the block's values: what lies beside the row counts as nothing.
  const auto total = [&](float own, float* scratch) {
    return block_sum(inside ? own : 0.f, scratch);
  };
  const auto norm = [&](const RowNorm<T>& norm, const uint4& weight, const uint4& bias,
                        float (*scratch)[32]) {
    float mean = 0.f, sum = 0.f;
    if (norm.layer) {
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += y[i];
      mean = total(sum, scratch[0]) / a.width;
      sum = 0.f;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(y[i] - mean, y[i] - mean, sum);
    const float scale = rsqrtf(total(sum, scratch[1]) / a.width + norm.epsilon);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float factor = norm.plus_one ? 1.f + of(weight, i) : of(weight, i);
      y[i] = fmaf((y[i] - mean) * scale, factor, of(bias, i));
    }
  };
  if (has_post && !a.post_of_sum) norm(a.post, weights[0], biases[0], sums);
  add();
  if (has_post && a.post_of_sum) norm(a.post, weights[0], biases[0], sums);
  Vec16<T> out;
#pragma unroll
  for (int i = 0; i < 8; ++i) out.set(i, y[i]);
  if (inside) store16(a.out + at, out);
  if (!has_next) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = out.get(i);  // the next norm is of what left the block
  norm(a.next, weights[1], biases[1], sums + 2);
#pragma unroll
  for (int i = 0; i < 8; ++i) out.set(i, y[i]);
  if (inside) store16(a.normed + at, out);
}

struct NoRanks {};

template <class T, bool kParts, int kThreads>
__global__ void __launch_bounds__(kThreads) sum_norm_unit_kernel(const Args<T> a) {
  sum_norm_units<T, kParts, kThreads, NoRanks>(a, nullptr);
}

template <class T, bool kParts, int kThreads>
__global__ void __launch_bounds__(kThreads)
    sum_norm_ranks_kernel(const __grid_constant__ Args<T> a,
                          const __grid_constant__ Exchange exchange) {
  sum_norm_units<T, kParts, kThreads>(a, &exchange);
}

// Whether rows are units of threads' registers.
bool takes_units(const SumNormParams& p) {
  return p.dtype != DType::kFloat32 && p.width % 8 == 0 && p.width <= 8 * 1024;
}

// The sum of what experts made alone.
Status join_parts(const SumNormParams& p, const Launch& launch_on) {
  SumNormParams joined;
  joined.made = p.made;
  joined.parts = p.parts;
  joined.out = p.summed;
  joined.num_rows = p.num_rows;
  joined.width = p.width;
  joined.dtype = p.dtype;
  return sum_norm(joined, launch_on);
}

// By launches of their own: parts, the sum over ranks, the norm.
Status sum_norm_of_ranks(SumNormParams p, const Launch& launch_on) {
  const bool parts = p.parts.places != nullptr;
  if (parts) REGATTA_RETURN_IF_ERROR(join_parts(p, launch_on));
  const void* const in = parts ? p.summed : p.made;
  REGATTA_RETURN_IF_ERROR(sum_ranks({in, p.summed, p.num_rows * p.width, p.dtype}, launch_on));
  p.made = p.summed;
  p.parts = {};
  p.over_ranks = false;
  return sum_norm(p, launch_on);
}

}  // namespace

Status sum_norm(const SumNormParams& p, const Launch& launch_on) {
  if (p.num_rows == 0) return {};
  const Exchange* const exchange = p.over_ranks ? current_exchange() : nullptr;
  const SumProblem problem = sum_problem(p.num_rows * p.width * dtype_size(p.dtype));
  if (p.over_ranks && !(exchange && takes_units(p) && sums_in_norm(p.num_rows, problem))) {
    return sum_norm_of_ranks(p, launch_on);
  }
  return dispatch_dtype(p.dtype, "sum_norm", [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    Args<T> a = {};
    a.made = static_cast<const T*>(p.made);
    a.parts = {p.parts.places,
               p.parts.shares,
               static_cast<int>(p.parts.top_k),
               static_cast<const T*>(p.parts.shared),
               p.parts.shared_gate,
               p.parts.ready};
    a.source = static_cast<const T*>(p.source);
    a.out = static_cast<T*>(p.out);
    a.normed = static_cast<T*>(p.normed);
    a.source_scale = p.source_scale;
    a.made_scale = p.made_scale;
    a.post = row_norm<T>(p.post_norm, p.post_weights);
    a.next = row_norm<T>(p.next_norm, p.next_weights);
    a.post_of_sum = p.post_norm_of == Placement::kSum;
    a.width = static_cast<int>(p.width);
    LaunchConfig config(
        launch_on, p.num_rows,
        std::min<int64_t>(1024, round_up(ceil_div(p.width, int64_t{8}), int64_t{32})));
    const bool parts = p.parts.places != nullptr;
    if constexpr (sizeof(T) == 2) {
      if (exchange) {
        auto* const some =
            parts ? sum_norm_ranks_kernel<T, true, 512> : sum_norm_ranks_kernel<T, false, 512>;
        auto* const most =
            parts ? sum_norm_ranks_kernel<T, true, 1024> : sum_norm_ranks_kernel<T, false, 1024>;
        return launch(config.block.x <= 512 ? some : most, config, "sum_norm", a, *exchange);
      }
      if (takes_units(p)) {
        auto* const some =
            parts ? sum_norm_unit_kernel<T, true, 512> : sum_norm_unit_kernel<T, false, 512>;
        auto* const most =
            parts ? sum_norm_unit_kernel<T, true, 1024> : sum_norm_unit_kernel<T, false, 1024>;
        return launch(config.block.x <= 512 ? some : most, config, "sum_norm", a);
      }
    }
    auto* const whole = parts ? sum_norm_kernel<T, true, true> : sum_norm_kernel<T, true, false>;
    auto* const any = parts ? sum_norm_kernel<T, false, true> : sum_norm_kernel<T, false, false>;
    auto* const kernel = p.width % 8 == 0 ? whole : any;
    // launch() raises the limit for more than 48 KB, and does not know of the kernel's own
    // variables.
    const auto bytes = static_cast<size_t>(p.width * 4);
    config.shared_bytes = bytes > (47 << 10) ? std::max<size_t>(bytes, 49 << 10) : bytes;
    return launch(kernel, config, "sum_norm", a);
  });
}

}  // namespace regatta::cuda
