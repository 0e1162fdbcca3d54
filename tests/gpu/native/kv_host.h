// Elements of a cache in any KV format, read on the host.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "buffers.cuh"
#include "regatta/kv_format.h"

namespace regatta::native {

// Column d of a row (token of a head) of a cache; T is the activations' type. *step: the distance
// of neighbouring codes there, 0 for dense caches.
template <class T>
float cache_element(KvFormat format, const uint8_t* cache, const float* scales, int64_t row,
                    int kv_head, int d, int dim, double* step = nullptr) {
  const int64_t row_bytes = kv_row_bytes(format, dim, sizeof(T));
  const uint8_t* const bytes = cache + row * row_bytes;
  if (step != nullptr) *step = 0;
  if (format == KvFormat::kDense) return host_float(reinterpret_cast<const T*>(bytes)[d]);
  float scale = 1.f, offset = 0.f, code;
  if (format == KvFormat::kInt4) {
    code = bytes[d / 2] >> (d % 2 * 4) & 15;
    scale = scales[row * 2], offset = scales[row * 2 + 1];
  } else if (format == KvFormat::kFp8) {
    __nv_fp8_e4m3 x;
    x.__x = bytes[d];
    code = static_cast<float>(x);
    scale = scales[kv_head];
  } else {
    code = static_cast<float>(bytes[d]) - 128.f;
    scale = format == KvFormat::kInt8Dynamic ? scales[row] : scales[kv_head];
  }
  if (step != nullptr) {
    *step = scale;
    if (format == KvFormat::kFp8) *step *= std::max(std::abs(code) / 8.f, 1.f / 512);
  }
  return code * scale + offset;
}

}  // namespace regatta::native
