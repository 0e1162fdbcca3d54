// A batch of attention as paged_attention() takes it: random queries and a random cache in any
// format, whose unused slots hold NaN, as does the output.
#pragma once

#include <numeric>

#include "buffers.cuh"
#include "regatta/cuda_ops.h"
#include "regatta/kv_format.h"

namespace regatta::native {

__device__ __host__ inline uint32_t mix(uint64_t x) {
  x ^= x >> 33, x *= 0xff51afd7ed558ccdull, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ull, x ^= x >> 33;
  return static_cast<uint32_t>(x);
}

// Roughly normal, unit variance.
template <class T>
__global__ void fill_random(T* p, int64_t n, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    const uint32_t a = mix(seed * 0x9e3779b97f4a7c15ull + i),
                   b = mix(~seed * 0x9e3779b97f4a7c15ull + i);
    const float x = (a & 0xffff) + (a >> 16) + (b & 0xffff) + (b >> 16);
    p[i] = cuda::Traits<T>::from_float((x / 65536.f - 2.f) * 1.7320508f);
  }
}

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

// Rows of unused slots become 0xff, NaN in every float type.
static __global__ void poison(uint8_t* cache, const uint8_t* used, int64_t num_rows, int heads,
                              int block_size, int row_bytes) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < num_rows * row_bytes;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t row = i / row_bytes, block = row / (int64_t{heads} * block_size);
    if (!used[block * block_size + row % block_size]) cache[i] = 0xff;
  }
}

struct Span {
  int num_tokens, context_len;
};

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
struct Setup {
  Case c;
  DType dtype = cuda::Traits<T>::dtype;
  int layers;
  int64_t num_tokens = 0, num_blocks = 0, max_blocks = 0;
  int64_t cache_rows = 0, cache_bytes = 0, scale_count = 0;  // of a layer's keys
  std::vector<int32_t> cu{0}, ctx, table;
  std::vector<uint32_t> tree;  // [T], one word per token
  uint32_t* d_tree;
  T *q, *out;
  uint8_t *k, *v;
  float *k_scale, *v_scale;
  int32_t *d_cu, *d_ctx, *d_table;
  std::vector<float> slopes, sinks;  // [heads]
  float *d_slopes, *d_sinks;
  void* workspace;
  int64_t workspace_bytes;
  cuda::AttentionLimits limits;

  Setup(const Case& which, int num_layers = 1) : c(which), layers(num_layers) {
    std::mt19937 rng(7);
    int64_t blocks = 3;
    for (const Span& s : c.spans) {
      cu.push_back(cu.back() + s.num_tokens);
      ctx.push_back(s.context_len);
      const int64_t n = cuda::ceil_div(s.context_len, c.block_size);
      max_blocks = std::max(max_blocks, n);
      blocks += n;
      limits.max_query_len = std::max<int64_t>(limits.max_query_len, s.num_tokens);
      limits.max_context_len = std::max<int64_t>(limits.max_context_len, s.context_len);
    }
    max_blocks = std::max<int64_t>(max_blocks, 1) + 1;
    num_blocks = blocks;
    num_tokens = cu.back() + c.padding;
    std::vector<int> ids(num_blocks);
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), rng);
    std::vector<uint8_t> used(num_blocks * c.block_size, 0);
    table.assign(c.spans.size() * max_blocks, -1);
    int next = 0;
    for (size_t b = 0; b < c.spans.size(); ++b) {
      for (int p = 0; p < c.spans[b].context_len; ++p) {
        int32_t& id = table[b * max_blocks + p / c.block_size];
        if (id < 0) id = ids[next++];
        used[int64_t{id} * c.block_size + p % c.block_size] = 1;
      }
    }
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
    tree.assign(num_tokens + 1, 1);
    for (size_t b = 0; b < c.spans.size(); ++b) {
      for (int t = 0; t < std::min(c.spans[b].num_tokens, 32);
           ++t) {  // a parent's ancestors and itself
        tree[cu[b] + t] = 1u << t | (t > 0 && rng() % 4 ? tree[cu[b] + rng() % t] : 0u);
      }
    }
    CHECK_CUDA(cudaMalloc(&d_tree, tree.size() * 4));
    CHECK_CUDA(cudaMemcpy(d_tree, tree.data(), tree.size() * 4, cudaMemcpyHostToDevice));
    for (int h = 0; h < c.heads; ++h) slopes.push_back(std::exp2(-8.f * (h + 1) / c.heads));
    CHECK_CUDA(cudaMalloc(&d_slopes, slopes.size() * 4));
    CHECK_CUDA(cudaMemcpy(d_slopes, slopes.data(), slopes.size() * 4, cudaMemcpyHostToDevice));
    for (int h = 0; h < c.heads; ++h) {
      const float high = std::fmod(0.5f + 4.1f * h, 11.f);  // as the sum of 1 to some 10000 keys
      sinks.push_back(h % 8 == 3 ? -1e4f : h % 8 == 5 ? 1e4f : h % 8 == 6 ? high + 30.f : high);
    }
    CHECK_CUDA(cudaMalloc(&d_sinks, sinks.size() * 4));
    CHECK_CUDA(cudaMemcpy(d_sinks, sinks.data(), sinks.size() * 4, cudaMemcpyHostToDevice));
    CHECK_CUDA(cudaMalloc(&d_cu, cu.size() * 4));
    CHECK_CUDA(cudaMalloc(&d_ctx, ctx.size() * 4));
    CHECK_CUDA(cudaMalloc(&d_table, table.size() * 4));
    uint8_t* d_used;
    CHECK_CUDA(cudaMalloc(&d_used, used.size()));
    CHECK_CUDA(cudaMemcpy(d_used, used.data(), used.size(), cudaMemcpyHostToDevice));
    CHECK_CUDA(cudaMemcpy(d_cu, cu.data(), cu.size() * 4, cudaMemcpyHostToDevice));
    CHECK_CUDA(cudaMemcpy(d_ctx, ctx.data(), ctx.size() * 4, cudaMemcpyHostToDevice));
    CHECK_CUDA(cudaMemcpy(d_table, table.data(), table.size() * 4, cudaMemcpyHostToDevice));
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
    CHECK_CUDA(cudaFree(d_used));
  }
  ~Setup() {
    for (void* p : {static_cast<void*>(q), static_cast<void*>(k), static_cast<void*>(v),
                    static_cast<void*>(k_scale), static_cast<void*>(v_scale),
                    static_cast<void*>(d_tree), static_cast<void*>(d_slopes),
                    static_cast<void*>(d_sinks), static_cast<void*>(out), static_cast<void*>(d_cu),
                    static_cast<void*>(d_ctx), static_cast<void*>(d_table), workspace}) {
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
    p.batch.cu_seqlens_q = d_cu;
    p.batch.context_lens = d_ctx;
    p.batch.block_tables = d_table;
    if (c.tree) p.batch.tree_mask = reinterpret_cast<int32_t*>(d_tree), p.batch.tree_words = 1;
    p.batch.num_tokens = num_tokens;
    p.batch.num_seqs = static_cast<int64_t>(c.spans.size());
    p.batch.max_blocks = max_blocks;
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
