// From logits to tokens. check: sample() against the definition in regatta/sample.h, and
// adjust_logits() against plain loops over long histories. time: adjust_logits, verify_window and
// sample over rows of 128,256 logits.
//
//   sampling check adjust|sample
//   sampling time adjust|verify|sample
#include "native.cuh"
#include "regatta/cuda_ops.h"
#include "regatta/philox.h"

using namespace regatta;
using namespace regatta::native;

namespace {

struct Draw {
  float temperature;
  int top_k;
  float top_p, min_p, typical_p = 1;
};

enum Kind { kNormal, kPeaked, kFlat, kEqual, kCoarse, kFew };
constexpr const char* kKindNames[] = {"normal", "peaked", "flat", "equal", "coarse", "few"};

void fill_logits(std::vector<float>& x, int vocab, Kind kind) {
  std::normal_distribution<float> normal(0.f, 1.f);
  for (size_t i = 0; i < x.size(); ++i) {
    const float g = normal(rng);
    x[i] = kind == kNormal   ? 3 * g
           : kind == kPeaked ? g + (rng() % 50 == 0 ? 12 + 4 * g : 0)
           : kind == kFlat   ? 1e-3f * g
           : kind == kEqual  ? 1.5f
                             : std::round(2 * g);
    if (vocab > 100 && kind == kNormal && i % 97 == 5) x[i] = -INFINITY;
    if (kind == kFew) x[i] = i % 10 < 3 ? 2 * g : -INFINITY;
    if (vocab > 100 && kind == kPeaked && i % 101 == 7) x[i] = -3e38f;
  }
}

// Rows of logits, each with a draw of its own.
struct Draws {
  int rows, vocab;
  Twin<float> logits, temperature, top_p, min_p, typical_p;
  Twin<int32_t> top_k, tokens;
  Twin<int64_t> seeds, offsets;

  Draws(int num_rows, int size)
      : rows(num_rows),
        vocab(size),
        logits(size_t(rows) * vocab),
        temperature(rows),
        top_p(rows),
        min_p(rows),
        typical_p(rows),
        top_k(rows),
        tokens(rows),
        seeds(rows),
        offsets(rows) {}
  // seed: of a row.
  template <class Seed>
  SampleParams params(const Draw& d, const Seed& seed) {
    for (int r = 0; r < rows; ++r) {
      temperature.host[r] = d.temperature, top_k.host[r] = d.top_k, top_p.host[r] = d.top_p;
      min_p.host[r] = d.min_p, typical_p.host[r] = d.typical_p;
      seeds.host[r] = seed(r), offsets.host[r] = r * 7 + 1;
    }
    temperature.upload(), top_p.upload(), min_p.upload(), top_k.upload(), seeds.upload();
    offsets.upload(), typical_p.upload();
    SampleParams p;
    p.logits = logits.device, p.temperature = temperature.device, p.top_k = top_k.device;
    p.top_p = top_p.device, p.seeds = seeds.device, p.offsets = offsets.device;
    p.token_ids = tokens.device, p.num_rows = rows, p.vocab_size = vocab;
    if (d.min_p > 0) p.min_p = min_p.device;
    if (d.typical_p < 1) p.typical_p = typical_p.device;
    return p;
  }
};

// What adjust_logits() reads of rows; columns: eight of each row, floats and whole numbers.
struct Adjusted {
  int rows, vocab, max_length, width;
  Twin<float> logits;
  Twin<int32_t> columns, ids, indices, history, rules;

  Adjusted(int num_rows, int size, int slots, int length, int rules_width)
      : rows(num_rows),
        vocab(size),
        max_length(length),
        width(rules_width),
        logits(size_t(rows) * vocab),
        columns(size_t(8) * rows),
        ids(rows),
        indices(rows),
        history(size_t(slots) * max_length),
        rules(size_t(slots) * width) {}
  void put(int row, int column, float x) {
    std::memcpy(&columns.host[size_t(column) * rows + row], &x, 4);
  }
  AdjustLogitsParams params() {
    logits.upload(), columns.upload(), ids.upload(), indices.upload(), history.upload();
    rules.upload();
    AdjustLogitsParams p;
    p.logits = logits.device;
    p.repetition = reinterpret_cast<const float*>(columns.device);
    p.presence = p.repetition + rows, p.frequency = p.presence + rows;
    p.slot = columns.device + 3 * rows, p.length = p.slot + rows, p.num_prompt = p.length + rows;
    p.num_new = p.num_prompt + rows, p.no_repeat_ngram_size = p.num_new + rows;
    p.token_ids = ids.device, p.logit_indices = indices.device, p.history = history.device;
    p.rules = rules.device, p.num_rows = rows, p.vocab_size = vocab, p.max_length = max_length;
    p.rules_width = width;
    return p;
  }
};

// ----------------------------------------------------------------------------------------- check

// Whether `token` is what the definition draws, up to `slack` of the kept mass.
bool is_drawn(const float* logits, int vocab, const Draw& d, float u, int token, double slack) {
  std::vector<int> order(vocab);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
  if (d.temperature == 0 || d.top_k == 1) return token == order[0];
  const float top = logits[order[0]];
  int kept = 0;
  std::vector<double> end;
  double mass = 0;
  for (; kept < vocab; ++kept) {
    const float x = (logits[order[kept]] - top) / d.temperature;
    if (logits[order[kept]] == -INFINITY) break;
    mass += std::exp(static_cast<double>(x));
    end.push_back(mass);
  }
  if (d.top_k > 0 && d.top_k < kept) mass = end[d.top_k - 1];
  double nucleus = mass;
  if (d.top_p < 1) {
    const double target = d.top_p * mass;
    nucleus = *std::lower_bound(end.begin(), end.end(), target);
  }
  auto distance = [&](size_t i) { return double((top - logits[order[i]]) / d.temperature); };
  double above = 0;  // mass in front of the first kept token
  if (d.min_p > 0) {
    double within = 0;
    for (size_t i = 0; i < end.size() && distance(i) <= -std::log(d.min_p); ++i) within = end[i];
    nucleus = std::min(nucleus, within);
  }
  if (d.typical_p < 1) {
    size_t size = std::lower_bound(end.begin(), end.end(), nucleus) - end.begin() + 1;
    for (; size < end.size() && logits[order[size]] == logits[order[size - 1]]; ++size) {
    }
    double mean = 0, total = end[size - 1];
    for (size_t i = 0; i < size; ++i) mean += std::exp(-distance(i)) * distance(i) / total;
    std::vector<size_t> typical(size);
    std::iota(typical.begin(), typical.end(), 0);
    auto surprise = [&](size_t i) { return std::abs(distance(i) - mean); };
    std::stable_sort(typical.begin(), typical.end(),
                     [&](size_t a, size_t b) { return surprise(a) < surprise(b); });
    double sum = 0;
    size_t last = 0;
    for (; last < size; ++last) {
      sum += std::exp(-distance(typical[last]));
      if (sum >= d.typical_p * total) break;
    }
    const double radius = surprise(typical[std::min(last, size - 1)]) * (1 + 1e-9);
    size_t first = 0;
    while (surprise(first) > radius) ++first;
    size_t behind = first;
    while (behind < size && surprise(behind) <= radius) ++behind;
    above = first > 0 ? end[first - 1] : 0;
    nucleus = end[behind - 1] - above;
  }
  const double target = above + u * nucleus;
  for (size_t i = 0; i < end.size(); ++i) {
    if (order[i] == token) {
      const double begin = i ? end[i - 1] : 0;
      // A nucleus border decided by rounding moves the target by up to one token's weight * u.
      return end[i] > target - slack * mass && begin <= target + slack * mass;
    }
  }
  return false;
}

void check_sample(int rows, int vocab, Kind kind, const Draw& d) {
  Draws draws(rows, vocab);
  Twin<int32_t>& tokens = draws.tokens;
  fill_logits(draws.logits.host, vocab, kind);
  if (vocab > 5) draws.logits.host[3] = draws.logits.host[1];
  draws.logits.upload();
  const SampleParams p = draws.params(d, [](int) { return int64_t(rng()) << 20 ^ rng(); });
  CHECK_STATUS(cuda::sample(p, {nullptr, true}));
  CHECK_CUDA(cudaDeviceSynchronize());
  tokens.download();
  const std::vector<int32_t> once = tokens.host;
  CHECK_STATUS(cuda::sample(p, {nullptr, true}));
  CHECK_CUDA(cudaDeviceSynchronize());
  tokens.download();
  int wrong = 0, differ = 0, rounded = 0;
#pragma omp parallel for reduction(+ : wrong, rounded)
  for (int r = 0; r < rows; ++r) {
    const float u = philox_uniform(draws.seeds.host[r], draws.offsets.host[r]);
    const float* row = &draws.logits.host[size_t(r) * vocab];
    // Where the typical ones end, rounding may take or leave a token.
    const bool close = is_drawn(row, vocab, d, u, once[r], d.typical_p < 1 ? 3e-5 : 1e-6);
    rounded += close && !is_drawn(row, vocab, d, u, once[r], 0);
    wrong += !close;
  }
  for (int r = 0; r < rows; ++r) differ += once[r] != tokens.host[r];
  count_case(
      wrong + differ == 0,
      format(
          "sample %3d x %6d %-6s T %.3g k %d p %.2f min_p %.2f typical %.2f: %d are wrong, %d not "
          "repeatable (%d by rounding)",
          rows, vocab, kKindNames[kind], d.temperature, d.top_k, d.top_p, d.min_p, d.typical_p,
          wrong, differ, rounded));
}

struct Rule {
  std::vector<int> tokens;
  float amount;
  int until;
};

// Each request has `num_drafts` rows behind the one of its last token. Logits are those of tokens
// from `first` on.
void check_adjust(int requests, int num_drafts, int vocab, int length, int alphabet, int ngram,
                  int first = 0) {
  const int per = 1 + num_drafts, rows = requests * per, slots = requests + 3, width = 64;
  const int max_length = length + num_drafts + 5;
  Adjusted a(rows, vocab - first, slots, max_length, width);
  std::vector<float> wanted(size_t(rows) * vocab);
  fill_logits(wanted, vocab, kNormal);
  for (int row = 0; row < rows; ++row) {
    std::copy_n(&wanted[size_t(row) * vocab + first], a.vocab,
                &a.logits.host[size_t(row) * a.vocab]);
  }
  std::fill(a.history.host.begin(), a.history.host.end(), -77);
  std::vector<std::vector<int>> texts(requests);
  for (int q = 0; q < requests; ++q) {
    std::vector<int>& text = texts[q];
    const int slot = slots - 1 - q, num_prompt = length * 2 / 3;
    for (int i = 0; i < length + num_drafts; ++i) text.push_back(rng() % alphabet);
    // What is new in this step is in the step's input only.
    std::copy_n(text.begin(), length - 1, &a.history.host[size_t(slot) * max_length]);
    const int last = text[length - 1], draft = text.back();
    const std::vector<Rule> all = {{{5 % vocab}, 2.5f, 1 << 30},
                                   {{last, 3 % vocab}, -INFINITY, 1 << 30},
                                   {{draft, 4 % vocab}, -1.5f, 1 << 30},
                                   {{alphabet + 1, last, 2 % vocab}, 9.f, 1 << 30},
                                   {{1 % vocab}, -INFINITY, length - num_prompt + 1},
                                   {{vocab}, 1.f, 1 << 30}};
    int32_t* words = &a.rules.host[size_t(slot) * width];
    int at = 1 + 4 * int(all.size());
    words[0] = int(all.size());
    for (size_t i = 0; i < all.size(); ++i) {
      words[1 + 4 * i] = at, words[2 + 4 * i] = int(all[i].tokens.size());
      std::memcpy(&words[3 + 4 * i], &all[i].amount, 4);
      words[4 + 4 * i] = all[i].until;
      for (int token : all[i].tokens) words[at++] = token;
    }
    const bool idle = q % 5 == 4;
    for (int j = 0; j < per; ++j) {
      const int row = q * per + j, size = length + j;
      const float repetition = q % 3 ? 1.3f : 1.f, presence = q % 2 ? 0.5f : 0.f;
      const float frequency = q % 3 == 2 ? 0.25f : 0.f;
      a.put(row, 0, repetition), a.put(row, 1, presence), a.put(row, 2, frequency);
      a.columns.host[3 * rows + row] = idle ? -1 : slot;
      a.columns.host[4 * rows + row] = size, a.columns.host[5 * rows + row] = num_prompt;
      a.columns.host[6 * rows + row] = 1 + j, a.columns.host[7 * rows + row] = q % 4 ? ngram : 0;
      a.ids.host[row] = text[size - 1], a.indices.host[row] = row;
      if (idle) continue;
      float* x = &wanted[size_t(row) * vocab];
      for (const Rule& rule : all) {
        const int prefix = int(rule.tokens.size()) - 1;
        if (size - num_prompt >= rule.until || prefix > size || rule.tokens.back() >= vocab)
          continue;
        if (std::equal(rule.tokens.begin(), rule.tokens.end() - 1, text.begin() + size - prefix))
          x[rule.tokens.back()] += rule.amount;
      }
      std::vector<int> seen(vocab, 0), output(vocab, 0);
      for (int i = 0; i < size; ++i) ++seen[text[i]], output[text[i]] += i >= num_prompt;
      for (int t = 0; t < vocab; ++t) {
        if (seen[t]) x[t] = x[t] > 0 ? x[t] / repetition : x[t] * repetition;
        if (output[t]) x[t] -= presence + frequency * output[t];
      }
      const int n = a.columns.host[7 * rows + row];
      for (int i = 0; n > 0 && i + n <= size; ++i) {
        if (std::equal(text.begin() + i, text.begin() + i + n - 1, text.begin() + size - n + 1))
          x[text[i + n - 1]] = -INFINITY;
      }
    }
  }
  AdjustLogitsParams params = a.params();
  params.first_token = first;
  CHECK_STATUS(cuda::adjust_logits(params, {nullptr, true}));
  CHECK_CUDA(cudaDeviceSynchronize());
  a.logits.download(), a.history.download();
  int wrong = 0;
  for (size_t i = 0; i < a.logits.host.size(); ++i) {
    const float got = a.logits.host[i];
    const float want = wanted[i / a.vocab * vocab + first + i % a.vocab];
    wrong += !(got == want || std::abs(got - want) <= 1e-5f * (1 + std::abs(want)));
  }
  for (int q = 0; q < requests; ++q) {
    if (q % 5 == 4) continue;
    wrong += !std::equal(texts[q].begin(), texts[q].end(),
                         &a.history.host[size_t(slots - 1 - q) * max_length]);
  }
  count_case(wrong == 0,
             format("adjust %3d rows of %d x %6d, %5d tokens of %5d, n-grams of %d: %d are wrong",
                    requests, per, vocab, length, alphabet, ngram, wrong));
}

void check_long_histories(const Words&) {
  for (int drafts : {0, 3}) {
    for (int length : {1, 2, 7, 100, 3000, 9001}) {
      check_adjust(11, drafts, 200, length, 7, 3);
      check_adjust(11, drafts, 200, length, 199, 1);
      check_adjust(6, drafts, 33000, length, 32000, 2);
      check_adjust(11, drafts, 200, length, 199, 1, 70);
    }
  }
}

void check_draws(const Words&) {
  const Draw draws[] = {{0, 0, 1, 0},
                        {1, 1, 1, 0},
                        {1, 0, 1, 0},
                        {0.7f, 50, 0.9f, 0},
                        {1, 0, 0.9f, 0},
                        {1, 3, 1, 0},
                        {1.3f, 1000, 0.5f, 0},
                        {1, 0, 0.95f, 0.05f},
                        {1, 0, 0, 0},
                        {0.01f, 0, 0.9f, 0},
                        {50, 20000, 0.8f, 0},
                        {1, 0, 1, 0.01f},
                        {2, 40, 0.9f, 0.2f},
                        {1, 0, 1, 0, 0.5f},
                        {0.8f, 0, 1, 0, 0.95f},
                        {1, 50, 0.9f, 0, 0.3f},
                        {1.5f, 0, 0.9f, 0.02f, 0.8f},
                        // What leaves out nothing, beside typical_p.
                        {1, 900, 1, 0, 0.5f},
                        {1.5f, 0, 1, 1e-6f, 0.8f},
                        {1, 200000, 1, 0, 0.7f}};
  for (const Draw& d : draws) {
    for (int vocab : {1, 2, 5, 1000, 32000, 128256}) {
      for (Kind kind : {kNormal, kPeaked, kFlat, kEqual, kCoarse, kFew}) {
        if (vocab > 100000 && kind == kCoarse) continue;
        if (vocab < 1000 && kind == kFew) continue;  // a row would have no token
        check_sample(vocab > 1000 ? 6 : 20, vocab, kind, d);
      }
    }
    check_sample(150, 32000, kNormal, d);
    check_sample(600, 4001, kPeaked, d);
  }
}

// ------------------------------------------------------------------------------------------ time

constexpr int kVocab = 128256;

void time_adjust(const Words&) {
  for (int rows : {1, 64, 256}) {
    for (int length : {200, 2000, 8000}) {
      Adjusted a(rows, kVocab, rows, 8192, 64);
      for (int32_t& token : a.history.host) token = rng() % kVocab;
      for (int r = 0; r < rows; ++r) {
        a.put(r, 0, 1.1f), a.put(r, 1, 0.1f), a.put(r, 2, 0.1f);
        a.columns.host[3 * rows + r] = a.indices.host[r] = r;
        a.columns.host[4 * rows + r] = length, a.columns.host[5 * rows + r] = length / 2;
        a.columns.host[6 * rows + r] = 1, a.columns.host[7 * rows + r] = 3;
      }
      const AdjustLogitsParams p = a.params();
      const double us = call_us(
          8, 10, [&](int, cudaStream_t s) { CHECK_STATUS(cuda::adjust_logits(p, {s, true})); });
      std::printf("adjust %3d x %d, %4d tokens, penalties and 3-grams: %7.2f us\n", rows, kVocab,
                  length, us);
    }
  }
}

// Drafts of one rank in each row, in spans of 8 rows.
void time_verify(int rows, int vocab, int rank, int top_k) {
  Twin<float> logits(size_t(rows) * vocab), floats(size_t(3) * rows);
  Twin<int32_t> top_ks(rows), num_drafts(rows), ids(rows + 1), indices(rows), verdicts(rows);
  Twin<int32_t> drawn(rows);
  std::vector<float> one(vocab);
  fill_logits(one, vocab, kNormal);
  std::vector<int> order(vocab);
  std::iota(order.begin(), order.end(), 0);
  std::nth_element(order.begin(), order.begin() + rank, order.end(),
                   [&](int a, int b) { return one[a] > one[b]; });
  for (int r = 0; r < rows; ++r) {
    std::copy_n(one.begin(), vocab, &logits.host[size_t(r) * vocab]);
    floats.host[r] = 1.0f, floats.host[rows + r] = 0.95f, floats.host[2 * rows + r] = 0.0f;
    top_ks.host[r] = top_k, num_drafts.host[r] = 7 - r % 8, indices.host[r] = r;
    ids.host[r + 1] = order[rank], drawn.host[r] = order[rank];
  }
  logits.upload(), floats.upload(), top_ks.upload(), num_drafts.upload(), ids.upload();
  indices.upload(), drawn.upload();
  VerifyWindowParams p;
  p.logits = logits.device, p.temperature = floats.device, p.top_p = floats.device + rows;
  p.min_p = floats.device + 2 * rows, p.top_k = top_ks.device, p.num_drafts = num_drafts.device;
  p.token_ids = ids.device, p.logit_indices = indices.device, p.verdicts = verdicts.device;
  p.drawn = drawn.device, p.num_rows = rows, p.num_tokens = rows + 1, p.vocab_size = vocab;
  p.window = 2, p.max_candidate_len = 5;
  const double us =
      call_us(8, 10, [&](int, cudaStream_t s) { CHECK_STATUS(cuda::verify_window(p, {s, true})); });
  std::printf("verify_window %4d x %d, rank %d, top_k %2d: %7.2f us\n", rows, vocab, rank, top_k,
              us);
}

void time_verifies(const Words&) {
  for (int rows : {8, 64, 512}) {
    for (int rank : {0, 2}) time_verify(rows, kVocab, rank, 0);
    time_verify(rows, kVocab, 2, 50);
  }
}

void time_samples(const Words&) {
  for (Kind kind : {kNormal, kPeaked}) {
    for (int rows : {1, 8, 32, 64, 128, 256}) {
      Draws draws(rows, kVocab);
      std::vector<float> some(kVocab * 4);
      fill_logits(some, kVocab, kind);
      for (int r = 0; r < rows; ++r) {
        std::copy_n(&some[r % 4 * kVocab], kVocab, &draws.logits.host[size_t(r) * kVocab]);
      }
      draws.logits.upload();
      std::printf("sample %-6s %3d x %d:", kKindNames[kind], rows, kVocab);
      for (const Draw& d : {Draw{0, 0, 1, 0}, Draw{1, 0, 1, 0}, Draw{1, 0, 0.9f, 0},
                            Draw{0.7f, 50, 0.9f, 0}, Draw{1, 0, 1, 0, 0.9f}}) {
        const SampleParams p = draws.params(d, [](int r) { return r; });
        const double us =
            call_us(8, 10, [&](int, cudaStream_t s) { CHECK_STATUS(cuda::sample(p, {s, true})); });
        std::printf("  T %.1f k %2d p %.1f typical %.1f %7.2f us", d.temperature, d.top_k, d.top_p,
                    d.typical_p, us);
      }
      std::printf("\n");
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  return run_parts(argc, argv,
                   {{"check", "adjust", check_long_histories},
                    {"check", "sample", check_draws},
                    {"time", "adjust", time_adjust},
                    {"time", "verify", time_verifies},
                    {"time", "sample", time_samples}});
}
