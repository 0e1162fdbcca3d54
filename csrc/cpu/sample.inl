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

// Weight and number of the tokens with low <= logit <= high.
inline TokenMass mass_between(const SampleRow& row, float low, float high) {
  constexpr int64_t kBlock = 64 * Vec::kLanes;
  const Vec bottom = set1(low), top = set1(high);
  TokenMass mass;
  for (int64_t begin = 0; begin < row.size; begin += kBlock) {
    Vec sum = zero();
    const int64_t size = row.size - begin < kBlock ? row.size - begin : kBlock;
    for_logits(row.logits + begin, size, [&](int64_t, Vec values) REGATTA_LAMBDA_INLINE {
      sum = sum + where_ge(top, values, where_ge(values, bottom, row.weights(values)));
      mass.count += __builtin_popcount(ge_mask(top, values) & ge_mask(values, bottom));
    });
    mass.weight += static_cast<double>(reduce_add(sum));
  }
  return mass;
}

// Mean of (largest - logit) / temperature, by weight, of the tokens with a logit >= `least`,
// finite.
inline double mean_distance(const SampleRow& row, float least) {
  constexpr int64_t kBlock = 64 * Vec::kLanes;
  const Vec bottom = set1(least);
  double total = 0.0, moment = 0.0;
  for (int64_t begin = 0; begin < row.size; begin += kBlock) {
    Vec weight = zero(), product = zero();
    const int64_t size = row.size - begin < kBlock ? row.size - begin : kBlock;
    for_logits(row.logits + begin, size, [&](int64_t, Vec values) REGATTA_LAMBDA_INLINE {
      const Vec distance = (set1(row.largest) - values) * set1(row.inverse_temperature);
      const Vec w = where_ge(values, bottom, row.weights(values));
      weight = weight + w;
      product = product + where_ge(values, bottom, w * distance);
    });
    total += static_cast<double>(reduce_add(weight));
    moment += static_cast<double>(reduce_add(product));
  }
  return moment / total;
}

// Narrows the tokens with a logit >= *least, finite, to the typical ones: those with a logit from
// *least to *highest, as the definition has them. Passes that only add weights halve a shell around
// the mean distance until few tokens are in it; these are sorted.
inline void find_typical(const SampleRow& row, double typical_p, float* least, float* highest,
                         std::vector<Token>* tokens) {
  constexpr int64_t kSortable = 1024;
  constexpr int kMaxHalvings = 48;
  const double temperature = 1.0 / static_cast<double>(row.inverse_temperature);
  const double largest = static_cast<double>(row.largest), mean = mean_distance(row, *least);
  const float bottom = *least;
  const auto low_of = [&](double radius) {
    return std::max(static_cast<float>(largest - (mean + radius) * temperature), bottom);
  };
  const auto high_of = [&](double radius) {
    return std::min(static_cast<float>(largest - (mean - radius) * temperature), row.largest);
  };
  const double target = typical_p * mass_at_least(row, bottom).weight;
  // Tokens within `inner` do not reach the target, tokens within `outer` do.
  double inner = 0.0;
  double outer = std::max(mean, (largest - static_cast<double>(bottom)) / temperature - mean);
  TokenMass inside;
  TokenMass within = mass_between(row, bottom, row.largest);
  bool is_empty = true;  // no token is known to be inside
  for (int i = 0; i < kMaxHalvings && within.count - inside.count > kSortable; ++i) {
    const double middle = inner + (outer - inner) * 0.5;
    const TokenMass half = mass_between(row, low_of(middle), high_of(middle));
    if (half.weight >= target) {
      within = half;
      outer = middle;
    } else {
      inside = half;
      inner = middle;
      is_empty = false;
    }
  }
  // The shell, the most typical first.
  const float inner_low = low_of(inner), inner_high = high_of(inner);
  const auto after = [](float x) { return std::nextafter(x, __builtin_inff()); };
  tokens->clear();
  if (is_empty) {
    collect(row, low_of(outer), after(high_of(outer)), tokens);
  } else {
    collect(row, low_of(outer), inner_low, tokens);
    collect(row, after(inner_high), after(high_of(outer)), tokens);
  }
  const auto surprise = [&](const Token& token) {
    return std::abs((largest - static_cast<double>(token.logit)) / temperature - mean);
  };
  std::sort(tokens->begin(), tokens->end(),
            [&](const Token& a, const Token& b) { return surprise(a) < surprise(b); });
  *least = is_empty ? row.largest : inner_low;
  *highest = is_empty ? -__builtin_inff() : inner_high;
  double weight = inside.weight, widest = -1.0;
  for (const Token& token : *tokens) {
    if (weight >= target && surprise(token) > widest) break;
    weight += static_cast<double>(row.weight(token.logit));
    widest = surprise(token);
    *least = std::min(*least, token.logit);
    *highest = std::max(*highest, token.logit);
  }
}

// The token of row r, or -1.
inline int32_t sample_row(const SampleParams& p, int64_t r, std::vector<Token>* tokens) {
  SampleRow row;
  row.logits = p.logits + r * p.vocab_size;
  row.size = p.vocab_size;
  if (!find_largest(row.logits, row.size, &row.largest)) return -1;
  if (p.temperature[r] == 0.0f || p.top_k[r] == 1) {
    return static_cast<int32_t>(find_first(row.logits, row.size, row.largest));
  }
  if (row.largest - row.largest != 0.0f) return -1;
  // A temperature below this one is greedy in all but name; its inverse would overflow.
  row.inverse_temperature = 1.0f / std::max(p.temperature[r], 1e-30f);
  const double top_p = static_cast<double>(p.top_p[r]);
  const double uniform = static_cast<double>(
      philox_uniform(static_cast<uint64_t>(p.seeds[r]), static_cast<uint64_t>(p.offsets[r])));
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
    const double border = static_cast<double>(row.largest) +
                          std::log(static_cast<double>(p.min_p[r])) *
                              static_cast<double>(std::max(p.temperature[r], 1e-30f));
    float bound = static_cast<float>(border);
    if (static_cast<double>(bound) < border) bound = std::nextafter(bound, row.largest);
    if (bound > least) {
      least = bound;
      kept = mass_at_least(row, least).weight;
    }
  }
  float highest = row.largest;
  const bool typical = p.typical_p != nullptr && p.typical_p[r] < 1.0f;
  double skipped = 0.0;  // weight of the tokens above `highest`
  if (typical) {
    // -infinity is no token, and what lies below this bound has no weight in float32.
    least = std::max(least, row.largest - 100.0f * std::max(p.temperature[r], 1e-30f));
    find_typical(row, static_cast<double>(p.typical_p[r]), &least, &highest, tokens);
    kept = mass_between(row, least, highest).weight;
    skipped = std::max(mass_at_least(row, least).weight - kept, 0.0);
  }
  // Rounded sums may differ in their last bits: stay below what all tokens together reach.
  const double target = std::min(skipped + uniform * kept, total * (1.0 - 1e-9));
  if (typical || (all && (top_p == 1.0 || target < above))) {
    above = find_interval(row, target, true, tokens);
  }
  while (tokens->size() > 1 && tokens->back().logit < least) tokens->pop_back();
  size_t first = 0;
  for (; first + 1 < tokens->size() && (*tokens)[first].logit > highest; ++first) {
    above += static_cast<double>(row.weight((*tokens)[first].logit));
  }
  tokens->erase(tokens->begin(), tokens->begin() + static_cast<std::ptrdiff_t>(first));
  return walk(row, *tokens, above, target, true).index;
}

inline Status run_sample(const SampleParams& p) {
  const int64_t bytes = p.num_rows * p.vocab_size * static_cast<int64_t>(sizeof(float));
  const int64_t threads = std::min<int64_t>(p.num_rows, threads_for_bytes(bytes));
  parallel(static_cast<int>(threads), [&](Team& team) {
    std::vector<Token> tokens;  // one thread's memory
    team.for_each(p.num_rows, [&](int64_t r) { p.token_ids[r] = sample_row(p, r, &tokens); });
  });
  return {};
}

}  // namespace regatta::cpu::REGATTA_ISA
