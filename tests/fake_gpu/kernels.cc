// The other launchers of regatta/cuda_ops.h over ordinary memory: each queues the CPU library's
// operator, or a plain loop where the CPU has none.
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
#include <utility>
#include <vector>

#include "launch.h"
#include "regatta/abi.h"
#include "regatta/communicator.h"

namespace regatta::cuda {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

}  // namespace

// rows

Status gather_rows(const GatherRowsParams& params, const Launch& on) {
  return queue(on.stream, "gather_rows", [p = params] { gather(p); });
}

Status embedding(const EmbeddingParams& params, const Launch& on) {
  if (params.packed) return Status::error("embedding: packed weights are a CPU layout");
  return queue(on.stream, "embedding", [p = params] {  // the CPU's refuses what is out of range
    gather({p.token_ids, p.weight, p.out, p.num_tokens, p.vocab_size, p.hidden_size, p.dtype});
    std::vector<char> added;
    if (p.position_table != nullptr) {
      added.resize(p.num_tokens * p.hidden_size * dtype_size(p.dtype));
      gather({p.positions, p.position_table, added.data(), p.num_tokens, p.num_positions,
              p.hidden_size, p.dtype});
    }
    check(cpu::add({p.out, added.empty() ? nullptr : added.data(), p.out,
                    p.num_tokens * p.hidden_size, p.scale, 1.f, p.dtype}));
    const int64_t bytes = p.hidden_size * dtype_size(p.dtype);
    for (int64_t i = 0; p.image_table != nullptr && i < p.num_tokens; ++i) {
      if (p.image_rows[i] < 0) continue;
      gather({p.image_rows + i, p.image_table, static_cast<char*>(p.out) + i * bytes, 1,
              p.num_image_rows, p.hidden_size, p.dtype});
    }
  });
}

Status cut_patches(const CutPatchesParams& params, const Launch& on) {
  return queue(on.stream, "cut_patches", [p = params] { check(cpu::cut_patches(p)); });
}

Status put_rows(const PutRowsParams& params, const Launch& on) {
  return queue(on.stream, "put_rows", [p = params] { check(cpu::put_rows(p)); });
}

Status write_places(const WritePlacesParams& params, const Launch& on) {
  return queue(on.stream, "write_places", [p = params] { check(cpu::write_places(p)); });
}

Status norm(const NormParams& params, const Launch& on) {
  return queue(on.stream, "norm", [p = params]() {
    NormParams own = p;
    std::vector<char> sum;  // the CPU's writes it always
    if (p.residual_out == nullptr) {
      sum.resize(p.num_tokens * p.hidden_size * dtype_size(p.dtype));
      own.residual_out = sum.data();
    }
    check(cpu::norm(own));
  });
}

Status activate(const ActivateParams& params, const Launch& on) {
  return queue(on.stream, "activate", [p = params] { check(cpu::activate(p)); });
}

Status add(const AddParams& params, const Launch& on) {
  return queue(on.stream, "add", [p = params] { check(cpu::add(p)); });
}

Status resolve_tokens(int32_t* token_ids, const int32_t* last_tokens, int64_t num_tokens,
                      int64_t num_last, const Launch& on) {
  return queue(on.stream, "resolve_tokens", [=] {
    for (int64_t i = 0; i < num_tokens; ++i) {
      const int64_t row = -1 - int64_t{token_ids[i]};
      if (row >= 0 && row < num_last) token_ids[i] = last_tokens[row];
    }
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
  });
}

Status rope_and_cache_write(const RopeAndCacheWriteParams& params, const Launch& on) {
  return queue(on.stream, "rope_and_cache_write",
               [p = params] { check(cpu::rope_and_cache_write(p)); });
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
    check(cpu::copy_blocks(kept));
  });
}

// from logits to tokens

Status adjust_logits(const AdjustLogitsParams& params, const Launch& on) {
  return queue(on.stream, "adjust_logits", [p = params] {
    const auto column = [&](int64_t token) {
      const int64_t at = token - p.first_token;
      return token >= 0 && at < p.vocab_size ? at : -1;
    };
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
        const int64_t at = column(tokens[prefix]);
        if (at >= 0 && std::equal(tokens, tokens + prefix, history.end() - prefix)) {
          logits[at] += amount;
        }
      }
      std::map<int32_t, int> counts;  // of the output, for every token of the history
      for (int64_t i = 0; i < length; ++i) counts[history[i]] += i >= p.num_prompt[row];
      for (const auto& [token, count] : counts) {
        if (column(token) < 0) continue;
        float& x = logits[column(token)];
        x = x > 0.f ? x / p.repetition[row] : x * p.repetition[row];
        if (count > 0) x -= p.presence[row] + p.frequency[row] * static_cast<float>(count);
      }
      const int64_t size = p.no_repeat_ngram_size[row];
      for (int64_t i = 0; size > 0 && i + size <= length; ++i) {
        const int64_t at = column(history[i + size - 1]);
        if (at >= 0 && std::equal(history.end() - (size - 1), history.end(), history.begin() + i)) {
          logits[at] = -kInfinity;
        }
      }
    }
  });
}

Status mask_logits(const MaskLogitsParams& params, const Launch& on) {
  return queue(on.stream, "mask_logits", [p = params] { check(cpu::mask_logits(p)); });
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
      check(cpu::sample(p));
    }
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
  });
}

// Over the ranks' memory of the host, which these GPUs' is.
Status sum_ranks(const SumRanksParams& params, const Launch& on) {
  return queue(on.stream, "sum_ranks", [p = params] {
    if (p.out != p.in) std::memcpy(p.out, p.in, p.count * dtype_size(p.dtype));
    check(current_communicator()->sum(p.out, p.count, p.dtype));
  });
}

Status gather_over_ranks(const GatherColumnsParams& params, const Launch& on) {
  const int size = current_communicator()->size();
  const std::vector<int> counts(params.counts, params.counts + size);
  return queue(on.stream, "gather_over_ranks", [p = params, counts] {
    const int64_t values = p.num_rows * p.width;
    Floats parts(values * counts.size());
    check(current_communicator()->gather(p.part, parts.data(), values * 4));
    float* to = p.all;
    for (int64_t row = 0; row < p.num_rows; ++row) {
      for (size_t rank = 0; rank < counts.size(); ++rank) {
        to = std::copy_n(parts.data() + rank * values + row * p.width, counts[rank], to);
      }
    }
  });
}

Status largest_over_ranks(const LargestParams& params, const Launch& on) {
  return queue(on.stream, "largest_over_ranks", [p = params] {
    struct Best {
      float value;
      int32_t token;
    };
    const int64_t rows = p.num_rows, size = current_communicator()->size();
    std::vector<Best> own(rows), all(rows * size);
    for (int64_t row = 0; row < rows; ++row) {
      const float* const x = p.logits + row * p.width;
      Best& best = own[row] = {x[0], static_cast<int32_t>(p.begin)};
      for (int64_t i = 0; i < p.count && !std::isnan(best.value); ++i) {
        if (!(x[i] <= best.value)) best = {x[i], static_cast<int32_t>(p.begin + i)};
      }
    }
    check(current_communicator()->gather(own.data(), all.data(), rows * int64_t{sizeof(Best)}));
    for (int64_t row = 0; row < rows; ++row) {
      Best best = all[row];
      for (int64_t rank = 1; rank < size && !std::isnan(best.value); ++rank) {
        const Best& other = all[rank * rows + row];
        if (!(other.value <= best.value)) best = other;
      }
      p.token_ids[row] = std::isnan(best.value) ? -1 : best.token;
    }
  });
}

Status own_rows(const OwnRowsParams& params, const Launch& on) {
  return queue(on.stream, "own_rows", [p = params] {
    for (int64_t i = 0; i < p.count; ++i) {
      const int32_t id = p.token_ids[i];
      p.rows[i] = static_cast<int32_t>(id >= p.begin && id < p.end ? id - p.begin : p.other);
    }
  });
}

}  // namespace regatta::cuda

REGATTA_EXPORT const char* regatta_gpu_ranks_create(int, int, void*) { return nullptr; }
REGATTA_EXPORT const char* regatta_gpu_ranks_open(const void*, const int*, int, void*, int) {
  return nullptr;
}
REGATTA_EXPORT int regatta_gpu_ranks_want_nccl(int, int) { return 0; }
REGATTA_EXPORT const char* regatta_gpu_ranks_check() { return nullptr; }
