// Requests and their places in a paged cache, as attention takes them: what its checks and
// benchmarks share.
#pragma once

#include <numeric>

#include "buffers.cuh"
#include "regatta/cuda_ops.h"

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

// Spans over blocks in random order. Spans of up to 32 tokens have a random tree, too.
struct PagedBatch {
  int64_t num_tokens = 0, num_blocks = 3, max_blocks = 0;
  std::vector<int32_t> cu{0}, ctx, table;
  std::vector<uint8_t> used;   // [num_blocks * block_size]: whether a slot is
  std::vector<uint32_t> tree;  // [T], one word per token
  int32_t *d_cu, *d_ctx, *d_table;
  uint8_t* d_used;
  uint32_t* d_tree;
  cuda::AttentionLimits limits;

  // padding: tokens behind the last span.
  PagedBatch(const std::vector<Span>& spans, int block_size, int padding) {
    std::mt19937 rng(7);
    for (const Span& s : spans) {
      cu.push_back(cu.back() + s.num_tokens);
      ctx.push_back(s.context_len);
      const int64_t n = cuda::ceil_div(s.context_len, block_size);
      max_blocks = std::max(max_blocks, n);
      num_blocks += n;
      limits.max_query_len = std::max<int64_t>(limits.max_query_len, s.num_tokens);
      limits.max_context_len = std::max<int64_t>(limits.max_context_len, s.context_len);
    }
    max_blocks = std::max<int64_t>(max_blocks, 1) + 1;
    num_tokens = cu.back() + padding;
    std::vector<int> ids(num_blocks);
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), rng);
    used.assign(num_blocks * block_size, 0);
    table.assign(spans.size() * max_blocks, -1);
    int next = 0;
    for (size_t b = 0; b < spans.size(); ++b) {
      for (int p = 0; p < spans[b].context_len; ++p) {
        int32_t& id = table[b * max_blocks + p / block_size];
        if (id < 0) id = ids[next++];
        used[int64_t{id} * block_size + p % block_size] = 1;
      }
    }
    tree.assign(num_tokens + 1, 1);
    for (size_t b = 0; b < spans.size(); ++b) {
      for (int t = 0; t < std::min(spans[b].num_tokens, 32); ++t) {  // a parent's and itself
        tree[cu[b] + t] = 1u << t | (t > 0 && rng() % 4 ? tree[cu[b] + rng() % t] : 0u);
      }
    }
    put(cu, &d_cu), put(ctx, &d_ctx), put(table, &d_table), put(used, &d_used), put(tree, &d_tree);
  }
  PagedBatch(const PagedBatch&) = delete;
  ~PagedBatch() {
    for (void* p :
         {static_cast<void*>(d_cu), static_cast<void*>(d_ctx), static_cast<void*>(d_table),
          static_cast<void*>(d_used), static_cast<void*>(d_tree)}) {
      CHECK_CUDA(cudaFree(p));
    }
  }
  AttentionBatch view(bool trees) const {
    AttentionBatch b;
    b.cu_seqlens_q = d_cu;
    b.context_lens = d_ctx;
    b.block_tables = d_table;
    if (trees) b.tree_mask = reinterpret_cast<int32_t*>(d_tree), b.tree_words = 1;
    b.num_tokens = num_tokens;
    b.num_seqs = static_cast<int64_t>(ctx.size());
    b.max_blocks = max_blocks;
    return b;
  }

 private:
  template <class T>
  static void put(const std::vector<T>& from, T** to) {
    CHECK_CUDA(cudaMalloc(to, std::max<size_t>(from.size(), 1) * sizeof(T)));
    CHECK_CUDA(cudaMemcpy(*to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
};

}  // namespace regatta::native
