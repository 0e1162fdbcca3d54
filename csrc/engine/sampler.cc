#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "regatta/sample.h"

namespace regatta::engine {
namespace {

constexpr uint64_t kSeedMask = ~uint64_t{0} >> 1;

// A column for each field of SampleParams.
struct Columns {
  std::vector<float> temperature, top_p, min_p, typical_p;
  std::vector<int32_t> top_k;
  std::vector<int64_t> seeds, offsets;

  void add(const Sampling& sampling, int64_t seed, int64_t offset) {
    const bool greedy = sampling.temperature == 0 || sampling.top_k == 1 || sampling.top_p == 0;
    temperature.push_back(greedy ? 0.0f : static_cast<float>(sampling.temperature));
    top_k.push_back(greedy ? 1 : static_cast<int32_t>(std::max<int64_t>(sampling.top_k, 0)));
    top_p.push_back(greedy ? 1.0f : static_cast<float>(sampling.top_p));
    min_p.push_back(greedy ? 0.0f : static_cast<float>(sampling.min_p));
    typical_p.push_back(greedy ? 1.0f : static_cast<float>(sampling.typical_p));
    seeds.push_back(seed);
    offsets.push_back(offset);
  }
};

}  // namespace

int64_t request_seed(int64_t engine_seed, const Sequence& sequence) {
  uint64_t seed = uint64_t(engine_seed) * 0x9E3779B97F4A7C15u + uint64_t(sequence.id) + 1;
  if (sequence.request.sampling.seed) seed = uint64_t(*sequence.request.sampling.seed);
  return int64_t(seed & kSeedMask);
}

TokenLogprobs measure(const float* logits, int64_t vocab_size, int32_t token, int32_t num_top) {
  const float largest = *std::max_element(logits, logits + vocab_size);
  double total = 0.0;
  int32_t rank = 1;
  for (int64_t i = 0; i < vocab_size; ++i) {
    total += static_cast<double>(std::exp(logits[i] - largest));
    rank += logits[i] > logits[token];
  }
  const double log_total = static_cast<double>(largest) + std::log(total);
  const auto logprob = [&](int32_t id) {
    return static_cast<float>(static_cast<double>(logits[id]) - log_total);
  };
  TokenLogprobs found;
  found.token = {token, logprob(token), rank};
  Ids order(num_top > 0 ? vocab_size : 0);
  std::iota(order.begin(), order.end(), 0);
  const auto end = order.begin() + std::min<int64_t>(num_top, int64_t(order.size()));
  std::partial_sort(order.begin(), end, order.end(), [&](int32_t a, int32_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  });
  for (auto id = order.begin(); id != end; ++id) {
    found.top.push_back({*id, logprob(*id), int32_t(id - order.begin()) + 1});
  }
  return found;
}

Status Sampler::choose(const std::vector<const Sequence*>& rows, float* logits, Ids* tokens,
                       std::vector<TokenLogprobs>* logprobs) {
  const auto vocab_size = int64_t(counts_.size());
  Columns columns;
  std::vector<std::vector<float>> raw(rows.size());  // of rows that are changed and measured
  for (size_t row = 0; row < rows.size(); ++row) {
    const Sequence& sequence = *rows[row];
    const int64_t offset = sequence.num_output_tokens();
    columns.add(sequence.request.sampling, request_seed(seed_, sequence), offset);
    if (!sequence.adjustment.changes(offset)) continue;
    float* const own = logits + int64_t(row) * vocab_size;
    if (sequence.request.logprobs >= 0) raw[row].assign(own, own + vocab_size);
    sequence.adjustment.apply(sequence.ids, sequence.num_prompt_tokens, vocab_size, counts_.data(),
                              own);
  }
  tokens->resize(rows.size());
  SampleParams params;
  params.logits = logits;
  params.temperature = columns.temperature.data();
  params.top_k = columns.top_k.data();
  params.top_p = columns.top_p.data();
  params.min_p = columns.min_p.data();
  params.typical_p = columns.typical_p.data();
  params.seeds = columns.seeds.data();
  params.offsets = columns.offsets.data();
  params.token_ids = tokens->data();
  params.num_rows = int64_t(rows.size());
  params.vocab_size = vocab_size;
  REGATTA_RETURN_IF_ERROR(cpu::sample(params));
  logprobs->assign(rows.size(), {});
  for (size_t row = 0; row < rows.size(); ++row) {
    const int32_t num_top = rows[row]->request.logprobs, token = (*tokens)[row];
    if (num_top < 0 || token < 0) continue;
    const float* own = raw[row].empty() ? logits + int64_t(row) * vocab_size : raw[row].data();
    (*logprobs)[row] = measure(own, vocab_size, token, num_top);
  }
  return {};
}

}  // namespace regatta::engine
