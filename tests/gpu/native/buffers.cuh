// What programs that call kernels past the operators share: errors, buffers, random numbers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda/common.cuh"

#define CHECK_CUDA(x)                                                               \
  do {                                                                              \
    const cudaError_t error_ = (x);                                                 \
    if (error_ != cudaSuccess) {                                                    \
      printf("%s:%d %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(error_)); \
      exit(1);                                                                      \
    }                                                                               \
  } while (0)
#define CHECK_STATUS(x)                                                    \
  do {                                                                     \
    const regatta::Status status_ = (x);                                   \
    if (!status_.ok()) {                                                   \
      printf("%s:%d %s\n", __FILE__, __LINE__, status_.message().c_str()); \
      exit(1);                                                             \
    }                                                                      \
  } while (0)

namespace regatta::native {

// Device memory that begins as 0xff: NaN in every dtype.
template <class T>
struct Buffer {
  T* data = nullptr;
  int64_t size = 0;
  explicit Buffer(int64_t n) : size(n) {
    CHECK_CUDA(cudaMalloc(&data, std::max<int64_t>(n, 1) * sizeof(T)));
    CHECK_CUDA(cudaMemset(data, 0xff, std::max<int64_t>(n, 1) * sizeof(T)));
  }
  explicit Buffer(const std::vector<T>& v) : Buffer(static_cast<int64_t>(v.size())) {
    CHECK_CUDA(cudaMemcpy(data, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~Buffer() { cudaFree(data); }
  Buffer(const Buffer&) = delete;
  std::vector<T> host() const {
    std::vector<T> v(size);
    CHECK_CUDA(cudaMemcpy(v.data(), data, size * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
  }
};

struct Random {
  std::mt19937 engine;
  explicit Random(uint32_t seed) : engine(seed) {}
  float uniform() { return static_cast<float>(engine() >> 8) * (2.f / 16777216.f) - 1.f; }
  int below(int n) { return static_cast<int>(engine() % n); }
  std::vector<float> floats(int64_t n, float scale) {
    std::vector<float> v(n);
    for (float& x : v) x = uniform() * scale;
    return v;
  }
};

template <class T>
std::vector<T> rounded(std::vector<float>& v) {  // and v as it was rounded
  std::vector<T> r(v.size());
  for (size_t i = 0; i < v.size(); ++i) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      r[i] = __float2bfloat16_rn(v[i]);
      v[i] = __bfloat162float(r[i]);
    } else {
      r[i] = __float2half_rn(v[i]);
      v[i] = __half2float(r[i]);
    }
  }
  return r;
}

inline float host_float(__nv_bfloat16 x) { return __bfloat162float(x); }
inline float host_float(__half x) { return __half2float(x); }
inline float host_float(float x) { return x; }

}  // namespace regatta::native
