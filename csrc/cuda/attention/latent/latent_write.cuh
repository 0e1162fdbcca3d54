// What becomes of a token behind the products that make its queries and its latent: see
// LatentWriteParams. A warp norms, rotates and writes the latent, others rotate the queries.
#pragma once

#include <cuda_fp8.h>

#include "cuda/attention/latent/latent.h"
#include "cuda/common.cuh"
#include "regatta/kv_format.h"

namespace regatta::cuda {

template <class T>
struct LatentWriteArgs {
  const T* q;
  const T* latents;
  const T* norm_weight;
  const float* rope_cache;
  const int32_t* positions;
  const int32_t* slot_mapping;
  void* cache;
  T* tail;
  float* scales;
  T* q_nope;
  T* q_rope;
  int32_t* head_ends;
  int64_t q_stride, latent_stride;
  int num_tokens, num_heads, latent_rank, rope_size, nope_size, num_positions;
  float epsilon;
  bool interleaved;

  explicit LatentWriteArgs(const LatentWriteParams& p)
      : q(static_cast<const T*>(p.q)),
        latents(static_cast<const T*>(p.latents)),
        norm_weight(static_cast<const T*>(p.norm_weight)),
        rope_cache(p.rope_cache),
        positions(p.positions),
        slot_mapping(p.slot_mapping),
        cache(p.cache),
        tail(static_cast<T*>(p.tail)),
        scales(p.scales),
        q_nope(static_cast<T*>(p.q_nope)),
        q_rope(static_cast<T*>(p.q_rope)),
        head_ends(p.head_ends),
        q_stride(p.q_stride),
        latent_stride(p.latent_stride),
        num_tokens(static_cast<int>(p.num_tokens)),
        num_heads(static_cast<int>(p.num_heads)),
        latent_rank(static_cast<int>(p.latent_rank)),
        rope_size(static_cast<int>(p.rope_size)),
        nope_size(static_cast<int>(p.nope_size)),
        num_positions(static_cast<int>(p.num_positions)),
        epsilon(p.epsilon),
        interleaved(p.interleaved) {}

  __device__ __forceinline__ const float* angles(int token) const {
    const int position = min(max(positions[token], 0), num_positions - 1);
    return rope_cache + static_cast<int64_t>(position) * rope_size;
  }
};

// Whether all rows and parts of rows lie in units of 16 bytes.
inline bool lies_in_units(const LatentWriteParams& p) {
  const int64_t unit = 16 / dtype_size(p.dtype);
  bool fits = true;
  for (const int64_t values : {p.latent_rank, p.rope_size, p.interleaved ? unit : p.rope_size / 2,
                               p.nope_size, p.q_stride, p.latent_stride}) {
    fits &= values % unit == 0;
  }
  for (const void* at : {p.q, p.latents, p.norm_weight, static_cast<const void*>(p.cache),
                         static_cast<const void*>(p.tail), static_cast<const void*>(p.q_nope),
                         static_cast<const void*>(p.q_rope)}) {
    fits &= reinterpret_cast<uintptr_t>(at) % 16 == 0;
  }
  return fits;
}

// V values side by side: 16 bytes of them, or one.
template <class T, int V>
struct Unit {
  T v[V];

  static __device__ __forceinline__ Unit load(const T* from) {
    if constexpr (V == 1) {
      return {{*from}};
    } else {
      return bit_cast<Unit>(load16(from));
    }
  }
  __device__ __forceinline__ void store(T* to) const {
    if constexpr (V == 1) {
      *to = v[0];
    } else {
      store16(to, bit_cast<Vec16<T>>(*this));
    }
  }
  __device__ __forceinline__ float get(int i) const { return Traits<T>::to_float(v[i]); }
};

// Values i to i + V - 1 of x [size], rotated by a row of the table.
template <class T, int V>
__device__ __forceinline__ Unit<T, V> rotated(const T* x, const float* angles, int i, int size,
                                              bool interleaved) {
  const int half = size / 2;
  const Unit<T, V> own = Unit<T, V>::load(x + i);
  Unit<T, V> other, out;
  float cosine[V], sine[V];
  if (interleaved) {  // values 2 j and 2 j + 1 are a pair
    if constexpr (V == 1) {
      other = Unit<T, V>::load(x + (i ^ 1));
      cosine[0] = angles[i / 2], sine[0] = angles[half + i / 2];
    } else {
#pragma unroll
      for (int v = 0; v < V; ++v) other.v[v] = own.v[v ^ 1];
#pragma unroll
      for (int v = 0; v < V; v += 2) {
        cosine[v] = cosine[v + 1] = angles[(i + v) / 2];
        sine[v] = sine[v + 1] = angles[half + (i + v) / 2];
      }
    }
  } else {  // values j and half + j are
    const int first = i < half ? i : i - half;
    other = Unit<T, V>::load(x + (i < half ? i + half : first));
#pragma unroll
    for (int v = 0; v < V; ++v) cosine[v] = angles[first + v], sine[v] = angles[half + first + v];
  }
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const bool second = interleaved ? (i + v) % 2 == 1 : i >= half;
    const float across = second ? other.get(v) : -other.get(v);
    out.v[v] = Traits<T>::from_float(fmaf(own.get(v), cosine[v], across * sine[v]));
  }
  return out;
}

// Asks for what a token's latent needs of the model, ahead of pdl_wait(). By a warp.
template <class T>
__device__ __forceinline__ void fetch_norm_weight(const LatentWriteArgs<T>& a) {
  const int bytes = a.latent_rank * static_cast<int>(sizeof(T));
  for (int at = threadIdx.x % kWarp * 128; at < bytes; at += kWarp * 128) {
    const char* const line = reinterpret_cast<const char*>(a.norm_weight) + at;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
  }
}

// A token's latent into the cache. By a warp, so that nothing waits for a block's threads.
template <class T, int V>
__device__ __forceinline__ void write_latent(const LatentWriteArgs<T>& a, int token) {
  using U = Unit<T, V>;
  constexpr int kStep = kWarp * V;
  const int begin = threadIdx.x % kWarp * V, rank = a.latent_rank;
  const int64_t slot = a.slot_mapping[token];
  const float* const angles = a.angles(token);
  const T* const latent = a.latents + token * a.latent_stride;
  float sum = 0.f;
#pragma unroll 2
  for (int i = begin; i < rank; i += kStep) {
    const U x = U::load(latent + i);
#pragma unroll
    for (int v = 0; v < V; ++v) sum = fmaf(x.get(v), x.get(v), sum);
  }
  if (slot < 0) return;
  const float factor = rsqrtf(warp_sum(sum) / rank + a.epsilon);
  const auto normed = [&](int i, float (&y)[V]) {
    const U x = U::load(latent + i), weight = U::load(a.norm_weight + i);
#pragma unroll
    for (int v = 0; v < V; ++v) y[v] = x.get(v) * factor * weight.get(v);
  };
  T* tail;
  float y[V];
  if (a.scales != nullptr) {
    float largest = kLeastKvRange;
    for (int i = begin; i < rank; i += kStep) {
      normed(i, y);
#pragma unroll
      for (int v = 0; v < V; ++v) largest = fmaxf(largest, fabsf(y[v]));
    }
    largest = warp_max(largest);
    uint8_t* const codes = static_cast<uint8_t*>(a.cache) + slot * rank;
    for (int i = begin; i < rank; i += kStep) {
      normed(i, y);
      alignas(V) uint8_t to[V];
#pragma unroll
      for (int v = 0; v < V; ++v) {
        to[v] = __nv_cvt_float_to_fp8(y[v] * (448.f / largest), __NV_SATFINITE, __NV_E4M3);
      }
      if constexpr (V == 8) {
        *reinterpret_cast<uint2*>(codes + i) = *reinterpret_cast<const uint2*>(to);
      } else {
#pragma unroll
        for (int v = 0; v < V; ++v) codes[i + v] = to[v];
      }
    }
    if (begin == 0) a.scales[slot] = largest / 448.f;
    tail = a.tail + slot * a.rope_size;
  } else {
    T* const to = static_cast<T*>(a.cache) + slot * (rank + a.rope_size);
#pragma unroll 2
    for (int i = begin; i < rank; i += kStep) {
      normed(i, y);
      U out;
#pragma unroll
      for (int v = 0; v < V; ++v) out.v[v] = Traits<T>::from_float(y[v]);
      out.store(to + i);
    }
    tail = to + rank;
  }
  for (int i = begin; i < a.rope_size; i += kStep) {
    rotated<T, V>(latent + rank, angles, i, a.rope_size, a.interleaved).store(tail + i);
  }
}

// Of each head's `part` values, from value `first` on, unit by unit: to[head, token, part] =
// unit_of(the head's part, i). By `threads` threads; kBatch units are asked for at a time.
template <int kBatch, class T, int V, class UnitOf>
__device__ __forceinline__ void move_queries(const LatentWriteArgs<T>& a, int token, int first,
                                             int part, T* to, int thread, int threads,
                                             const UnitOf& unit_of) {
  const int head_size = a.nope_size + a.rope_size, head_units = part / V;
  const int num_units = a.num_heads * head_units;
  const T* const q = a.q + token * a.q_stride + first;
  for (int u0 = thread; u0 < num_units; u0 += threads * kBatch) {
    Unit<T, V> made[kBatch];
    const auto at = [&](int b) { return min(u0 + b * threads, num_units - 1); };
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      made[b] = unit_of(q + at(b) / head_units * head_size, at(b) % head_units * V);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (u0 + b * threads >= num_units) break;
      const int64_t row = static_cast<int64_t>(at(b) / head_units) * a.num_tokens + token;
      made[b].store(to + row * part + at(b) % head_units * V);
    }
  }
}

// A token's queries, rotated: q_rope.
template <class T, int V>
__device__ __forceinline__ void rotate_queries(const LatentWriteArgs<T>& a, int token, int thread,
                                               int threads) {
  const float* const angles = a.angles(token);
  move_queries<2, T, V>(
      a, token, a.nope_size, a.rope_size, a.q_rope, thread, threads,
      [&](const T* x, int i) { return rotated<T, V>(x, angles, i, a.rope_size, a.interleaved); });
}

// The rest of them: q_nope.
template <class T, int V>
__device__ __forceinline__ void copy_queries(const LatentWriteArgs<T>& a, int token, int thread,
                                             int threads) {
  move_queries<4, T, V>(a, token, 0, a.nope_size, a.q_nope, thread, threads,
                        [](const T* x, int i) { return Unit<T, V>::load(x + i); });
}

}  // namespace regatta::cuda
