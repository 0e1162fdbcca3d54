// What the kernels of states share: spans and their pieces, convolutions, gates.
#pragma once

#include "cuda/common.cuh"
#include "cuda/states/delta_net.h"

namespace regatta::cuda {

constexpr int kChunk = 64;  // tokens, from a request's position 0 on

// A request's tokens of a step.
struct SpanWork {
  int begin, length;  // in the step's tokens
  int offset;         // of its first token in a chunk
  int in_chunks;      // tokens that go by chunks; what is behind them goes by steps
  int num_pieces;     // chunks, or parts of one

  // Piece i: tokens [from, to) of the span.
  __device__ int from(int piece) const { return max(0, piece * kChunk - offset); }
  __device__ int to(int piece) const { return min((piece + 1) * kChunk - offset, in_chunks); }
};

__device__ __forceinline__ SpanWork span_work(const DeltaArgs& a, int seq) {
  SpanWork span;
  span.begin = a.borders[seq];
  span.length = a.borders[seq + 1] - span.begin;
  span.offset = (a.contexts[seq] - span.length) % kChunk;
  span.in_chunks = 0;
  if (span.length > kFewTokens) {
    const int rest = (span.offset + span.length) % kChunk;
    // Steps go on with the state that chunks left in dst.
    const bool steps = rest > 0 && rest <= kFewTokens && a.dst[seq] >= 0;
    span.in_chunks = span.length - (steps ? rest : 0);
  }
  span.num_pieces = span.in_chunks == 0 ? 0 : (span.offset + span.in_chunks + kChunk - 1) / kChunk;
  return span;
}

// The request that has the item-th piece of all, and which of its pieces that is; num_seqs where
// there are fewer. By whole warps.
__device__ __forceinline__ int find_piece(const DeltaArgs& a, int item, int* piece) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  for (int first = 0; first < a.num_seqs; first += kWarp) {
    const int seq = first + lane;
    const int count = seq < a.num_seqs ? span_work(a, seq).num_pieces : 0;
    const int end = warp_inclusive_scan(count, lane);
    const unsigned has = __ballot_sync(~0u, item < end);
    if (has != 0) {
      const int owner = __ffs(static_cast<int>(has)) - 1;
      *piece = item - __shfl_sync(~0u, end - count, owner);
      return first + owner;
    }
    item -= __shfl_sync(~0u, end, kWarp - 1);
  }
  return a.num_seqs;
}

// The request that has a token; num_seqs behind the last one.
__device__ __forceinline__ int request_of(const int32_t* borders, int num_seqs, int token) {
  if (num_seqs == 0 || token >= borders[num_seqs]) return num_seqs;
  int low = 0, high = num_seqs;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (borders[middle] <= token ? low : high) = middle;
  }
  return low;
}

// Of large negative x the divisor is infinite, or too large for __fdividef: both are 0.
__device__ __forceinline__ float sigmoid_of(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }
__device__ __forceinline__ float silu_of(float x) { return __fdividef(x, 1.f + __expf(-x)); }

// The input of a convolution at a span's token, which may be before it.
template <class T>
__device__ __forceinline__ float conv_input(const DeltaArgs& a, int begin, int src, int token,
                                            int channel) {
  if (token >= 0) {
    const T* row = static_cast<const T*>(a.qkvz) + (begin + token) * int64_t{a.row_size()};
    return Traits<T>::to_float(row[channel]);
  }
  const int kept = a.conv_width - 1;
  if (src < 0) return 0.f;
  return a.conv_states[(int64_t{src} * kept + kept + token) * a.conv_size() + channel];
}

// Convolution and SiLU of a channel at a span's token.
template <class T>
__device__ __forceinline__ float convolved(const DeltaArgs& a, int begin, int src, int token,
                                           int channel) {
  float sum = a.conv_bias != nullptr ? a.conv_bias[channel] : 0.f;
  for (int tap = 0; tap < a.conv_width; ++tap) {
    const float x = conv_input<T>(a, begin, src, token + tap - (a.conv_width - 1), channel);
    sum = fmaf(a.conv[int64_t{tap} * a.conv_size() + channel], x, sum);
  }
  return silu_of(sum);
}

// The logarithm of a decay, from its part of ba's row; step: softplus of it.
__device__ __forceinline__ float log_decay(const DeltaArgs& a, int head, float x, float* step) {
  *step = x > 20.f ? x : log1pf(expf(x));
  const float rate = expf(a.decay_log[head]);
  return a.decay_bound < 0.f ? a.decay_bound / (1.f + expf(-rate * x)) : -rate * *step;
}

// Of a head with one decay that writes by sigmoid: the logarithm of its decay, and its strength.
template <class T>
__device__ __forceinline__ float gates_of(const DeltaArgs& a, int head, int64_t token,
                                          float* strength) {
  const T* row = static_cast<const T*>(a.ba) + token * (2 * a.value_heads);
  float step;
  *strength = a.write_scale / (1.f + expf(-Traits<T>::to_float(row[head])));
  return log_decay(a, head, Traits<T>::to_float(row[a.value_heads + head]) + a.step_bias[head],
                   &step);
}

// Four values of a row, aligned to them.
template <class T>
__device__ __forceinline__ float4 load_four(const T* p) {
  if constexpr (sizeof(T) == 4) {
    return *reinterpret_cast<const float4*>(p);
  } else {
    const uint2 bits = *reinterpret_cast<const uint2*>(p);
    const float2 a = Traits<T>::to_float2(bit_cast<typename Traits<T>::Pair>(bits.x));
    const float2 b = Traits<T>::to_float2(bit_cast<typename Traits<T>::Pair>(bits.y));
    return make_float4(a.x, a.y, b.x, b.y);
  }
}

template <class T>
__device__ __forceinline__ void store_four(T* p, float4 x) {
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float4*>(p) = x;
  } else {
    uint2 bits;
    bits.x = bit_cast<uint32_t>(Traits<T>::from_float2(make_float2(x.x, x.y)));
    bits.y = bit_cast<uint32_t>(Traits<T>::from_float2(make_float2(x.z, x.w)));
    *reinterpret_cast<uint2*>(p) = bits;
  }
}

template <class T>
__device__ __forceinline__ float2 load_two(const T* p) {
  return Traits<T>::to_float2(*reinterpret_cast<const typename Traits<T>::Pair*>(p));
}

template <class T>
__device__ __forceinline__ void store_two(T* p, float x, float y) {
  *reinterpret_cast<typename Traits<T>::Pair*>(p) = Traits<T>::from_float2(make_float2(x, y));
}

// f(pointers of the activations' type and of the states').
template <class F>
Status dispatch_states(DType dtype, DType states, const char* name, F&& f) {
  return dispatch_dtype(dtype, name, [&](auto* t) {
    return states == DType::kBFloat16 ? f(t, static_cast<__nv_bfloat16*>(nullptr))
                                      : f(t, static_cast<float*>(nullptr));
  });
}

}  // namespace regatta::cuda
