// A batch of attention as paged_attention() takes it: random queries and a random cache in any
// format, whose unused slots hold NaN, as does the output.
#pragma once

#include "paged_batch.cuh"
#include "regatta/kv_format.h"

namespace regatta::native {

// Codes: any, but for e4m3's NaN.
static __global__ void fill_codes(uint8_t* p, int64_t n, uint64_t seed, bool e4m3) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    const uint8_t code = mix(seed * 0x9e3779b97f4a7c15ull + i);
    p[i] = e4m3 ? (code & 0x80) | (code & 0x7f) % 0x48 : code == 0 ? 1 : code;
  }
}

// Scales such that elements are about 1, different from row to row; minima that suit int4.
static __global__ void fill_scales(float* p, int64_t n, uint64_t seed, int floats, float unit) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    const float x = mix(seed * 0x9e3779b97f4a7c15ull + i) / 4294967296.f;
    p[i] = floats == 2 && i % 2 == 1 ? -1.7f + x * 0.4f : unit * (0.5f + x);
  }
}

struct Case {
  std::string name;
  std::vector<Span> spans;
  int heads, kv_heads, dim, block_size;
  int window = -1;
  int padding = 0;  // tokens behind the last span
  KvFormat format = KvFormat::kDense;
  bool tree = false;  // spans of up to 32 tokens are random trees
  float softcap = 0.f;
  bool slopes = false;  // each head has one
  bool sinks = false;   // alike: far below all scores, as high as their sum, above, far above
};

template <class T>
struct Setup : PagedBatch {
  Case c;
  DType dtype = cuda::Traits<T>::dtype;
  int layers;
  int64_t cache_rows = 0, cache_bytes = 0, scale_count = 0;  // of a layer's keys
  T *q, *out;
  uint8_t *k, *v;
  float *k_scale, *v_scale;
  std::vector<float> slopes, sinks;  // [heads]
  float *d_slopes, *d_sinks;
  void* workspace;
  int64_t workspace_bytes;

  Setup(const Case& which, int num_layers = 1)
      : PagedBatch(which.spans, which.block_size, which.padding), c(which), layers(num_layers) {
    const KvFormatInfo info = kv_format_info(c.format);
    const int64_t row_bytes = kv_row_bytes(c.format, c.dim, sizeof(T));
    cache_rows = num_blocks * c.kv_heads * c.block_size;
    cache_bytes = cache_rows * row_bytes;
    scale_count = info.scale_floats * (info.token_scales ? cache_rows : c.kv_heads);
    const int64_t q_elements = std::max<int64_t>(num_tokens, 1) * c.heads * c.dim;
    CHECK_CUDA(cudaMalloc(&q, q_elements * sizeof(T)));
    CHECK_CUDA(cudaMalloc(&out, q_elements * sizeof(T)));
    for (uint8_t** p : {&k, &v}) CHECK_CUDA(cudaMalloc(p, layers * cache_bytes));
    for (float** p : {&k_scale, &v_scale}) CHECK_CUDA(cudaMalloc(p, layers * scale_count * 4 + 16));
    for (int h = 0; h < c.heads; ++h) slopes.push_back(std::exp2(-8.f * (h + 1) / c.heads));
    CHECK_CUDA(cudaMalloc(&d_slopes, slopes.size() * 4));
    CHECK_CUDA(cudaMemcpy(d_slopes, slopes.data(), slopes.size() * 4, cudaMemcpyHostToDevice));
    for (int h = 0; h < c.heads; ++h) {
      const float high = std::fmod(0.5f + 4.1f * h, 11.f);  // as the sum of 1 to some 10000 keys
      sinks.push_back(h % 8 == 3 ? -1e4f : h % 8 == 5 ? 1e4f : h % 8 == 6 ? high + 30.f : high);
    }
    CHECK_CUDA(cudaMalloc(&d_sinks, sinks.size() * 4));
    CHECK_CUDA(cudaMemcpy(d_sinks, sinks.data(), sinks.size() * 4, cudaMemcpyHostToDevice));
    fill_random<<<1024, 256>>>(q, q_elements, 1);
    const bool dense = c.format == KvFormat::kDense;
    for (uint8_t* p : {k, v}) {
      const uint64_t seed = p == k ? 2 : 3;
      if (dense) {
        fill_random<<<1024, 256>>>(reinterpret_cast<T*>(p), layers * cache_bytes / sizeof(T), seed);
      } else {
        fill_codes<<<1024, 256>>>(p, layers * cache_bytes, seed, c.format == KvFormat::kFp8);
      }
    }
    const float unit = c.format == KvFormat::kInt4  ? 0.2f
                       : c.format == KvFormat::kFp8 ? 1.f
                                                    : 0.015f;
    for (float* p : {k_scale, v_scale}) {
      fill_scales<<<1024, 256>>>(p, layers * scale_count, p == k_scale ? 4 : 5, info.scale_floats,
                                 unit);
    }
    for (int layer = 0; layer < layers; ++layer) {
      for (uint8_t* p : {k, v}) {
        poison<<<1024, 256>>>(p + layer * cache_bytes, d_used, cache_rows, c.kv_heads, c.block_size,
                              static_cast<int>(row_bytes));
      }
      if (!info.token_scales) continue;
      for (float* p : {k_scale, v_scale}) {
        poison<<<1024, 256>>>(reinterpret_cast<uint8_t*>(p + layer * scale_count), d_used,
                              cache_rows, c.kv_heads, c.block_size, info.scale_floats * 4);
      }
    }
    CHECK_CUDA(cudaMemset(out, 0xff, q_elements * sizeof(T)));
    workspace_bytes = cuda::paged_attention_workspace_bytes(params(0), limits);
    CHECK_CUDA(cudaMalloc(&workspace, std::max<int64_t>(workspace_bytes, 1)));
    CHECK_CUDA(cudaMemset(workspace, 0, workspace_bytes));
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  ~Setup() {
    for (void* p :
         {static_cast<void*>(q), static_cast<void*>(k), static_cast<void*>(v),
          static_cast<void*>(k_scale), static_cast<void*>(v_scale), static_cast<void*>(d_slopes),
          static_cast<void*>(d_sinks), static_cast<void*>(out), workspace}) {
      CHECK_CUDA(cudaFree(p));
    }
  }
  PagedAttentionParams params(int layer) const {
    PagedAttentionParams p;
    p.dtype = dtype;
    p.q = q;
    p.cache.key = k + layer * cache_bytes;
    p.cache.value = v + layer * cache_bytes;
    p.cache.format = c.format;
    p.cache.key_scale = k_scale + layer * scale_count;
    p.cache.value_scale = v_scale + layer * scale_count;
    p.cache.num_blocks = num_blocks;
    p.cache.block_size = c.block_size;
    p.batch = view(c.tree);
    p.out = out;
    p.num_heads = c.heads;
    p.num_kv_heads = c.kv_heads;
    p.head_dim = c.dim;
    p.softmax_scale = 1.f / std::sqrt(static_cast<float>(c.dim));
    p.window = c.window;
    p.softcap = c.softcap;
    p.slopes = c.slopes ? d_slopes : nullptr;
    p.sinks = c.sinks ? d_sinks : nullptr;
    return p;
  }
  void run(int layer, cudaStream_t stream, bool pdl) const {
    const Status status =
        cuda::paged_attention(params(layer), limits, workspace, workspace_bytes, {stream, pdl});
    if (!status.ok()) {
      std::printf("%s: %s\n", c.name.c_str(), status.message().c_str());
      std::exit(1);
    }
  }
};

}  // namespace regatta::native
