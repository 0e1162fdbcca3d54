// c * conv(b * x) of each channel, and the columns that the step behind begins with.
//
// Input: bcx [T, 3 size], states [slots, width - 1, size] in float. Architectures: sm_75 and later.
// A thread has a channel of a token; neighbours read what it reads out of L1. That of a span's last
// token keeps the columns. Bound: memory (or the launch).
#include "cuda/common.cuh"
#include "cuda/states/delta_spans.cuh"
#include "cuda/states/short_conv.h"

namespace regatta::cuda {
namespace {

constexpr int kThreads = 256;

struct ShortConvArgs {
  const void* bcx;
  void* mixed;
  const float *taps, *bias;  // [width, size], [size] or null
  float* states;
  const int32_t *borders, *src, *dst;
  int num_tokens, num_seqs, size, width;
};

template <class T>
__global__ __launch_bounds__(kThreads) void short_conv_kernel(ShortConvArgs a) {
  pdl_trigger();
  pdl_wait();
  const int channel = static_cast<int>(blockIdx.y * kThreads + threadIdx.x);
  const int token = static_cast<int>(blockIdx.x);
  if (channel >= a.size) return;
  const T* const bcx = static_cast<const T*>(a.bcx) + channel;
  T* const out = static_cast<T*>(a.mixed) + int64_t{token} * a.size + channel;
  const int seq = request_of(a.borders, a.num_seqs, token);
  if (seq == a.num_seqs) {
    *out = Traits<T>::from_float(0.f);
    return;
  }
  const int begin = a.borders[seq], place = token - begin, kept = a.width - 1;
  const int src = a.src[seq], dst = a.dst[seq];
  // The convolution's input at a token of the span, which may be before it.
  const auto input = [&](int at) {
    if (at >= 0) {
      const T* const row = bcx + int64_t{begin + at} * 3 * a.size;
      return Traits<T>::to_float(row[0]) * Traits<T>::to_float(row[2 * a.size]);
    }
    return src < 0 ? 0.f : a.states[(int64_t{src} * kept + kept + at) * a.size + channel];
  };
  float sum = a.bias != nullptr ? a.bias[channel] : 0.f;
  for (int tap = 0; tap < a.width; ++tap) {
    sum = fmaf(a.taps[int64_t{tap} * a.size + channel], input(place + tap - kept), sum);
  }
  *out = Traits<T>::from_float(Traits<T>::to_float(bcx[(int64_t{token} * 3 + 1) * a.size]) * sum);
  if (dst < 0 || token + 1 < a.borders[seq + 1]) return;
  for (int i = 0; i < kept; ++i) {
    a.states[(int64_t{dst} * kept + i) * a.size + channel] = input(place + 1 - kept + i);
  }
}

}  // namespace

Status short_conv(const ShortConvBlockParams& p, const Launch& launch_on) {
  ShortConvArgs a;
  a.bcx = p.made_bcx, a.mixed = p.mixed, a.taps = p.taps, a.bias = p.taps_bias;
  a.states = p.states, a.borders = p.batch.cu_seqlens_q, a.src = p.state_src, a.dst = p.state_dst;
  a.num_tokens = static_cast<int>(p.num_tokens), a.num_seqs = static_cast<int>(p.batch.num_seqs);
  a.size = static_cast<int>(p.block.size), a.width = static_cast<int>(p.block.width);
  const LaunchConfig config(launch_on, grid_of(a.num_tokens, ceil_div(a.size, kThreads)), kThreads);
  return dispatch_dtype(p.dtype, "short_conv", [&](auto* t) {
    return launch(short_conv_kernel<std::remove_pointer_t<decltype(t)>>, config, "short_conv", a);
  });
}

}  // namespace regatta::cuda
