// The launchers of cuda/attention/latent/latent.h and expanded.h as plain loops. See kernels.cc.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/attention/latent/expanded.h"
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

// copies: the queries' first values, too.
template <class T>
void write_token(const LatentWriteParams& p, int64_t token, bool copies) {
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
    if (copies) std::copy(q, q + p.nope_size, static_cast<T*>(p.q_nope) + row * p.nope_size);
    rotate(q + p.nope_size, angles, p.rope_size, p.interleaved,
           static_cast<T*>(p.q_rope) + row * p.rope_size);
  }
}

template <class T>
void multiply_heads(const HeadProductParams& p) {
  std::vector<float> x(p.in_features), row(p.in_features);
  for (int64_t head = 0; head < p.num_heads; ++head) {
    for (int64_t token = 0; token < p.num_tokens; ++token) {
      read_row(static_cast<const T*>(p.x) + token * p.x_token_stride + head * p.x_head_stride,
               p.in_features, x.data());
      T* const out = static_cast<T*>(p.out) + token * p.out_token_stride + head * p.out_head_stride;
      for (int64_t i = 0; i < p.out_features; ++i) {
        const int64_t at = (head * p.out_features + i) * p.in_features;
        read_row(static_cast<const T*>(p.weight) + at, p.in_features, row.data());
        from_float(dot(x.data(), row.data(), p.in_features), out + i);
      }
    }
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

// The latents of a request: [context, L + R]. Params have a cache and a batch.
template <class T, class Params>
std::vector<float> latents_of(const Params& p, const Span& span) {
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
  if (span.context <= limits.max_context_len) return {};
  return Status::error("latent_attention: request " + std::to_string(span.seq) + " has a context " +
                       "of " + std::to_string(span.context) + " tokens, launched for " +
                       std::to_string(limits.max_context_len));
}

// A long span's token of one head among those that are expanded.
template <class T>
void attend_expanded(const ExpandedAttentionParams& p, const Span& span, int64_t token,
                     int64_t head) {
  const LatentSizes& sizes = p.sizes;
  const int64_t own = sizes.nope_size, turned = sizes.rope_size, wide = sizes.value_size;
  const int64_t row = (p.first_head + head) * p.batch.num_tokens + span.start + token;
  std::vector<float> query(own + turned), key(own + turned), value(wide), out(wide);
  read_row(static_cast<const T*>(p.q_nope) + row * own, own, query.data());
  read_row(static_cast<const T*>(p.q_rope) + row * turned, turned, query.data() + own);
  const int64_t visible = span.context - span.length + token + 1, width = own + turned;
  std::vector<float> scores(visible);
  float largest = -INFINITY, sum = 0.f;
  for (int64_t at = 0; at < visible; ++at) {
    const int64_t from = p.first_rows[span.seq] + at;
    const int64_t place = from * p.num_expanded_heads + head;
    read_row(static_cast<const T*>(p.keys) + place * own, own, key.data());
    read_row(static_cast<const T*>(p.rope) + from * turned, turned, key.data() + own);
    scores[at] = p.softmax_scale * dot(query.data(), key.data(), width);
    largest = std::max(largest, scores[at]);
  }
  for (int64_t at = 0; at < visible; ++at) {
    const float weight = std::exp(scores[at] - largest);
    sum += weight;
    const int64_t place = (p.first_rows[span.seq] + at) * p.num_expanded_heads + head;
    read_row(static_cast<const T*>(p.values) + place * wide, wide, value.data());
    for (int64_t i = 0; i < wide; ++i) out[i] += weight * value[i];
  }
  for (float& x : out) x /= sum;
  const int64_t to = (span.start + token) * p.num_heads + p.first_head + head;
  write_row(out.data(), wide, static_cast<T*>(p.out) + to * wide);
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
      for (int64_t t = 0; t < p.num_tokens; ++t) {
        write_token<ElementOf<decltype(like)>>(p, t, true);
      }
      return Status();
    });
  });
}

bool takes_head_product(const HeadProductParams& p) {
  return p.dtype != DType::kFloat32 && p.in_features % 8 == 0;
}

bool takes_queries(const LatentWriteParams&, const HeadProductParams& product) {
  return takes_head_product(product);
}

Status head_product(const HeadProductParams& params, const Launch& on) {
  return queue(on.stream, "head_product", [p = params] {
    return dispatch(p.dtype, "head_product", [&](auto* like) {
      multiply_heads<ElementOf<decltype(like)>>(p);
      return Status();
    });
  });
}

Status latent_write_and_queries(const LatentWriteParams& write, const HeadProductParams& product,
                                const Launch& on) {
  return queue(on.stream, "latent_write_and_queries", [w = write, p = product] {
    return dispatch(p.dtype, "latent_write_and_queries", [&](auto* like) {
      using T = ElementOf<decltype(like)>;
      for (int64_t t = 0; t < w.num_tokens; ++t) write_token<T>(w, t, false);
      multiply_heads<T>(p);
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
        if (span.length == 0 || span.length > limits.max_query_len) continue;
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

Status heads_to_rows(const HeadsToRowsParams& params, const Launch& on) {
  return queue(on.stream, "heads_to_rows", [p = params] {
    const int64_t bytes = p.width * dtype_size(p.dtype);
    const auto stays = [&](int64_t token) {
      if (p.cu_seqlens_q == nullptr) return false;
      const int32_t* const borders = p.cu_seqlens_q;
      const int64_t seq = std::upper_bound(borders, borders + p.num_seqs + 1, token) - borders - 1;
      return seq < p.num_seqs && borders[seq + 1] - borders[seq] > p.max_span_len;
    };
    for (int64_t row = 0; row < p.num_heads * p.num_tokens; ++row) {
      const int64_t token = row % p.num_tokens;
      if (stays(token)) continue;
      const int64_t place = token * p.num_heads + row / p.num_tokens;
      std::memcpy(static_cast<char*>(p.out) + place * bytes,
                  static_cast<const char*>(p.x) + row * bytes, bytes);
    }
    return Status();
  });
}

// Of any sizes: those of a kernel are tests/gpu's.
bool expands_latents(const LatentSizes&, DType) { return true; }

Status gather_latents(const GatherLatentsParams& params, const Launch& on) {
  return queue(on.stream, "gather_latents", [p = params] {
    return dispatch(p.dtype, "gather_latents", [&](auto* like) {
      using T = ElementOf<decltype(like)>;
      const int64_t rank = p.latent_rank, size = rank + p.rope_size;
      int64_t row = 0;
      for (int64_t seq = 0; seq < p.batch.num_seqs; ++seq) {
        const Span span{p.batch, seq};
        p.first_rows[seq] = static_cast<int32_t>(row);
        if (span.length <= p.max_short_len) continue;
        if (row + span.context > p.num_long_tokens) {
          return Status::error("gather_latents: long spans have more tokens than " +
                               std::to_string(p.num_long_tokens));
        }
        const std::vector<float> latents = latents_of<T>(p, span);
        for (int64_t at = 0; at < span.context; ++at, ++row) {
          const float* const from = latents.data() + at * size;
          write_row(from, rank, static_cast<T*>(p.latents) + row * rank);
          write_row(from + rank, p.rope_size, static_cast<T*>(p.rope) + row * p.rope_size);
        }
      }
      return Status();
    });
  });
}

int64_t expanded_attention_workspace_bytes(const LatentSizes&, const AttentionLimits&) { return 0; }

int64_t expanded_attention_zeroed_bytes() { return 0; }

Status expanded_attention(const ExpandedAttentionParams& params, const AttentionLimits& limits,
                          void*, const Launch& on) {
  return queue(on.stream, "expanded_attention", [p = params, limits] {
    return dispatch(p.dtype, "expanded_attention", [&](auto* like) {
      for (int64_t seq = 0; seq < p.batch.num_seqs; ++seq) {
        const Span span{p.batch, seq};
        if (span.length <= limits.max_short_len) continue;
        for (int64_t i = 0; i < p.num_expanded_heads * span.length; ++i) {
          attend_expanded<ElementOf<decltype(like)>>(p, span, i % span.length, i / span.length);
        }
      }
      return Status();
    });
  });
}

}  // namespace regatta::cuda
