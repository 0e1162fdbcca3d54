// The launchers of regatta/cuda_ops.h and regatta/gemm.h over ordinary memory: each queues a plain
// loop, or the CPU library's operator where that has the same contract.
//
// To add one: queue() a lambda that holds the parameters by value. Like a kernel it may read what
// pointers point to only in there, since a graph runs it again. Params that point to host memory
// (CopyBlocksParams) are copied first.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cuda/norm/sum_norm.h"
#include "cuda/sampling/finish_logits.h"
#include "kernel.h"
#include "regatta/cuda_ops.h"
#include "rows.h"

namespace regatta::cuda {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

}  // namespace

// rows

Status gather_rows(const GatherRowsParams& params, const Launch& on) {
  return queue(on.stream, "gather_rows", [p = params] {
    const int64_t bytes = p.row_size * dtype_size(p.dtype);
    for (int64_t i = 0; i < p.num_rows; ++i) {
      const int64_t id = p.row_ids[i];
      char* out = static_cast<char*>(p.out) + i * bytes;
      if (id < 0 || id >= p.num_source_rows) {
        std::memset(out, 0, bytes);
      } else {
        std::memcpy(out, static_cast<const char*>(p.source) + id * bytes, bytes);
      }
    }
    return Status();
  });
}

Status count_up(int32_t* out, int64_t count, const Launch& on) {
  return queue(on.stream, "count_up", [=] {
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<int32_t>(i);
    return Status();
  });
}

Status embedding(const EmbeddingParams& params, const Launch& on) {
  if (params.packed) return Status::error("embedding: packed weights are a CPU layout");
  if (params.scale == 1.f && params.position_table == nullptr) {
    return gather_rows({params.token_ids, params.weight, params.out, params.num_tokens,
                        params.vocab_size, params.hidden_size, params.dtype},
                       on);
  }
  return queue(on.stream, "embedding", [p = params] {
    const int64_t bytes = p.hidden_size * dtype_size(p.dtype);
    const int32_t first = 0;
    for (int64_t i = 0; i < p.num_tokens; ++i) {  // the CPU refuses what is out of range
      const int64_t id = p.token_ids[i];
      const bool has_position = p.position_table != nullptr;
      const int64_t position = has_position ? p.positions[i] : -1;
      const std::vector<char> zeros(bytes);
      const bool has_row = position >= 0 && position < p.num_positions;
      EmbeddingParams row = p;
      row.token_ids = &first;
      row.weight = id >= 0 && id < p.vocab_size ? static_cast<const char*>(p.weight) + id * bytes
                                                : zeros.data();
      row.out = static_cast<char*>(p.out) + i * bytes;
      row.num_tokens = row.vocab_size = 1;
      row.position_table =
          has_row ? static_cast<const char*>(p.position_table) + position * bytes : nullptr;
      row.positions = &first;
      row.num_positions = has_row ? 1 : 0;
      const Status status = cpu::embedding(row);
      if (!status.ok()) return status;
    }
    return Status();
  });
}

namespace {

Status norm(NormParams p) {
  std::vector<char> sum;  // the CPU's writes it always
  if (p.residual_out == nullptr) {
    sum.resize(p.num_tokens * p.hidden_size * dtype_size(p.dtype));
    p.residual_out = sum.data();
  }
  std::vector<char> ones;
  if (p.weight == nullptr) {
    const int64_t size = dtype_size(p.dtype);
    ones.resize(p.hidden_size * size);
    const float one = 1.f;
    const uint16_t half = p.dtype == DType::kBFloat16 ? 0x3f80 : 0x3c00;
    for (int64_t i = 0; i < p.hidden_size; ++i) {
      std::memcpy(&ones[i * size], size == 4 ? static_cast<const void*>(&one) : &half, size);
    }
    p.weight = ones.data();
    p.plus_one = false;
  }
  return cpu::norm(p);
}

}  // namespace

Status norm(const NormParams& params, const Launch& on) {
  return queue(on.stream, "norm", [p = params] { return norm(p); });
}

Status norm_rows(const NormParams& params, const int32_t* row_ids, int64_t num_source_rows,
                 const Launch& on) {
  return queue(on.stream, "norm_rows", [=] {
    const int64_t bytes = params.hidden_size * dtype_size(params.dtype);
    for (int64_t i = 0; i < params.num_tokens; ++i) {
      NormParams row = params;
      row.num_tokens = 1;
      row.out = static_cast<char*>(params.out) + i * bytes;
      const bool there = row_ids[i] >= 0 && row_ids[i] < num_source_rows;
      std::memset(row.out, 0, bytes);
      row.x = there ? static_cast<const char*>(params.x) + row_ids[i] * bytes : row.out;
      const Status status = norm(row);
      if (!status.ok()) return status;
    }
    return Status();
  });
}

Status activate(const ActivateParams& params, const Launch& on) {
  return queue(on.stream, "activate", [p = params] { return cpu::activate(p); });
}

Status add(const AddParams& params, const Launch& on) {
  return queue(on.stream, "add", [p = params] { return cpu::add(p); });
}

namespace {

// What experts made of row `m`; see MadeOfParts.
template <class T>
void sum_parts(const MadeOfParts& parts, const T* made, int64_t m, std::vector<float>* row) {
  const auto width = static_cast<int64_t>(row->size());
  std::fill(row->begin(), row->end(), 0.f);
  for (int64_t j = m * parts.top_k; j < (m + 1) * parts.top_k; ++j) {
    const T* const part = made + parts.places[j] * width;
    for (int64_t i = 0; i < width; ++i) (*row)[i] += parts.shares[j] * to_float(part[i]);
  }
  round_row<T>(row);
  if (parts.shared == nullptr) return;
  const T* const shared = static_cast<const T*>(parts.shared) + m * width;
  const float gate = parts.shared_gate == nullptr ? 1.f : parts.shared_gate[m];
  for (int64_t i = 0; i < width; ++i) (*row)[i] += gate * to_float(shared[i]);
  round_row<T>(row);
}

template <class T>
void sum_norm_row(const SumNormParams& p, int64_t m) {
  const int64_t first = m * p.width;
  const T* const source = static_cast<const T*>(p.source) + first;
  const T* const made = static_cast<const T*>(p.made);
  T* const out = static_cast<T*>(p.out) + first;
  std::vector<float> row(p.width);
  if (p.parts.places != nullptr) {
    sum_parts(p.parts, made, m, &row);
  } else {
    read_row(made + first, p.width, row.data());
  }
  const auto add = [&] {
    for (int64_t i = 0; i < p.width; ++i) {
      row[i] = p.made_scale * row[i] + p.source_scale * to_float(source[i]);
    }
  };
  const bool of_sum = p.post_norm_of == Placement::kSum;
  if (of_sum) add();
  if (p.post_norm.is_there) norm_row<T>(p.post_norm, p.post_weights, &row);
  if (!of_sum) add();
  write_row(row.data(), p.width, out);
  if (!p.next_norm.is_there) return;
  round_row<T>(&row);
  norm_row<T>(p.next_norm, p.next_weights, &row);
  write_row(row.data(), p.width, static_cast<T*>(p.normed) + first);
}

}  // namespace

Status sum_norm(const SumNormParams& params, const Launch& on) {
  return queue(on.stream, "sum_norm", [p = params] {
    return dispatch(p.dtype, "sum_norm", [&](auto* like) {
      for (int64_t m = 0; m < p.num_rows; ++m) {
        sum_norm_row<ElementOf<decltype(like)>>(p, m);
      }
      return Status();
    });
  });
}

Status finish_logits(const FinishLogitsParams& params, const Launch& on) {
  return queue(on.stream, "finish_logits", [p = params] {
    return dispatch(p.dtype, "finish_logits", [&](auto* like) {
      using T = ElementOf<decltype(like)>;
      const T* const bias = static_cast<const T*>(p.bias);
      for (int64_t i = 0; i < p.num_rows * p.vocab_size; ++i) {
        float& x = p.logits[i];
        if (bias != nullptr) x += to_float(bias[i % p.vocab_size]);
        x *= p.scale;
        if (p.softcap != 0.f) x = p.softcap * std::tanh(x / p.softcap);
      }
      return Status();
    });
  });
}

Status resolve_tokens(int32_t* token_ids, const int32_t* last_tokens, int64_t num_tokens,
                      int64_t num_last, const Launch& on) {
  return queue(on.stream, "resolve_tokens", [=] {
    for (int64_t i = 0; i < num_tokens; ++i) {
      const int64_t row = -1 - int64_t{token_ids[i]};
      if (row >= 0 && row < num_last) token_ids[i] = last_tokens[row];
    }
    return Status();
  });
}

Status follow_drafts(const FollowDraftsParams& params, const Launch& on) {
  return queue(on.stream, "follow_drafts", [p = params] {
    for (int64_t i = 0; i < p.num_seqs; ++i) {
      const int32_t* plan = p.plan + i * p.plan_width;
      if (plan[0] < 0) continue;
      const int32_t* chosen = p.tokens + plan[1];
      int32_t right = 0;
      while (right < plan[0] && chosen[right] >= 0 && chosen[right] == p.tokens[plan[3 + right]]) {
        ++right;
      }
      const int64_t begin = p.cu_seqlens_q[i];
      if (plan[2] == 2) {
        if (right > 0) p.token_ids[begin] = chosen[right - 1];
        p.token_ids[begin + 1] = chosen[right];
      }
      const int32_t back = plan[0] - right, size = p.block_size;
      for (int64_t t = begin; t < p.cu_seqlens_q[i + 1]; ++t) {
        const int32_t place = p.positions[t] -= back;
        p.slot_mapping[t] =
            p.block_tables[i * p.blocks_per_seq + place / size] * size + place % size;
      }
      p.context_lens[i] -= back;
      p.offsets[i] -= back;
    }
    return Status();
  });
}

// attention

Status rope_and_cache_write(const RopeAndCacheWriteParams& params, const Launch& on) {
  return queue(on.stream, "rope_and_cache_write",
               [p = params] { return cpu::rope_and_cache_write(p); });
}

int64_t paged_attention_workspace_bytes(const PagedAttentionParams&, const AttentionLimits&) {
  return 0;
}
int64_t paged_attention_zeroed_bytes(const PagedAttentionParams&, const AttentionLimits&) {
  return 0;
}

Status paged_attention(const PagedAttentionParams& params, const AttentionLimits& limits, void*,
                       int64_t, const Launch& on) {
  return queue(on.stream, "paged_attention", [p = params, limits] {
    const AttentionBatch& batch = p.batch;
    for (int64_t b = 0; b < batch.num_seqs; ++b) {
      const int64_t span = batch.cu_seqlens_q[b + 1] - batch.cu_seqlens_q[b];
      if (span > limits.max_query_len || batch.context_lens[b] > limits.max_context_len) {
        return Status::error("paged_attention: request " + std::to_string(b) + " has " +
                             std::to_string(span) + " tokens in a context of " +
                             std::to_string(batch.context_lens[b]) + ", launched for " +
                             std::to_string(limits.max_query_len) + " and " +
                             std::to_string(limits.max_context_len));
      }
    }
    return cpu::paged_attention(p);
  });
}

Status rope_and_paged_attention(const RopeAndCacheWriteParams& rope,
                                const PagedAttentionParams& attention,
                                const AttentionLimits& limits, void* workspace,
                                int64_t workspace_bytes, const Launch& on) {
  const Status status = rope_and_cache_write(rope, on);
  return status.ok() ? paged_attention(attention, limits, workspace, workspace_bytes, on) : status;
}

Status copy_blocks(const CopyBlocksParams& p, const Launch& on) {
  const std::vector<void*> caches(p.caches, p.caches + p.num_caches);
  const std::vector<int64_t> bytes(p.block_bytes, p.block_bytes + p.num_caches);
  const std::vector<int32_t> copies(p.copies, p.copies + 2 * p.num_copies);
  return queue(on.stream, "copy_blocks", [=] {
    CopyBlocksParams kept;
    kept.caches = caches.data();
    kept.block_bytes = bytes.data();
    kept.copies = copies.data();
    kept.num_caches = static_cast<int64_t>(caches.size());
    kept.num_copies = static_cast<int64_t>(copies.size() / 2);
    return cpu::copy_blocks(kept);
  });
}

// from logits to tokens

Status adjust_logits(const AdjustLogitsParams& params, const Launch& on) {
  return queue(on.stream, "adjust_logits", [p = params] {
    for (int64_t row = 0; row < p.num_rows; ++row) {
      const int64_t slot = p.slot[row], length = p.length[row];
      if (slot < 0) continue;
      float* logits = p.logits + row * p.vocab_size;
      int32_t* old = p.history + slot * p.max_length;
      const int32_t* newest = p.token_ids + p.logit_indices[row];
      std::vector<int32_t> history(old, old + length - p.num_new[row]);
      history.insert(history.end(), newest - p.num_new[row] + 1, newest + 1);
      old[length - 1] = *newest;
      const int32_t* rules = p.rules + slot * p.rules_width;
      for (int64_t r = 0; r < rules[0]; ++r) {
        const int32_t* rule = rules + 1 + 4 * r;
        const int32_t* tokens = rules + rule[0];
        const int64_t prefix = rule[1] - 1;
        if (prefix > length || length - p.num_prompt[row] >= rule[3]) continue;
        float amount;
        std::memcpy(&amount, rule + 2, 4);
        if (tokens[prefix] < p.vocab_size &&
            std::equal(tokens, tokens + prefix, history.end() - prefix)) {
          logits[tokens[prefix]] += amount;
        }
      }
      std::map<int32_t, int> counts;  // of the output, for every token of the history
      for (int64_t i = 0; i < length; ++i) counts[history[i]] += i >= p.num_prompt[row];
      for (const auto& [token, count] : counts) {
        if (token < 0 || token >= p.vocab_size) continue;
        float& x = logits[token];
        x = x > 0.f ? x / p.repetition[row] : x * p.repetition[row];
        if (count > 0) x -= p.presence[row] + p.frequency[row] * static_cast<float>(count);
      }
      const int64_t size = p.no_repeat_ngram_size[row];
      for (int64_t i = 0; size > 0 && i + size <= length; ++i) {
        const int32_t token = history[i + size - 1];
        if (token >= 0 && token < p.vocab_size &&
            std::equal(history.end() - (size - 1), history.end(), history.begin() + i)) {
          logits[token] = -kInfinity;
        }
      }
    }
    return Status();
  });
}

Status mask_logits(const MaskLogitsParams& params, const Launch& on) {
  return queue(on.stream, "mask_logits", [params] { return cpu::mask_logits(params); });
}

Status sample(const SampleParams& params, const Launch& on) {
  return queue(on.stream, "sample", [params] {
    for (int64_t row = 0; row < params.num_rows; ++row) {
      SampleParams p = params;
      p.num_rows = 1;
      p.logits += row * p.vocab_size;
      p.temperature += row, p.top_k += row, p.top_p += row, p.seeds += row, p.offsets += row;
      p.token_ids += row;
      const bool greedy = *p.temperature == 0.f || *p.top_k == 1;
      // Of greedy rows nothing else is filled in, and nothing else is read.
      p.min_p = greedy || p.min_p == nullptr ? nullptr : p.min_p + row;
      p.typical_p = greedy || p.typical_p == nullptr ? nullptr : p.typical_p + row;
      const Status status = cpu::sample(p);
      if (!status.ok()) return status;
    }
    return Status();
  });
}

namespace {

// See verify_row: a thread alone.
struct OneThread {
  int thread() const { return 0; }
  int size() const { return 1; }
  void sync() const {}
  float max(float value) const { return value; }
  int sum(int value) const { return value; }
  double sum(double value) const { return value; }
  int add(int32_t* value, int32_t amount) const { return std::exchange(*value, *value + amount); }
  void count(int32_t* bins, int bin) const {
    if (bin >= 0) ++bins[bin];
  }
};

}  // namespace

Status verify_window(const VerifyWindowParams& params, const Launch& on) {
  return queue(on.stream, "verify_window", [p = params] {
    WindowScratch scratch;
    for (int64_t row = 0; row < p.num_rows; ++row) {
      if (p.num_drafts[row] != 0) p.verdicts[row] = verify_row(OneThread(), scratch, p, row);
    }
    for (int64_t row = 0; row < p.num_rows; ++row) verify_span(p, row);
    return Status();
  });
}

namespace {

double log_sum_exp(const float* x, int64_t size) {
  const float largest = *std::max_element(x, x + size);
  double sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += std::exp(static_cast<double>(x[i]) - largest);
  return largest + std::log(sum);
}

// The `count` largest of x above -inf, the largest first, the lower index among equals first.
std::vector<int32_t> largest(const float* x, int64_t size, int64_t count) {
  std::vector<int32_t> found;
  for (int64_t i = 0; i < size; ++i) {
    if (x[i] > -kInfinity) found.push_back(static_cast<int32_t>(i));
  }
  const auto middle = found.begin() + std::min<int64_t>(count, found.size());
  std::partial_sort(found.begin(), middle, found.end(),
                    [x](int32_t a, int32_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; });
  found.erase(middle, found.end());
  return found;
}

}  // namespace

Status logprobs(const LogprobsParams& params, const Launch& on) {
  return queue(on.stream, "logprobs", [p = params] {
    for (int64_t row = 0; row < p.num_rows; ++row) {
      const float* x = p.logits + row * p.vocab_size;
      const int64_t given = p.token_ids[row];
      const float chosen = x[given >= 0 && given < p.vocab_size ? given : 0];
      const double sum = log_sum_exp(x, p.vocab_size);
      int32_t* out = p.out + row * (2 + 2 * p.num_top);
      const auto put = [&](int64_t at, double value) {
        const float rounded = static_cast<float>(value);
        std::memcpy(out + at, &rounded, 4);
      };
      put(0, chosen - sum);
      out[1] = 1 + static_cast<int32_t>(std::count_if(
                       x, x + p.vocab_size, [chosen](float other) { return other > chosen; }));
      const std::vector<int32_t> top = largest(x, p.vocab_size, p.num_top);
      for (int64_t i = 0; i < p.num_top; ++i) {
        const bool there = i < static_cast<int64_t>(top.size());
        out[2 + i] = there ? top[i] : -1;
        put(2 + p.num_top + i, there ? x[top[i]] - sum : -INFINITY);
      }
    }
    return Status();
  });
}

Status log_softmax(const LikeliestParams& params, const Launch& on) {
  return queue(on.stream, "log_softmax", [p = params] {
    for (int64_t i = 0; i < p.num_rows; ++i) {
      if (p.rows[i] < 0 || p.rows[i] >= p.num_logit_rows) continue;
      float* x = p.logits + p.rows[i] * p.vocab_size;
      const double sum = log_sum_exp(x, p.vocab_size);
      for (int64_t j = 0; j < p.vocab_size; ++j) x[j] = static_cast<float>(x[j] - sum);
    }
    return Status();
  });
}

Status likeliest(const LikeliestParams& params, const Launch& on) {
  return queue(on.stream, "likeliest", [p = params] {
    for (int64_t i = 0; i < p.num_rows; ++i) {
      const bool there = p.rows[i] >= 0 && p.rows[i] < p.num_logit_rows;
      const float* x = p.logits + (there ? p.rows[i] : 0) * p.vocab_size;
      const int64_t size = there ? p.vocab_size : 0;
      const bool has_nan = std::any_of(x, x + size, [](float value) { return std::isnan(value); });
      const std::vector<int32_t> top = largest(x, has_nan ? 0 : size, p.count);
      for (int64_t k = 0; k < p.count; ++k) {
        const bool is_found = k < static_cast<int64_t>(top.size());
        p.token_ids[i * p.count + k] = is_found ? top[k] : -1;
        p.values[i * p.count + k] = is_found ? x[top[k]] : -kInfinity;
      }
    }
    return Status();
  });
}

}  // namespace regatta::cuda
