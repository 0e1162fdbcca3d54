// A batch of attention over latents as latent_attention() takes it, with L = 512 and R = 64: random
// queries and a random cache, whose unused slots hold NaN, as does the output.
#pragma once

#include "cuda/attention/latent/latent.h"
#include "paged_batch.cuh"

namespace regatta::native {

constexpr int kLatentRank = 512, kLatentRope = 64, kLatentSize = kLatentRank + kLatentRope;

struct LatentCase {
  std::string name;
  std::vector<Span> spans;
  int heads, block_size = 64;
  bool tree = false;  // spans of up to 32 tokens are random trees
  int padding = 0;    // tokens behind the last span
};

// "": the one that the operator chooses.
inline void force_latent_kernel(const std::string& name) {
  setenv("REGATTA_KERNEL", name.empty() ? "" : ("latent_attention=" + name).c_str(), 1);
}

template <class T>
struct LatentSetup : PagedBatch {
  LatentCase c;
  int64_t num_rows, cache_values;  // num_rows: tokens by heads; cache_values: of a layer
  Buffer<T> q_latent, q_rope, out, cache;
  std::unique_ptr<Buffer<uint8_t>> workspace;  // of whichever kernel

  explicit LatentSetup(const LatentCase& which, int layers = 1)
      : PagedBatch(which.spans, which.block_size, which.padding),
        c(which),
        num_rows(num_tokens * which.heads),
        cache_values(num_blocks * which.block_size * kLatentSize),
        q_latent(num_rows * kLatentRank),
        q_rope(num_rows * kLatentRope),
        out(num_rows * kLatentRank),
        cache(layers * cache_values) {
    fill_random<<<1024, 256>>>(q_latent.data, q_latent.size, 1);
    fill_random<<<1024, 256>>>(q_rope.data, q_rope.size, 2);
    fill_random<<<1024, 256>>>(cache.data, cache.size, 3);
    for (int layer = 0; layer < layers; ++layer) {
      poison<<<1024, 256>>>(reinterpret_cast<uint8_t*>(cache.data + layer * cache_values), d_used,
                            num_blocks * c.block_size, 1, c.block_size, kLatentSize * sizeof(T));
    }
    int64_t bytes = 0;
    for (const char* kernel : {"", "sm80"}) {
      force_latent_kernel(kernel);
      bytes = std::max(bytes, cuda::latent_attention_workspace_bytes(params(0), limits));
    }
    workspace = std::make_unique<Buffer<uint8_t>>(bytes);
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  cuda::LatentAttentionParams params(int layer) const {
    cuda::LatentAttentionParams p;
    p.dtype = cuda::Traits<T>::dtype;
    p.q_latent = q_latent.data;
    p.q_rope = q_rope.data;
    p.cache = cache.data + layer * cache_values;
    p.num_blocks = num_blocks;
    p.block_size = c.block_size;
    p.batch = view(c.tree);
    p.out = out.data;
    p.num_heads = c.heads;
    p.latent_rank = kLatentRank;
    p.rope_size = kLatentRope;
    p.softmax_scale = 1.f / std::sqrt(static_cast<float>(kLatentSize));
    return p;
  }
  void run(int layer, cudaStream_t stream, bool pdl) const {
    CHECK_STATUS(cuda::latent_attention(params(layer), limits, workspace->data, {stream, pdl}));
  }
};

}  // namespace regatta::native
