// Rows of logits of many kinds, and buffers with a twin on the host.
#pragma once

#include <cstring>
#include <numeric>

#include "buffers.cuh"

namespace regatta::native {

inline std::mt19937 rng(11);

inline void must(const Status& status) {
  if (!status.ok()) {
    std::printf("%s\n", status.message().c_str());
    std::exit(1);
  }
}

template <class T>
T host_from(float x);
template <>
inline float host_from<float>(float x) {
  return x;
}
template <>
inline __nv_bfloat16 host_from<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
inline __half host_from<__half>(float x) {
  return __float2half_rn(x);
}

template <class T>
struct Twin {
  std::vector<T> host;
  T* device = nullptr;
  explicit Twin(size_t n) : host(n) {
    CHECK_CUDA(cudaMalloc(&device, std::max<size_t>(n, 1) * sizeof(T)));
    CHECK_CUDA(cudaMemset(device, 0xff, n * sizeof(T)));
  }
  ~Twin() { CHECK_CUDA(cudaFree(device)); }
  Twin(const Twin&) = delete;
  void upload() {
    CHECK_CUDA(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  void download() {
    CHECK_CUDA(cudaMemcpy(host.data(), device, host.size() * sizeof(T), cudaMemcpyDeviceToHost));
  }
  Twin& random(float scale = 1.f) {
    std::normal_distribution<float> normal(0.f, scale);
    for (T& x : host) x = host_from<T>(normal(rng));
    upload();
    return *this;
  }
};

struct Draw {
  float temperature;
  int top_k;
  float top_p, min_p, typical_p = 1;
};

enum Kind { kNormal, kPeaked, kFlat, kEqual, kCoarse, kFew };
constexpr const char* kKindNames[] = {"normal", "peaked", "flat", "equal", "coarse", "few"};

inline void fill_logits(std::vector<float>& x, int vocab, Kind kind) {
  std::normal_distribution<float> normal(0.f, 1.f);
  for (size_t i = 0; i < x.size(); ++i) {
    const float g = normal(rng);
    x[i] = kind == kNormal   ? 3 * g
           : kind == kPeaked ? g + (rng() % 50 == 0 ? 12 + 4 * g : 0)
           : kind == kFlat   ? 1e-3f * g
           : kind == kEqual  ? 1.5f
                             : std::round(2 * g);
    if (vocab > 100 && kind == kNormal && i % 97 == 5) x[i] = -INFINITY;
    if (kind == kFew) x[i] = i % 10 < 3 ? 2 * g : -INFINITY;
    if (vocab > 100 && kind == kPeaked && i % 101 == 7) x[i] = -3e38f;
  }
}

}  // namespace regatta::native
