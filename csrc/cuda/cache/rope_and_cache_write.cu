// Splits qkv, normalises (optionally) and rotates queries and keys, and writes keys and values to
// their cache slots, as values or as the codes of the cache's format.
//
// Architectures: all; float32, bf16, fp16; e4m3 codes from sm_89 on.
// Algorithm: a few lanes per head, a thread block per token (or part of one: few tokens are spread
// over more blocks, for latency), several heads per thread where there are many tokens; see
// rotate_head.cuh. Heads that do not divide into vectors of 8, or turn in two dimensions, take a
// slower kernel, one warp per head with its row in shared memory. A norm over all heads' values
// takes their squares first, in every block of a token anew: they are in L2, and another launch
// would cost more. Bound: bytes, 2 * (Hq + 2 Hkv) * D per token.
#include <algorithm>
#include <type_traits>

#include "cuda/common.cuh"
#include "regatta/cuda_ops.h"
#include "rotate_head.cuh"

namespace regatta::cuda {
namespace {

constexpr int kThreads = 128;
// Per thread and turn, when there are many tokens: enough bytes in flight, and angles read once.
// 8192 tokens of 48 heads of 128 on an H200: 3 heads x 128 threads 56 us, 2 x 192 64, 6 x 64 93.
constexpr int kManyHeads = 3;
constexpr int kAnyWarps = 4;  // heads per block of the kernel for odd sizes

struct Args {
  const void* qkv;
  const int32_t* positions;
  const int32_t* slot_mapping;
  const float* rope_cache;  // null: nothing rotates
  const void* q_norm;
  const void* k_norm;
  void* q_out;
  PagedCache cache;
  int num_heads, num_kv_heads, head_dim, rotary_dim;
  int heads_per_block, row_bytes;
  float epsilon;
  int num_slots, num_positions;
  HeadUnits units;
};

// What few models do.
struct More {
  const float* query_rope_cache;   // of queries
  const int32_t* block_positions;  // of the second dimension, or null
  bool plus_one, whole, last, interleaved;
  const float* squares;  // of `whole`, over ranks [T, 2], or null
  float whole_size;      // values that they are of
};

// Where a head of a token comes from and goes to.
struct Head {
  bool is_query, is_value;
  int kv_head;
  int64_t cache_row;  // -1: not written

  __device__ __forceinline__ Head(const Args& a, int head, int slot) {
    is_query = head < a.num_heads;
    is_value = head >= a.num_heads + a.num_kv_heads;
    kv_head = is_query ? 0 : head - a.num_heads - (is_value ? a.num_kv_heads : 0);
    const int block_size = static_cast<int>(a.cache.block_size);
    cache_row = -1;
    if (!is_query && slot >= 0 && slot < a.num_slots) {
      cache_row =
          (static_cast<int64_t>(slot / block_size) * a.num_kv_heads + kv_head) * block_size +
          slot % block_size;
    }
  }
  __device__ __forceinline__ uint8_t* row(const Args& a) const {
    return static_cast<uint8_t*>(is_value ? a.cache.value : a.cache.key) + cache_row * a.row_bytes;
  }
  __device__ __forceinline__ float* scales(const Args& a) const {
    return is_value ? a.cache.value_scale : a.cache.key_scale;
  }
  // The given scale of formats that have one per head.
  __device__ __forceinline__ float given(const Args& a) const {
    const KvFormat format = a.cache.format;
    if (is_query || scale_floats(format) == 0 || has_token_scales(format)) return 1.f;
    return scales(a)[kv_head];
  }
  __device__ __forceinline__ void store_scale(const Args& a, float2 stored) const {
    const int floats = scale_floats(a.cache.format);
    if (!has_token_scales(a.cache.format)) return;
    scales(a)[cache_row * floats] = stored.x;
    if (floats > 1) scales(a)[cache_row * floats + 1] = stored.y;
  }
};

__device__ __forceinline__ const float* angles_of(const Args& a, int token) {
  const int position = min(max(a.positions[token], 0), a.num_positions - 1);
  return a.rope_cache + static_cast<int64_t>(position) * a.rotary_dim;
}

// Null where nothing rotates. positions: those of a dimension.
__device__ __forceinline__ const float* angles_of(const Args& a, const More& more,
                                                  const int32_t* positions, int token,
                                                  bool is_query) {
  if (a.rope_cache == nullptr) return nullptr;
  const int position = min(max(positions[token], 0), a.num_positions - 1);
  return (is_query ? more.query_rope_cache : a.rope_cache) +
         static_cast<int64_t>(position) * a.rotary_dim;
}

// A head's weights of a norm, or null.
template <class T>
__device__ __forceinline__ const T* norm_of(const Args& a, bool whole, const Head& head,
                                            int index) {
  const T* const norm = static_cast<const T*>(head.is_value   ? nullptr
                                              : head.is_query ? a.q_norm
                                                              : a.k_norm);
  if (norm == nullptr || !whole) return norm;
  return norm + static_cast<int64_t>(head.is_query ? index : head.kv_head) * a.head_dim;
}

// The scale of a token's queries, or keys, by what ranks have summed.
__device__ __forceinline__ float scale_of_ranks(const Args& a, const More& more, int token,
                                                bool is_query) {
  return rsqrtf(more.squares[2 * token + !is_query] / more.whole_size + a.epsilon);
}

// A norm's scale over all queries of a token, and over all keys; the whole block calls it.
template <class T>
__device__ __forceinline__ float2 whole_scales(const Args& a, const More& more, int token,
                                               float* scratch) {
  if (more.squares != nullptr) {
    return make_float2(scale_of_ranks(a, more, token, true), scale_of_ranks(a, more, token, false));
  }
  const int dims[2] = {a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim};
  const T* const first =
      static_cast<const T*>(a.qkv) + static_cast<int64_t>(token) * (dims[0] + 2 * dims[1]);
  float scales[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const T* const values = first + i * dims[0];
    float sum = 0.f, x[8];
    for (int d = threadIdx.x * 8; d < dims[i]; d += blockDim.x * 8) {
      load8(values + d, x);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum = fmaf(x[e], x[e], sum);
    }
    scales[i] = rsqrtf(block_sum(sum, scratch + i * kWarp) / dims[i] + a.epsilon);
  }
  return make_float2(scales[0], scales[1]);
}

// A thread takes kHeads heads at a time, all of whose loads are issued before the first is used.
// kMore: what `more` says is done, and nothing rotates without angles.
template <class T, bool kDense, int kHeads, bool kMore>
__global__ void __launch_bounds__(kThreads) rope_kernel(const Args a, const More more) {
  pdl_trigger();
  pdl_wait();
  const int token = blockIdx.x;
  const int unit = threadIdx.x % a.units.lanes;
  const int num_all = a.num_heads + 2 * a.num_kv_heads;
  const int slot = a.slot_mapping[token];
  const float* angles_row = nullptr;
  if constexpr (!kMore) angles_row = angles_of(a, token);
  const int first_head = blockIdx.y * a.heads_per_block;
  const int last_head = min(first_head + a.heads_per_block, num_all);
  const int step = blockDim.x / a.units.lanes;
  [[maybe_unused]] float2 scales;
  if constexpr (kMore) {
    __shared__ float scratch[2 * kWarp];
    if (more.whole) scales = whole_scales<T>(a, more, token, scratch);
  }
  // The same trip count for every lane of a warp: shuffles need all of them.
  for (int base = first_head; base < last_head; base += step * kHeads) {
    HeadPart x[kHeads];
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      const int index = base + j * step + threadIdx.x / a.units.lanes;
      const bool active = index < last_head;
      x[j].load(static_cast<const T*>(a.qkv) +
                    (static_cast<int64_t>(token) * num_all + (active ? index : 0)) * a.head_dim,
                a.units, unit, active);
    }
    Angles angles;
    if constexpr (!kMore) angles.load(angles_row, a.units, unit);
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      const int index = base + j * step + threadIdx.x / a.units.lanes;
      const bool active = index < last_head;
      const Head head(a, active ? index : 0, slot);
      if constexpr (kMore) {
        const auto normalise = [&](bool now) {
          if (!now || (a.q_norm == nullptr && a.k_norm == nullptr)) return;
          const T* const weight = norm_of<T>(a, more.whole, head, index);
          const float sum = lanes_sum(x[j].squares(), a.units.lanes);
          const float scale = more.whole ? (head.is_query ? scales.x : scales.y)
                                         : rsqrtf(sum / a.head_dim + a.epsilon);
          if (weight != nullptr) {
            x[j].multiply(weight, a.units, unit, scale, more.plus_one);
          }
        };
        normalise(!more.last);
        if (!head.is_value && a.rope_cache != nullptr) {
          const float* const row = angles_of(a, more, a.positions, token, head.is_query);
          if (more.interleaved) {
            angles.load_interleaved(row, a.units, unit);
            x[j].rotate_interleaved(angles);
          } else {
            angles.load(row, a.units, unit);
            x[j].rotate(angles);
          }
        }
        normalise(more.last);
      } else {
        if (a.q_norm != nullptr || a.k_norm != nullptr) {
          const void* weight = head.is_value ? nullptr : head.is_query ? a.q_norm : a.k_norm;
          x[j].normalise(static_cast<const T*>(weight), a.units, unit, a.head_dim, a.epsilon);
        }
        if (!head.is_value) x[j].rotate(angles);
      }
      RowScale scale;
      if constexpr (!kDense) {
        scale = row_scale(a.cache.format, x[j], a.units.lanes, head.given(a));
      }
      if (active && head.is_query) {
        T* const to = static_cast<T*>(a.q_out) +
                      (static_cast<int64_t>(token) * a.num_heads + index) * a.head_dim +
                      a.units.column(unit);
        if (x[j].used) store8(to, x[j].low);
        if (x[j].pair) store8(to + a.units.half, x[j].high);
      } else if (active && head.cache_row >= 0) {
        const KvFormat format = kDense ? KvFormat::kDense : a.cache.format;
        if (x[j].used) store_columns<T>(format, head.row(a), a.units.column(unit), x[j].low, scale);
        if (x[j].pair) {
          store_columns<T>(format, head.row(a), a.units.column(unit) + a.units.half, x[j].high,
                           scale);
        }
        if (!kDense && unit == 0) head.store_scale(a, scale.stored);
      }
    }
  }
}

// Any sizes, and a second dimension: one warp per head, its row as floats in shared memory.
template <class T>
__global__ void __launch_bounds__(kAnyWarps* kWarp) rope_any_kernel(const Args a, const More more) {
  extern __shared__ float rows[];
  pdl_trigger();
  pdl_wait();
  const int token = blockIdx.x, lane = threadIdx.x % kWarp;
  const int num_all = a.num_heads + 2 * a.num_kv_heads;
  const int index = blockIdx.y * kAnyWarps + threadIdx.x / kWarp;
  if (index >= num_all) return;
  const Head head(a, index, a.slot_mapping[token]);
  const int dim = a.head_dim, half = a.rotary_dim / 2;
  float* const row = rows + threadIdx.x / kWarp * dim;
  const T* const source =
      static_cast<const T*>(a.qkv) + (static_cast<int64_t>(token) * num_all + index) * dim;
  const T* const norm = norm_of<T>(a, more.whole, head, index);
  float sum = 0.f;
  for (int d = lane; d < dim; d += kWarp) {
    row[d] = Traits<T>::to_float(source[d]);
    sum = fmaf(row[d], row[d], sum);
  }
  const auto normalise = [&](bool now) {
    if (!now || norm == nullptr) return;
    int normed = dim;
    if (more.whole && more.squares == nullptr) {
      normed *= head.is_query ? a.num_heads : a.num_kv_heads;
      const T* const all =
          source - static_cast<int64_t>(head.is_query ? index : head.kv_head) * dim;
      sum = 0.f;
      for (int d = lane; d < normed; d += kWarp) {
        const float x = Traits<T>::to_float(all[d]);
        sum = fmaf(x, x, sum);
      }
    }
    float scale = rsqrtf(warp_sum(sum) / normed + a.epsilon);
    if (more.whole && more.squares != nullptr) {
      scale = scale_of_ranks(a, more, token, head.is_query);
    }
    for (int d = lane; d < dim; d += kWarp) {
      const float weight = Traits<T>::to_float(norm[d]);
      row[d] *= scale * (more.plus_one ? 1.f + weight : weight);
    }
  };
  normalise(!more.last);
  __syncwarp();
  if (!head.is_value && a.rope_cache != nullptr) {
    const auto rotate = [&](const int32_t* positions, float* values) {
      const float* const angles = angles_of(a, more, positions, token, head.is_query);
      for (int d = lane; d < half; d += kWarp) {
        const int i = more.interleaved ? 2 * d : d, j = more.interleaved ? 2 * d + 1 : d + half;
        const float x = values[i], y = values[j];
        values[i] = x * angles[d] - y * angles[d + half];
        values[j] = y * angles[d] + x * angles[d + half];
      }
    };
    rotate(a.positions, row);
    if (more.block_positions != nullptr) rotate(more.block_positions, row + 2 * half);
    __syncwarp();
    if (more.last) {  // of rotated values, whose table may have a factor
      sum = 0.f;
      for (int d = lane; d < dim; d += kWarp) sum = fmaf(row[d], row[d], sum);
    }
    normalise(more.last);
    __syncwarp();
  }
  if (head.is_query) {
    T* const to =
        static_cast<T*>(a.q_out) + (static_cast<int64_t>(token) * a.num_heads + index) * dim;
    for (int d = lane; d < dim; d += kWarp) to[d] = Traits<T>::from_float(row[d]);
    return;
  }
  if (head.cache_row < 0) return;
  const KvFormat format = a.cache.format;
  if (format == KvFormat::kDense) {
    T* const to = reinterpret_cast<T*>(head.row(a));
    for (int d = lane; d < dim; d += kWarp) to[d] = Traits<T>::from_float(row[d]);
    return;
  }
  float least = INFINITY, most = -INFINITY;
  for (int d = lane; d < dim; d += kWarp) least = fminf(least, row[d]), most = fmaxf(most, row[d]);
  least = -warp_max(-least);
  most = warp_max(most);
  const RowScale scale = row_scale_of(format, least, most, head.given(a));
  // Eight columns are 4 (int4) or 8 bytes; a row's last ones may be fewer.
  for (int d = lane * 8; d < dim; d += kWarp * 8) {
    float x[8];
    for (int e = 0; e < 8; ++e) x[e] = d + e < dim ? row[d + e] : scale.offset;
    const uint2 codes = codes_of(format, x, scale);
    const int bytes = format == KvFormat::kInt4 ? (min(8, dim - d) + 1) / 2 : min(8, dim - d);
    uint8_t* const to = head.row(a) + (format == KvFormat::kInt4 ? d / 2 : d);
    for (int b = 0; b < bytes; ++b) to[b] = (b < 4 ? codes.x : codes.y) >> (b % 4 * 8);
  }
  if (lane == 0) head.store_scale(a, scale.stored);
}

// A block per token: sums of squares of its queries, and of its keys times `group`.
template <class T>
__global__ void __launch_bounds__(kThreads)
    squares_kernel(const T* qkv, float* squares, int q_size, int k_size, float group) {
  __shared__ float scratch[2][kWarp];
  pdl_trigger();
  pdl_wait();
  const T* const row = qkv + static_cast<int64_t>(blockIdx.x) * (q_size + 2 * k_size);
  float sums[2] = {};
  for (int i = threadIdx.x; i < q_size + k_size; i += kThreads) {
    const float x = Traits<T>::to_float(row[i]);
    float& sum = sums[i >= q_size];
    sum = fmaf(x, x, sum);
  }
  for (int i = 0; i < 2; ++i) {
    const float sum = block_sum(sums[i], scratch[i]);
    if (threadIdx.x == 0) squares[2 * blockIdx.x + i] = i == 0 ? sum : group * sum;
  }
}

}  // namespace

Status whole_squares(const RopeAndCacheWriteParams& p, float* squares, const Launch& launch_on) {
  if (p.num_tokens == 0) return {};
  return dispatch_dtype(p.dtype, "whole_squares", [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    return launch(squares_kernel<T>, {launch_on, p.num_tokens, kThreads}, "whole_squares",
                  static_cast<const T*>(p.qkv), squares, static_cast<int>(p.num_heads * p.head_dim),
                  static_cast<int>(p.num_kv_heads * p.head_dim),
                  static_cast<float>(p.num_heads / p.num_kv_heads));
  });
}

Status rope_and_cache_write(const RopeAndCacheWriteParams& p, const Launch& launch_on) {
  if (p.num_tokens == 0) return {};
  if (p.cache.format == KvFormat::kFp8) {
    int device = 0, major = 0, minor = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    }
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    }
    if (error != cudaSuccess) return cuda_status(error, "rope_and_cache_write");
    if (major * 10 + minor < 89) {
      return Status::error("kv_format fp8 needs sm_89 or later, got sm_" +
                           std::to_string(major * 10 + minor) +
                           " (allowed here: dense, int8_static, int8_dynamic, int4)");
    }
  }
  const int64_t rotary_dim = p.rope_cache == nullptr ? 0 : p.rotary_dim;
  if (rotary_dim % 2 != 0 || rotary_dim > p.head_dim) {
    return Status::error("rope_and_cache_write: rotary_dim " + std::to_string(p.rotary_dim) +
                         " must be even and at most head_dim " + std::to_string(p.head_dim));
  }
  Args a = {};
  a.qkv = p.qkv;
  a.positions = p.positions;
  a.slot_mapping = p.slot_mapping;
  a.rope_cache = p.rope_cache;
  More more = {};
  more.query_rope_cache = p.query_rope_cache != nullptr ? p.query_rope_cache : p.rope_cache;
  a.q_norm = p.q_norm;
  a.k_norm = p.k_norm;
  a.q_out = p.q_out;
  a.cache = p.cache;
  a.num_heads = static_cast<int>(p.num_heads);
  a.num_kv_heads = static_cast<int>(p.num_kv_heads);
  a.head_dim = static_cast<int>(p.head_dim);
  a.rotary_dim = static_cast<int>(rotary_dim);
  a.row_bytes = static_cast<int>(kv_row_bytes(p.cache.format, p.head_dim, dtype_size(p.dtype)));
  a.epsilon = p.epsilon;
  a.num_slots = static_cast<int>(p.cache.num_blocks * p.cache.block_size);
  a.num_positions = static_cast<int>(p.num_positions);
  a.units = HeadUnits::of(a.head_dim, a.rotary_dim);
  more.plus_one = p.plus_one;
  more.whole = p.whole && (p.q_norm != nullptr || p.k_norm != nullptr);
  more.squares = p.whole_squares;
  more.whole_size = static_cast<float>(p.whole_size);
  more.last = p.last;
  more.interleaved = p.interleaved;
  more.block_positions = p.rope_cache == nullptr ? nullptr : p.block_positions;
  if (more.block_positions != nullptr && (p.interleaved || 2 * rotary_dim > p.head_dim)) {
    return Status::error("rope_and_cache_write: block_positions with rotary_dim " +
                         std::to_string(rotary_dim) + (p.interleaved ? ", interleaved" : "") +
                         " (allowed: not interleaved, at most half of head_dim " +
                         std::to_string(p.head_dim) + ")");
  }
  const bool does_more = a.rope_cache == nullptr || p.query_rope_cache != nullptr ||
                         more.plus_one || more.whole || more.last || more.interleaved;
  const bool dense = p.cache.format == KvFormat::kDense;
  const bool vector = more.block_positions == nullptr && rotary_dim % 16 == 0 &&
                      p.head_dim % 8 == 0 && a.units.lanes <= kWarp;
  const int64_t num_all = p.num_heads + 2 * p.num_kv_heads;
  return dispatch_dtype(p.dtype, "rope_and_cache_write", [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    if (!vector) {
      return launch(rope_any_kernel<T>,
                    {launch_on, grid_of(p.num_tokens, ceil_div(num_all, kAnyWarps)),
                     kAnyWarps * kWarp, kAnyWarps * p.head_dim * 4},
                    "rope_and_cache_write", a, more);
    }
    // Few tokens: a head per thread, for latency. Many: a block per token, several heads a thread.
    const int64_t threads = round_up(num_all * a.units.lanes, kWarp);
    const int64_t block_threads = std::min<int64_t>(kThreads, threads);
    const bool many = p.num_tokens > 512 && threads > kThreads;
    a.heads_per_block = static_cast<int>(many ? num_all : block_threads / a.units.lanes);
    const dim3 grid = grid_of(p.num_tokens, ceil_div(num_all, a.heads_per_block));
    const auto of = [&](auto heads) {
      constexpr int kHeads = decltype(heads)::value;
      if (does_more) {
        return dense ? rope_kernel<T, true, kHeads, true> : rope_kernel<T, false, kHeads, true>;
      }
      return dense ? rope_kernel<T, true, kHeads, false> : rope_kernel<T, false, kHeads, false>;
    };
    auto* const kernel =
        many ? of(std::integral_constant<int, kManyHeads>()) : of(std::integral_constant<int, 1>());
    return launch(kernel, {launch_on, grid, block_threads}, "rope_and_cache_write", a, more);
  });
}

}  // namespace regatta::cuda
