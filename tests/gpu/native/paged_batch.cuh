// Requests and their places in a paged cache, as attention takes them: what its checks and
// benchmarks share.
#pragma once

#include "native.cuh"
#include "regatta/cuda_ops.h"
#include "regatta/kv_format.h"

namespace regatta::native {

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

// Where the tokens of spans lie in blocks of random order. Spans of up to 32 tokens have a random
// tree, too.
struct PagedLayout {
  int64_t num_tokens = 0, num_blocks = 3, max_blocks = 0, block_size;
  std::vector<int32_t> cu{0}, ctx, table;
  std::vector<uint8_t> used;   // [num_blocks * block_size]: whether a slot is
  std::vector<uint32_t> tree;  // [T], one word per token
  cuda::AttentionLimits limits;

  // padding: tokens behind the last span. most_context: of the limits, where it is more than the
  // longest one: a graph's.
  PagedLayout(const std::vector<Span>& spans, int size, int padding, int64_t most_context)
      : block_size(size) {
    std::mt19937 rng(7);
    limits.max_context_len = most_context;
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
  }
  int32_t slot(size_t span, int64_t position) const {
    return static_cast<int32_t>(table[span * max_blocks + position / block_size] * block_size +
                                position % block_size);
  }
};

// The same on the device.
struct PagedBatch : PagedLayout {
  Buffer<int32_t> d_cu, d_ctx, d_table;
  Buffer<uint8_t> d_used;
  Buffer<uint32_t> d_tree;

  PagedBatch(const std::vector<Span>& spans, int size, int padding, int64_t most_context)
      : PagedLayout(spans, size, padding, most_context),
        d_cu(cu),
        d_ctx(ctx),
        d_table(table),
        d_used(used),
        d_tree(tree) {}
  AttentionBatch view(bool trees) const {
    AttentionBatch b;
    b.cu_seqlens_q = d_cu.data;
    b.context_lens = d_ctx.data;
    b.block_tables = d_table.data;
    if (trees) b.tree_mask = reinterpret_cast<int32_t*>(d_tree.data), b.tree_words = 1;
    b.num_tokens = num_tokens;
    b.num_seqs = static_cast<int64_t>(ctx.size());
    b.max_blocks = max_blocks;
    return b;
  }
};

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
    code = host_float(bytes[d]);
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
