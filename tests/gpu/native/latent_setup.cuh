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
  // Of the limits, where it is more than the longest one: a graph's.
  int most_context = 0;
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
    limits.max_context_len = std::max<int64_t>(limits.max_context_len, c.most_context);
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

// What stands around attention over latents in a block of a model.
struct LatentHeads {
  int heads, rank = kLatentRank, nope = 128, rope = kLatentRope, value = 128;
  bool interleaved = true, codes = false;
};

// A step of it, from what the products ahead made to the rows of the one behind. `layers`:
// matrices of so many.
template <class T>
struct LatentStep {
  LatentHeads h;
  int64_t num_tokens, stride, num_slots, num_positions = 97, pairs, matrix;
  Buffer<T> made, norm_weight, key_absorb, value_up;
  Buffer<float> angles;
  Buffer<int32_t> positions, slots, ends;
  // With a row more, that stays NaN.
  Buffer<T> q_nope, q_rope, q_latent, mixed, values, rows;

  LatentStep(const LatentHeads& heads, const std::vector<int32_t>& slot_mapping,
             int64_t cache_slots, int layers = 1)
      : h(heads),
        num_tokens(static_cast<int64_t>(slot_mapping.size())),
        stride(h.heads * (h.nope + h.rope) + h.rank + h.rope),
        num_slots(cache_slots),
        pairs(num_tokens * h.heads),
        matrix(int64_t{h.heads} * h.rank),
        made(num_tokens * stride),
        norm_weight(h.rank),
        key_absorb(layers * matrix * h.nope),
        value_up(layers * matrix * h.value),
        angles(num_positions * h.rope),
        positions(some_positions(num_tokens, num_positions)),
        slots(slot_mapping),
        ends(h.heads),
        q_nope((pairs + 1) * h.nope),
        q_rope((pairs + 1) * h.rope),
        q_latent((pairs + 1) * h.rank),
        mixed((pairs + 1) * h.rank),
        values((pairs + 1) * h.value),
        rows((pairs + 1) * h.value) {
    fill_random<<<1024, 256>>>(made.data, made.size, 11);
    fill_random<<<1, 256>>>(norm_weight.data, norm_weight.size, 12);
    fill_random<<<1024, 256>>>(key_absorb.data, key_absorb.size, 13);
    fill_random<<<1024, 256>>>(value_up.data, value_up.size, 14);
    fill_random<<<16, 256>>>(angles.data, angles.size, 15);
    fill_random<<<1024, 256>>>(mixed.data, pairs * h.rank, 16);
    CHECK_CUDA(cudaDeviceSynchronize());
  }

  // Some of them past the table.
  static std::vector<int32_t> some_positions(int64_t tokens, int64_t count) {
    std::vector<int32_t> made;
    for (int64_t t = 0; t < tokens; ++t) {
      made.push_back(static_cast<int32_t>((t * 31 + 5) % (count + 2)));
    }
    return made;
  }

  // cache: [slots, rank + rope], or codes and what goes with them.
  cuda::LatentWriteParams write(void* cache, T* tail = nullptr, float* scales = nullptr) const {
    cuda::LatentWriteParams p;
    p.dtype = cuda::Traits<T>::dtype;
    p.q = made.data;
    p.q_stride = p.latent_stride = stride;
    p.latents = made.data + h.heads * (h.nope + h.rope);
    p.norm_weight = norm_weight.data;
    p.rope_cache = angles.data;
    p.positions = positions.data;
    p.slot_mapping = slots.data;
    p.cache = cache;
    p.tail = tail;
    p.scales = scales;
    p.q_nope = q_nope.data;
    p.q_rope = q_rope.data;
    p.head_ends = ends.data;
    p.num_tokens = num_tokens;
    p.num_heads = h.heads;
    p.latent_rank = h.rank;
    p.rope_size = h.rope;
    p.nope_size = h.nope;
    p.num_positions = num_positions;
    p.epsilon = 1e-6f;
    p.interleaved = h.interleaved;
    return p;
  }

  cuda::HeadProductParams product(const void* weight, int64_t in, int64_t out) const {
    cuda::HeadProductParams p;
    p.dtype = cuda::Traits<T>::dtype;
    p.weight = weight;
    p.num_tokens = num_tokens;
    p.num_heads = h.heads;
    p.in_features = in;
    p.out_features = out;
    return p;
  }
  // made -> q_latent.
  cuda::HeadProductParams queries(int layer = 0) const {
    auto p = product(key_absorb.data + layer * matrix * h.nope, h.nope, h.rank);
    p.x = made.data;
    p.x_token_stride = stride;
    p.x_head_stride = h.nope + h.rope;
    p.out = q_latent.data;
    p.out_token_stride = h.rank;
    p.out_head_stride = num_tokens * h.rank;
    return p;
  }
  // x, which is as mixed -> rows.
  cuda::HeadProductParams outputs(const T* x, int layer = 0) const {
    auto p = product(value_up.data + layer * matrix * h.value, h.rank, h.value);
    p.x = x;
    p.x_token_stride = h.rank;
    p.x_head_stride = num_tokens * h.rank;
    p.out = rows.data;
    p.out_token_stride = h.heads * h.value;
    p.out_head_stride = h.value;
    return p;
  }
};

}  // namespace regatta::native
