// See sample.cc.
#include "rows.inl"

namespace regatta::cpu::REGATTA_ISA {

// One row of logits during a draw.
struct SampleRow {
  const float* logits;
  int64_t size;
  float largest;
  float inverse_temperature;

  // Weight of a token: exp((logit - largest) / temperature).
  REGATTA_INLINE Vec weights(Vec values) const {
    return exp((values - set1(largest)) * set1(inverse_temperature));
  }
  float weight(float logit) const {
    float lanes[Vec::kLanes];
    store(lanes, weights(set1(logit)));
    return lanes[0];
  }
};

// fn(i, values) for each vector of the row; lanes past the end are -infinity.
template <class Fn>
REGATTA_INLINE void for_logits(const float* logits, int64_t size, Fn&& fn) {
  constexpr int kLanes = Vec::kLanes;
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) fn(i, load(logits + i));
  if (i < size) {
    const int n = static_cast<int>(size - i);
    fn(i, keep_lanes(load_n(logits + i, n), 0, n, set1(-__builtin_inff())));
  }
}

// False if there is a NaN.
inline bool find_largest(const float* logits, int64_t size, float* largest) {
  constexpr uint32_t kAll = (1u << Vec::kLanes) - 1u;
  Vec most = set1(-__builtin_inff());
  uint32_t ordered = kAll;
  for_logits(logits, size, [&](int64_t, Vec values) REGATTA_LAMBDA_INLINE {
    most = max(most, values);
    ordered &= ge_mask(values, values);
  });
  *largest = reduce_max(most);
  return ordered == kAll;
}

inline int64_t find_first(const float* logits, int64_t size, float value) {
  constexpr int kLanes = Vec::kLanes;
  const Vec wanted = set1(value);
  for (int64_t i = 0; i < size; i += kLanes) {
    const int n = static_cast<int>(size - i < kLanes ? size - i : kLanes);
    const uint32_t found = ge_mask(load_n(logits + i, n), wanted) & ((1u << n) - 1u);
    if (found) return i + __builtin_ctz(found);
  }
  return 0;
}

// Weight and number of the tokens with a logit >= `threshold`. Sums of 64 vectors at most are
// float, sums of those double.
inline TokenMass mass_at_least(const SampleRow& row, float threshold) {
  constexpr int64_t kBlock = 64 * Vec::kLanes;
  const Vec bound = set1(threshold);
  TokenMass mass;
  for (int64_t begin = 0; begin < row.size; begin += kBlock) {
    Vec sum = zero();
    const int64_t size = row.size - begin < kBlock ? row.size - begin : kBlock;
    for_logits(row.logits + begin, size, [&](int64_t, Vec values) REGATTA_LAMBDA_INLINE {
      sum = sum + where_ge(values, bound, row.weights(values));
      mass.count += __builtin_popcount(ge_mask(values, bound));
    });
    mass.weight += static_cast<double>(reduce_add(sum));
  }
  return mass;
}

// Appends the tokens with low <= logit < high; low is finite.
inline void collect(const SampleRow& row, float low, float high, std::vector<Token>* tokens) {
  const Vec bound = set1(low);
  for_logits(row.logits, row.size, [&](int64_t i, Vec values) REGATTA_LAMBDA_INLINE {
    for (uint32_t found = ge_mask(values, bound); found; found &= found - 1) {
      const int64_t index = i + __builtin_ctz(found);
      if (row.logits[index] < high) {
        tokens->push_back({row.logits[index], static_cast<int32_t>(index)});
      }
    }
  });
}

// The `count` first tokens in descending order, sorted. Keeps about twice as many, and a bound that
// a token has to exceed to be among them.
inline void collect_top(const SampleRow& row, int64_t count, std::vector<Token>* tokens) {
  const size_t capacity = static_cast<size_t>(2 * count + 256);
  tokens->clear();
  float bound = -__builtin_inff();
  for_logits(row.logits, row.size, [&](int64_t i, Vec values) REGATTA_LAMBDA_INLINE {
    // Later tokens equal to the bound come after those kept. (-infinity weighs nothing.)
    uint32_t found = ~ge_mask(set1(bound), values) & ((1u << Vec::kLanes) - 1u);
    for (; found; found &= found - 1) {
      const int64_t index = i + __builtin_ctz(found);
      tokens->push_back({row.logits[index], static_cast<int32_t>(index)});
      if (tokens->size() == capacity) bound = keep_first(tokens, count);
    }
  });
  if (static_cast<int64_t>(tokens->size()) > count) keep_first(tokens, count);
  sort_tokens(tokens);
}

// An interval of logits that contains the token at which the cumulative weight, in descending
// order, reaches `target` (exceeds it, if `strict`), sorted into `tokens`. Returns the weight of
// the tokens above it. At most a few thousand tokens are sorted: passes over the row halve the
// interval until it is small, or until it holds one value only. `target` is less than the row's
// weight.
inline double find_interval(const SampleRow& row, double target, bool strict,
                            std::vector<Token>* tokens) {
  constexpr int64_t kSortable = 1024;
  const auto reaches = [&](double weight) { return strict ? weight > target : weight >= target; };
  const float temperature = 1.0f / row.inverse_temperature;
  // Tokens >= high do not reach the target, tokens >= low do.
  float high = __builtin_inff(), low = row.largest;
  TokenMass above, found;
  // Down to weights of e^-4, e^-8, ...: most rows end at the first. At e^-128 weights are 0.
  for (float step = 4.0f; step <= 128.0f; step *= 2.0f) {
    if (step > 4.0f) {
      above = found;
      high = low;
    }
    low = row.largest - step * temperature;
    found = mass_at_least(row, low);
    if (reaches(found.weight)) break;
  }
  while (found.count - above.count > kSortable) {
    const float top = high < row.largest ? high : row.largest;
    const float middle = low + (top - low) * 0.5f;
    if (!(middle > low && middle < high)) break;
    const TokenMass half = mass_at_least(row, middle);
    if (reaches(half.weight)) {
      found = half;
      low = middle;
    } else {
      above = half;
      high = middle;
    }
  }
  tokens->clear();
  collect(row, low, high, tokens);
  sort_tokens(tokens);
  return above.weight;
}

// Walks the sorted `tokens`, of which `weight` is above, until the cumulative weight reaches
// `target` (exceeds it, if `strict`), or to the last.
inline TokenAt walk(const SampleRow& row, const std::vector<Token>& tokens, double weight,
                    double target, bool strict) {
  TokenAt at = {0, weight};
  for (const Token& token : tokens) {
    at.index = token.index;
    at.cumulative += static_cast<double>(row.weight(token.logit));
    if (strict ? at.cumulative > target : at.cumulative >= target) break;
  }
  return at;
}

// The token drawn from the typical ones among those with a logit >= `least`.
inline int32_t draw_typical(const SampleRow& row, float least, double typical_p, double uniform,
                            std::vector<Token>* tokens) {
  tokens->clear();
  collect(row, least, __builtin_inff(), tokens);
  const auto distance = [&](const Token& token) {
    return static_cast<double>(row.largest - token.logit) *
           static_cast<double>(row.inverse_temperature);
  };
  const auto weight = [&](const Token& token) { return std::exp(-distance(token)); };
  double total = 0.0, mean = 0.0;
  for (const Token& token : *tokens) {
    const double w = weight(token);
    total += w;
    mean += w * distance(token);
  }
  mean /= total;
  const auto surprise = [&](const Token& token) { return std::abs(distance(token) - mean); };
  const size_t last = select_by_weight(
      tokens, typical_p * total, false, weight,
      [&](const Token& a, const Token& b) { return surprise(a) < surprise(b); });
  const double widest = surprise((*tokens)[last]);
  tokens->erase(std::remove_if(tokens->begin(), tokens->end(),
                               [&](const Token& token) { return surprise(token) > widest; }),
                tokens->end());
  double kept = 0.0;
  for (const Token& token : *tokens) kept += weight(token);
  const size_t drawn = select_by_weight(tokens, uniform * kept, true, weight, comes_before);
  return (*tokens)[drawn].index;
}

inline Status sample_row(const SampleParams& p, int64_t r, SampleBuffers* buffers) {
  SampleRow row;
  row.logits = p.logits + r * p.vocab_size;
  row.size = p.vocab_size;
  if (!find_largest(row.logits, row.size, &row.largest)) {
    return Status::error("sample: row " + std::to_string(r) + " of logits has a NaN");
  }
  if (p.temperature[r] == 0.0f || p.top_k[r] == 1) {
    p.token_ids[r] = static_cast<int32_t>(find_first(row.logits, row.size, row.largest));
    return {};
  }
  if (row.largest - row.largest != 0.0f) {
    return Status::error("sample: row " + std::to_string(r) + " of logits has no finite largest " +
                         "value to draw from (it is " + std::to_string(row.largest) + ")");
  }
  // A temperature below this one is greedy in all but name; its inverse would overflow.
  row.inverse_temperature = 1.0f / std::max(p.temperature[r], 1e-30f);
  const double top_p = static_cast<double>(p.top_p[r]);
  const double uniform = static_cast<double>(
      philox_uniform(static_cast<uint64_t>(p.seeds[r]), static_cast<uint64_t>(p.offsets[r])));
  std::vector<Token>* tokens = &buffers->tokens;
  const bool all = p.top_k[r] == 0 || p.top_k[r] >= row.size;
  double total = 0.0, above = 0.0;  // weight of what top_k keeps, of what lies above `tokens`
  if (all) {
    total = mass_at_least(row, -__builtin_inff()).weight;
  } else {
    collect_top(row, p.top_k[r], tokens);
    total = walk(row, *tokens, 0.0, __builtin_inf(), false).cumulative;
  }
  double kept = total;
  float least = all ? -__builtin_inff() : tokens->back().logit;  // of what is kept
  if (top_p < 1.0) {
    if (all) above = find_interval(row, top_p * total, false, tokens);
    const TokenAt last = walk(row, *tokens, above, top_p * total, false);
    kept = last.cumulative;
    least = row.logits[last.index];
  }
  if (p.min_p != nullptr && p.min_p[r] > 0.0f) {
    const float bound = row.largest + std::log(p.min_p[r]) * std::max(p.temperature[r], 1e-30f);
    if (bound > least) {
      least = bound;
      kept = mass_at_least(row, least).weight;
    }
  }
  if (p.typical_p != nullptr && p.typical_p[r] < 1.0f) {
    // -infinity is no token; without this bound it would be one of weight 0.
    least = std::max(least, row.largest - 100.0f * std::max(p.temperature[r], 1e-30f));
    p.token_ids[r] =
        draw_typical(row, least, static_cast<double>(p.typical_p[r]), uniform, tokens);
    return {};
  }
  // Rounded sums may differ in their last bits: stay below what all tokens together reach.
  const double target = std::min(uniform * kept, total * (1.0 - 1e-9));
  if (all && (top_p == 1.0 || target < above)) above = find_interval(row, target, true, tokens);
  while (tokens->size() > 1 && tokens->back().logit < least) tokens->pop_back();
  p.token_ids[r] = walk(row, *tokens, above, target, true).index;
  return {};
}

inline Status run_sample(const SampleParams& p) {
  std::vector<Status> statuses(static_cast<size_t>(p.num_rows));
  const int64_t bytes = p.num_rows * p.vocab_size * static_cast<int64_t>(sizeof(float));
  const int64_t threads = std::min<int64_t>(p.num_rows, threads_for_bytes(bytes));
  parallel(static_cast<int>(threads), [&](Team& team) {
    SampleBuffers buffers;
    team.for_each(p.num_rows, [&](int64_t r) {
      statuses[static_cast<size_t>(r)] = sample_row(p, r, &buffers);
    });
  });
  for (const Status& status : statuses) {
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace regatta::cpu::REGATTA_ISA
