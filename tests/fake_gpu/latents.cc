// The launchers of cuda/attention/latent/latent.h as plain loops. See kernels.cc.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/attention/latent/latent.h"
#include "kernel.h"
#include "regatta/kv_format.h"
#include "rows.h"

namespace regatta::cuda {
namespace {

// The first `width` values of a row, normed.
template <class T>
std::vector<float> normed(const T* x, const void* weight, int64_t width, float epsilon) {
  std::vector<float> row(width);
  read_row(x, width, row.data());
  Norm norm;
  norm.epsilon = epsilon;
  norm_row<T>(norm, {weight, nullptr}, &row);
  return row;
}

void write_codes(const std::vector<float>& row, uint8_t* codes, float* scale) {
  float largest = kLeastKvRange;
  for (const float x : row) largest = std::max(largest, std::fabs(x));
  *scale = largest / kFp8Max;
  for (size_t i = 0; i < row.size(); ++i) codes[i] = to_e4m3(row[i] * (kFp8Max / largest));
}

// angles: size / 2 cosines, then as many sines.
template <class T>
void rotate(const T* x, const float* angles, int64_t size, bool interleaved, T* out) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; ++i) {
    const int64_t first = interleaved ? 2 * i : i, second = interleaved ? 2 * i + 1 : half + i;
    const float a = to_float(x[first]), b = to_float(x[second]);
    from_float(a * angles[i] - b * angles[half + i], out + first);
    from_float(b * angles[i] + a * angles[half + i], out + second);
  }
}

template <class T>
void write_token(const LatentWriteParams& p, int64_t token) {
  const int64_t last = p.num_positions - 1;
  const int64_t position = std::clamp<int64_t>(p.positions[token], 0, last);
  const float* const angles = p.rope_cache + position * p.rope_size;
  const T* const latent = static_cast<const T*>(p.latents) + token * p.latent_stride;
  if (const int64_t slot = p.slot_mapping[token]; slot >= 0) {
    T* tail = nullptr;
    if (p.scales == nullptr) {
      T* const to = static_cast<T*>(p.cache) + slot * (p.latent_rank + p.rope_size);
      write_row(normed<T>(latent, p.norm_weight, p.latent_rank, p.epsilon).data(), p.latent_rank,
                to);
      tail = to + p.latent_rank;
    } else {
      write_codes(normed<T>(latent, p.norm_weight, p.latent_rank, p.epsilon),
                  static_cast<uint8_t*>(p.cache) + slot * p.latent_rank, p.scales + slot);
      tail = static_cast<T*>(p.tail) + slot * p.rope_size;
    }
    rotate(latent + p.latent_rank, angles, p.rope_size, p.interleaved, tail);
  }
  for (int64_t h = 0; h < p.num_heads; ++h) {
    const int64_t row = h * p.num_tokens + token;
    const T* const q =
        static_cast<const T*>(p.q) + token * p.q_stride + h * (p.nope_size + p.rope_size);
    std::copy(q, q + p.nope_size, static_cast<T*>(p.q_nope) + row * p.nope_size);
    rotate(q + p.nope_size, angles, p.rope_size, p.interleaved,
           static_cast<T*>(p.q_rope) + row * p.rope_size);
  }
}

// A request's tokens of this step, and what they see.
struct Span {
  const AttentionBatch& batch;
  int64_t seq;
  int64_t start = batch.cu_seqlens_q[seq];
  int64_t length = batch.cu_seqlens_q[seq + 1] - start;
  int64_t context = batch.context_lens[seq];

  bool sees(int64_t token, int64_t position) const {
    const int64_t other = position - (context - length);
    if (other < 0) return true;
    if (batch.tree_mask == nullptr || length > 32 * batch.tree_words) return other <= token;
    const int32_t* const words = batch.tree_mask + (start + token) * batch.tree_words;
    return static_cast<uint32_t>(words[other / 32]) >> other % 32 & 1;
  }
};

// The latents of a request: [context, L + R].
template <class T>
std::vector<float> latents_of(const LatentAttentionParams& p, const Span& span) {
  const int64_t size = p.latent_rank + p.rope_size;
  const int32_t* const table = p.batch.block_tables + span.seq * p.batch.max_blocks;
  std::vector<float> latents(span.context * size);
  for (int64_t at = 0; at < span.context; ++at) {
    const int64_t slot = table[at / p.block_size] * p.block_size + at % p.block_size;
    float* const to = latents.data() + at * size;
    if (p.scales == nullptr) {
      read_row(static_cast<const T*>(p.cache) + slot * size, size, to);
      continue;
    }
    const uint8_t* const codes = static_cast<const uint8_t*>(p.cache) + slot * p.latent_rank;
    for (int64_t i = 0; i < p.latent_rank; ++i) to[i] = from_e4m3(codes[i]) * p.scales[slot];
    read_row(static_cast<const T*>(p.tail) + slot * p.rope_size, p.rope_size, to + p.latent_rank);
  }
  return latents;
}

// One query of one head: row `row` of q_latent, q_rope and out.
template <class T>
void attend(const LatentAttentionParams& p, const Span& span, const std::vector<float>& latents,
            int64_t token, int64_t row) {
  const int64_t rank = p.latent_rank, size = rank + p.rope_size;
  std::vector<float> query(size), out(rank), scores(span.context, -INFINITY);
  read_row(static_cast<const T*>(p.q_latent) + row * rank, rank, query.data());
  read_row(static_cast<const T*>(p.q_rope) + row * p.rope_size, p.rope_size, query.data() + rank);
  float largest = -INFINITY, sum = 0.f;
  for (int64_t at = 0; at < span.context; ++at) {
    if (!span.sees(token, at)) continue;
    scores[at] = p.softmax_scale * dot(query.data(), latents.data() + at * size, size);
    largest = std::max(largest, scores[at]);
  }
  for (int64_t at = 0; at < span.context; ++at) {
    if (!span.sees(token, at)) continue;
    const float weight = std::exp(scores[at] - largest);
    sum += weight;
    for (int64_t i = 0; i < rank; ++i) out[i] += weight * latents[at * size + i];
  }
  for (float& x : out) x = sum == 0.f ? 0.f : x / sum;
  write_row(out.data(), rank, static_cast<T*>(p.out) + row * rank);
}

Status check_limits(const Span& span, const AttentionLimits& limits) {
  if (span.length <= limits.max_query_len && span.context <= limits.max_context_len) return {};
  return Status::error("latent_attention: request " + std::to_string(span.seq) + " has " +
                       std::to_string(span.length) + " tokens in a context of " +
                       std::to_string(span.context) + ", launched for " +
                       std::to_string(limits.max_query_len) + " and " +
                       std::to_string(limits.max_context_len));
}

}  // namespace

Status norm_columns(const NormColumnsParams& params, const Launch& on) {
  return queue(on.stream, "norm_columns", [p = params] {
    return dispatch(p.dtype, "norm_columns", [&](auto* like) {
      using T = ElementOf<decltype(like)>;
      for (int64_t m = 0; m < p.num_rows; ++m) {
        const T* const x = static_cast<const T*>(p.x) + m * p.stride;
        write_row(normed<T>(x, p.weight, p.width, p.epsilon).data(), p.width,
                  static_cast<T*>(p.out) + m * p.width);
      }
      return Status();
    });
  });
}

Status latent_write(const LatentWriteParams& params, const Launch& on) {
  return queue(on.stream, "latent_write", [p = params] {
    return dispatch(p.dtype, "latent_write", [&](auto* like) {
      for (int64_t h = 0; h < p.num_heads; ++h) {
        p.head_ends[h] = static_cast<int32_t>((h + 1) * p.num_tokens);
      }
      for (int64_t t = 0; t < p.num_tokens; ++t) write_token<ElementOf<decltype(like)>>(p, t);
      return Status();
    });
  });
}

int64_t latent_attention_workspace_bytes(const LatentAttentionParams&, const AttentionLimits&) {
  return 0;
}

Status latent_attention(const LatentAttentionParams& params, const AttentionLimits& limits, void*,
                        const Launch& on) {
  if (params.batch.prefix_lens != nullptr) {
    return Status::error("latent_attention: prefix_lens are given");
  }
  return queue(on.stream, "latent_attention", [p = params, limits] {
    return dispatch(p.dtype, "latent_attention", [&](auto* like) {
      using T = ElementOf<decltype(like)>;
      for (int64_t seq = 0; seq < p.batch.num_seqs; ++seq) {
        const Span span{p.batch, seq};
        const Status status = check_limits(span, limits);
        if (!status.ok()) return status;
        if (span.length == 0) continue;
        const std::vector<float> latents = latents_of<T>(p, span);
        for (int64_t i = 0; i < p.num_heads * span.length; ++i) {
          const int64_t token = i % span.length;
          const int64_t row = i / span.length * p.batch.num_tokens + span.start + token;
          attend<T>(p, span, latents, token, row);
        }
      }
      return Status();
    });
  });
}

Status heads_to_rows(const void* x, void* out, int64_t num_tokens, int64_t num_heads, int64_t width,
                     DType dtype, const Launch& on) {
  return queue(on.stream, "heads_to_rows", [=] {
    const int64_t bytes = width * dtype_size(dtype);
    for (int64_t row = 0; row < num_heads * num_tokens; ++row) {
      const int64_t place = row % num_tokens * num_heads + row / num_tokens;
      std::memcpy(static_cast<char*>(out) + place * bytes,
                  static_cast<const char*>(x) + row * bytes, bytes);
    }
    return Status();
  });
}

}  // namespace regatta::cuda
