// One head of one token by a group of lanes: norm, rotary embedding, and the codes of a quantized
// cache row. Shared by rope_and_cache_write and by the attention kernels that do its work on the
// way.
//
// Lane `unit` of a head's group holds up to two vectors of 8 columns: for unit < rotary_dim / 16
// the columns [8 unit, +8) and the same of the other half (the halves rotate against each other),
// else 8 columns behind the rotated ones and nothing. The group has a power of two lanes, so that
// sums over a head are a few shuffles.
#pragma once

#include "cuda/common.cuh"
#include "kv_device.cuh"

namespace regatta::cuda {

// Where the columns of a lane lie. Needs rotary_dim / 2 and head_dim to be multiples of 8.
struct HeadUnits {
  int lanes, half, pairs, units;

  __host__ __device__ static HeadUnits of(int head_dim, int rotary_dim) {
    HeadUnits h;
    h.half = rotary_dim / 2;
    h.pairs = h.half / 8;
    h.units = h.pairs + (head_dim - rotary_dim) / 8;
    h.lanes = 1;
    while (h.lanes < h.units) h.lanes *= 2;
    return h;
  }
  __host__ __device__ bool has_pair(int unit) const { return unit < pairs; }
  __host__ __device__ int column(int unit) const {
    return unit < pairs ? unit * 8 : 2 * half + (unit - pairs) * 8;
  }
};

// The cosines and sines of a lane's columns.
struct Angles {
  float cosine[8], sine[8];

  // row: of the rotary table, rotary_dim floats.
  __device__ __forceinline__ void load(const float* row, const HeadUnits& h, int unit) {
    float4 c[2] = {}, s[2] = {};
    if (h.has_pair(unit)) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        c[i] = *reinterpret_cast<const float4*>(row + unit * 8 + i * 4);
        s[i] = *reinterpret_cast<const float4*>(row + h.half + unit * 8 + i * 4);
      }
    }
    set(c, s);
  }

  // Of pairs of neighbours: four in the lane's low columns, four in the high ones.
  __device__ __forceinline__ void load_interleaved(const float* row, const HeadUnits& h, int unit) {
    float4 c[2] = {}, s[2] = {};
    if (h.has_pair(unit)) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        c[i] = *reinterpret_cast<const float4*>(row + unit * 4 + i * (h.half / 2));
        s[i] = *reinterpret_cast<const float4*>(row + h.half + unit * 4 + i * (h.half / 2));
      }
    }
    set(c, s);
  }

  __device__ __forceinline__ void set(const float4 (&c)[2], const float4 (&s)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      cosine[4 * i] = c[i].x, cosine[4 * i + 1] = c[i].y;
      cosine[4 * i + 2] = c[i].z, cosine[4 * i + 3] = c[i].w;
      sine[4 * i] = s[i].x, sine[4 * i + 1] = s[i].y;
      sine[4 * i + 2] = s[i].z, sine[4 * i + 3] = s[i].w;
    }
  }
};

// Eight values as floats, and back.
template <class T>
__device__ __forceinline__ void to_floats(const uint4& raw, float (&x)[8]) {
  using Pair = typename Traits<T>::Pair;
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = Traits<T>::to_float2(bit_cast<Pair>(words[i]));
    x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
  }
}

template <class T>
__device__ __forceinline__ uint4 from_floats(const float (&x)[8]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = bit_cast<uint32_t>(Traits<T>::from_float2(make_float2(x[2 * i], x[2 * i + 1])));
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// p is aligned to 16 bytes.
template <class T>
__device__ __forceinline__ void load8(const T* p, float (&x)[8]) {
  if constexpr (sizeof(T) == 4) {
    const float4 a = *reinterpret_cast<const float4*>(p);
    const float4 b = *reinterpret_cast<const float4*>(p + 4);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
    x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
  } else {
    to_floats<T>(*reinterpret_cast<const uint4*>(p), x);
  }
}

template <class T>
__device__ __forceinline__ void store8(T* p, const float (&x)[8]) {
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float4*>(p) = make_float4(x[0], x[1], x[2], x[3]);
    *reinterpret_cast<float4*>(p + 4) = make_float4(x[4], x[5], x[6], x[7]);
  } else {
    *reinterpret_cast<uint4*>(p) = from_floats<T>(x);
  }
}

__device__ __forceinline__ float lanes_sum(float x, int lanes) {
  for (int o = lanes / 2; o > 0; o /= 2) x += __shfl_xor_sync(~0u, x, o);
  return x;
}

__device__ __forceinline__ float lanes_max(float x, int lanes) {
  for (int o = lanes / 2; o > 0; o /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, o));
  return x;
}

// A lane's columns of a head. Whole warps call these together; lanes without columns hold zeros.
struct HeadPart {
  float low[8], high[8];
  bool used, pair;

  template <class T>
  __device__ __forceinline__ void load(const T* head, const HeadUnits& h, int unit, bool active) {
    used = active && unit < h.units;
    pair = used && h.has_pair(unit);
#pragma unroll
    for (int e = 0; e < 8; ++e) low[e] = high[e] = 0.f;
    if (used) load8(head + h.column(unit), low);
    if (pair) load8(head + h.column(unit) + h.half, high);
  }

  // RMS norm over the head; weight null: nothing.
  template <class T>
  __device__ __forceinline__ void normalise(const T* weight, const HeadUnits& h, int unit,
                                            int head_dim, float epsilon, bool plus_one = false) {
    const float sum = lanes_sum(squares(), h.lanes);
    if (weight != nullptr) multiply(weight, h, unit, rsqrtf(sum / head_dim + epsilon), plus_one);
  }

  // By scale and weight, or 1 + weight.
  template <class T>
  __device__ __forceinline__ void multiply(const T* weight, const HeadUnits& h, int unit,
                                           float scale, bool plus_one = false) {
    float w[8];
    if (used) {
      load8(weight + h.column(unit), w);
#pragma unroll
      for (int e = 0; e < 8; ++e) low[e] *= scale * (plus_one ? 1.f + w[e] : w[e]);
    }
    if (pair) {
      load8(weight + h.column(unit) + h.half, w);
#pragma unroll
      for (int e = 0; e < 8; ++e) high[e] *= scale * (plus_one ? 1.f + w[e] : w[e]);
    }
  }

  // Over the lane's columns.
  __device__ __forceinline__ float squares() const {
    float sum = 0.f;
#pragma unroll
    for (int e = 0; e < 8; ++e) sum = fmaf(low[e], low[e], fmaf(high[e], high[e], sum));
    return sum;
  }

  __device__ __forceinline__ void rotate(const Angles& a) {
    if (!pair) return;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float x = low[e], y = high[e];
      low[e] = x * a.cosine[e] - y * a.sine[e];
      high[e] = y * a.cosine[e] + x * a.sine[e];
    }
  }

  // Pairs of neighbours, by angles loaded for them.
  __device__ __forceinline__ void rotate_interleaved(const Angles& a) {
    if (!pair) return;
    auto turn = [](float (&x)[8], int i, float cosine, float sine) {
      const float first = x[2 * i], second = x[2 * i + 1];
      // Spelled out, so that all kernels round alike.
      x[2 * i] = fmaf(first, cosine, -__fmul_rn(second, sine));
      x[2 * i + 1] = fmaf(second, cosine, __fmul_rn(first, sine));
    };
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      turn(low, i, a.cosine[i], a.sine[i]);
      turn(high, i, a.cosine[4 + i], a.sine[4 + i]);
    }
  }

  __device__ __forceinline__ float largest(int lanes) const {
    float top = 0.f;
#pragma unroll
    for (int e = 0; e < 8; ++e) top = fmaxf(top, fmaxf(fabsf(low[e]), fabsf(high[e])));
    return lanes_max(top, lanes);
  }

  __device__ __forceinline__ void extent(int lanes, float* least, float* most) const {
    float a = INFINITY, b = -INFINITY;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (used) a = fminf(a, low[e]), b = fmaxf(b, low[e]);
      if (pair) a = fminf(a, high[e]), b = fmaxf(b, high[e]);
    }
    *least = -lanes_max(-a, lanes);
    *most = lanes_max(b, lanes);
  }
};

// Codes of eight values, and what a format needs to make them: code = round((x - offset) * factor).
struct RowScale {
  float factor = 1.f, offset = 0.f;
  float2 stored = make_float2(0.f, 0.f);  // what goes into the scale tensor: scale, minimum
};

// least, most: of the row. given: the head's scale, for formats that have one.
__device__ __forceinline__ RowScale row_scale_of(KvFormat format, float least, float most,
                                                 float given) {
  RowScale r;
  if (format == KvFormat::kInt8Dynamic) {
    const float top = fmaxf(fmaxf(-least, most), kLeastKvRange);
    r.factor = 127.f / top;
    r.stored.x = top / 127.f;
  } else if (format == KvFormat::kInt4) {
    const float range = fmaxf(most - least, kLeastKvRange);
    r.factor = 15.f / range;
    r.offset = least;
    r.stored = make_float2(range / 15.f, least);
  } else if (format != KvFormat::kDense) {
    r.factor = 1.f / given;
  }
  return r;
}

// Whole warps call it together.
__device__ __forceinline__ RowScale row_scale(KvFormat format, const HeadPart& x, int lanes,
                                              float given) {
  float least = 0.f, most = 0.f;
  if (has_token_scales(format)) x.extent(lanes, &least, &most);
  return row_scale_of(format, least, most, given);
}

__device__ __forceinline__ uint32_t e4m3_pair(float low, float high) {
  uint16_t codes = 0;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
#else
  wrong_architecture();
#endif
  return codes;
}

// 8 bytes (int8, fp8) or 4 (int4, in .x) of codes.
__device__ __forceinline__ uint2 codes_of(KvFormat format, const float (&x)[8], const RowScale& r) {
  uint32_t words[2] = {0, 0};
  if (format == KvFormat::kInt4) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float code = fminf(fmaxf(rintf((x[e] - r.offset) * r.factor), 0.f), 15.f);
      words[0] |= static_cast<uint32_t>(code) << (4 * e);
    }
  } else if (format == KvFormat::kFp8) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i / 2] |= e4m3_pair(x[2 * i] * r.factor, x[2 * i + 1] * r.factor) << (i % 2 * 16);
    }
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float code = fminf(fmaxf(rintf(x[e] * r.factor), -127.f), 127.f) + 128.f;
      words[e / 4] |= static_cast<uint32_t>(code) << (e % 4 * 8);
    }
  }
  return make_uint2(words[0], words[1]);
}

// Writes a lane's eight columns from `column` on into a row of the cache, global or shared.
template <class T>
__device__ __forceinline__ void store_columns(KvFormat format, void* row, int column,
                                              const float (&x)[8], const RowScale& r) {
  auto* const bytes = static_cast<uint8_t*>(row);
  if (format == KvFormat::kDense) {
    store8(static_cast<T*>(row) + column, x);
  } else if (format == KvFormat::kInt4) {
    *reinterpret_cast<uint32_t*>(bytes + column / 2) = codes_of(format, x, r).x;
  } else {
    *reinterpret_cast<uint2*>(bytes + column) = codes_of(format, x, r);
  }
}

}  // namespace regatta::cuda
