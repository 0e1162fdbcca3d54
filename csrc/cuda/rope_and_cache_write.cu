// Splits qkv, normalises (optionally) and rotates queries and keys, and writes keys and values to
// their cache slots.
//
// Architectures: all; float32, bf16, fp16.
// Algorithm: a head is cut into units: the first `rotary_dim` columns into pairs of vectors (one of
// the first half, one of the second: the halves rotate against each other), the rest into single
// vectors. Lanes of a power-of-two group take one unit each, so that the norm is a few shuffles;
// a block takes all heads of one token that fit its threads, and each lane keeps its cosines and
// sines for all of its heads. Vectors are 16 bytes, or one element where sizes are odd.
// Bound: bytes, 2 * (Hq + 2 Hkv) * D per token.
// H200, bf16, 32 + 2 * 8 heads of 128: 2.2 us for 1 token, 3.2 for 128, 74 for 8192 (2.7 of 4.26
// TB/s).
#include "common.cuh"
#include "regatta/cuda_ops.h"

namespace regatta::cuda {
namespace {

constexpr int kThreads = 128;

template <class T, int kSize>
struct Piece {
  float v[kSize];
  __device__ __forceinline__ void load(const T* p) {
    if constexpr (kSize == 1) {
      v[0] = Traits<T>::to_float(*p);
    } else {
      const Vec16<T> x = load16(p);
#pragma unroll
      for (int e = 0; e < kSize; ++e) v[e] = x.get(e);
    }
  }
  __device__ __forceinline__ void store(T* p) const {
    if constexpr (kSize == 1) {
      *p = Traits<T>::from_float(v[0]);
    } else {
      Vec16<T> x;
#pragma unroll
      for (int e = 0; e < kSize; ++e) x.set(e, v[e]);
      store16(p, x);
    }
  }
};

struct Shape {
  int num_heads, num_kv_heads, head_dim, rotary_dim, block_size;
  int lanes;  // per head, a power of two up to 32
  int heads_per_block;
  float epsilon;
  int64_t num_slots, num_positions;
};

template <class T, int kSize>
__global__ void __launch_bounds__(kThreads)
    rope_kernel(const T* qkv, const int32_t* positions, const int32_t* slot_mapping,
                const float* rope_cache, const T* q_norm, const T* k_norm, T* key_cache,
                T* value_cache, T* q_out, const Shape s) {
  pdl_trigger();
  pdl_wait();
  const int token = blockIdx.x;
  const int lane = threadIdx.x % s.lanes;
  const int half = s.rotary_dim / 2;
  const int num_pairs = half / kSize;  // units that rotate
  const int num_units = num_pairs + (s.head_dim - s.rotary_dim) / kSize;
  const int num_all = s.num_heads + 2 * s.num_kv_heads;
  const int slot = slot_mapping[token];
  const bool written = slot >= 0 && slot < s.num_slots;
  const int position = min(max(positions[token], 0), static_cast<int>(s.num_positions) - 1);
  const float* angles = rope_cache + static_cast<int64_t>(position) * s.rotary_dim;
  const int first_head = blockIdx.y * s.heads_per_block;
  const int last_head = min(first_head + s.heads_per_block, num_all);

  // The same trip count for every lane of a warp: shuffles need all of them.
  const int step = kThreads / s.lanes;
  for (int base = first_head; base < last_head; base += step) {
    const int head = base + threadIdx.x / s.lanes;
    const bool active = head < last_head;
    const bool is_value = head >= s.num_heads + s.num_kv_heads;
    const bool is_query = head < s.num_heads;
    const T* norm = is_value ? nullptr : is_query ? q_norm : k_norm;
    const T* source = qkv + (static_cast<int64_t>(token) * num_all + head) * s.head_dim;

    float scale = 1.f;
    float sum = 0.f;
    if (active && norm != nullptr) {
      for (int unit = lane; unit < num_units; unit += s.lanes) {
        Piece<T, kSize> x;
        const bool pair = unit < num_pairs;
        x.load(source + (pair ? unit * kSize : s.rotary_dim + (unit - num_pairs) * kSize));
#pragma unroll
        for (int e = 0; e < kSize; ++e) sum = fmaf(x.v[e], x.v[e], sum);
        if (pair) {
          x.load(source + half + unit * kSize);
#pragma unroll
          for (int e = 0; e < kSize; ++e) sum = fmaf(x.v[e], x.v[e], sum);
        }
      }
    }
    if (q_norm != nullptr || k_norm != nullptr) {
      for (int o = s.lanes / 2; o > 0; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
      if (norm != nullptr) scale = rsqrtf(sum / s.head_dim + s.epsilon);
    }

    T* to = nullptr;
    if (active && is_query) {
      to = q_out + (static_cast<int64_t>(token) * s.num_heads + head) * s.head_dim;
    } else if (active && written) {
      const int kv_head = head - s.num_heads - (is_value ? s.num_kv_heads : 0);
      const int64_t row =
          (static_cast<int64_t>(slot / s.block_size) * s.num_kv_heads + kv_head) * s.block_size +
          slot % s.block_size;
      to = (is_value ? value_cache : key_cache) + row * s.head_dim;
    }
    if (to == nullptr) continue;
    for (int unit = lane; unit < num_units; unit += s.lanes) {
      const bool pair = unit < num_pairs;
      const int column = pair ? unit * kSize : s.rotary_dim + (unit - num_pairs) * kSize;
      Piece<T, kSize> x, y, w;
      x.load(source + column);
      if (norm != nullptr) {
        w.load(norm + column);
#pragma unroll
        for (int e = 0; e < kSize; ++e) x.v[e] *= scale * w.v[e];
      }
      if (pair) {
        y.load(source + half + column);
        if (norm != nullptr) {
          w.load(norm + half + column);
#pragma unroll
          for (int e = 0; e < kSize; ++e) y.v[e] *= scale * w.v[e];
        }
        if (!is_value) {
#pragma unroll
          for (int e = 0; e < kSize; ++e) {
            const float c = angles[column + e], n = angles[half + column + e];
            const float a = x.v[e], b = y.v[e];
            x.v[e] = a * c - b * n;
            y.v[e] = b * c + a * n;
          }
        }
        y.store(to + half + column);
      }
      x.store(to + column);
    }
  }
}

}  // namespace

Status rope_and_cache_write(const RopeAndCacheWriteParams& p, const Launch& launch_on) {
  if (p.num_tokens == 0) return {};
  if (p.rotary_dim % 2 != 0 || p.rotary_dim > p.head_dim) {
    return Status::error("rope_and_cache_write: rotary_dim " + std::to_string(p.rotary_dim) +
                         " must be even and at most head_dim " + std::to_string(p.head_dim));
  }
  return dispatch_dtype(p.dtype, "rope_and_cache_write", [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    constexpr int kVector = Vec16<T>::kSize;
    const bool vector = p.rotary_dim / 2 % kVector == 0 && p.head_dim % kVector == 0;
    const int64_t size = vector ? kVector : 1;
    const int64_t units = p.rotary_dim / 2 / size + (p.head_dim - p.rotary_dim) / size;
    Shape s = {};
    s.num_heads = static_cast<int>(p.num_heads);
    s.num_kv_heads = static_cast<int>(p.num_kv_heads);
    s.head_dim = static_cast<int>(p.head_dim);
    s.rotary_dim = static_cast<int>(p.rotary_dim);
    s.block_size = static_cast<int>(p.cache.block_size);
    s.epsilon = p.epsilon;
    s.num_slots = p.cache.num_blocks * p.cache.block_size;
    s.num_positions = p.num_positions;
    s.lanes = 1;
    while (s.lanes < units && s.lanes < kWarp) s.lanes *= 2;
    const int64_t num_all = p.num_heads + 2 * p.num_kv_heads;
    // Few tokens: one pass per block, for latency. Many: one block per token.
    const int64_t per_pass = kThreads / s.lanes;
    s.heads_per_block = static_cast<int>(p.num_tokens <= 512 ? per_pass : num_all);
    LaunchConfig config;
    config.grid = dim3(static_cast<unsigned>(p.num_tokens),
                       static_cast<unsigned>(ceil_div(num_all, s.heads_per_block)));
    config.block = dim3(kThreads);
    config.stream = launch_on.stream;
    config.pdl = launch_on.pdl;
    return launch(vector ? rope_kernel<T, kVector> : rope_kernel<T, 1>, config,
                  "rope_and_cache_write", static_cast<const T*>(p.qkv), p.positions, p.slot_mapping,
                  p.rope_cache, static_cast<const T*>(p.q_norm), static_cast<const T*>(p.k_norm),
                  static_cast<T*>(p.cache.key), static_cast<T*>(p.cache.value),
                  static_cast<T*>(p.q_out), s);
  });
}

}  // namespace regatta::cuda
