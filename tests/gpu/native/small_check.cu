// Checks rows by index against float64, sample against the definition in regatta/sample.h, and
// adjust_logits against plain loops over long histories.
//
//   small_check rows|adjust|sample
#include "logits.cuh"
#include "regatta/cuda_ops.h"
#include "regatta/philox.h"

using namespace regatta;
using namespace regatta::native;

namespace {

int failures = 0, cases = 0;

void report(const std::string& name, double error, double tolerance) {
  const bool ok = error < tolerance;
  failures += !ok, ++cases;
  if (!ok) std::printf("FAILED %-58s %.1e\n", name.c_str(), error);
}

struct Error {
  double difference = 0, norm = 0;
  void add(double got, double want) {
    difference += std::isfinite(got) ? (got - want) * (got - want) : INFINITY;
    norm += want * want;
  }
  double value() const { return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference); }
};

template <class T>
constexpr double tolerance() {
  return sizeof(T) == 4 ? 1e-6 : std::is_same_v<T, __half> ? 1e-3 : 5e-3;
}

template <class T>
void check_rms_norm(int tokens, int hidden, bool with_residual, bool by_index = false) {
  Twin<T> x(tokens * hidden), w(hidden), r(tokens * hidden), out(tokens * hidden),
      sum(tokens * hidden);
  x.random(), w.random(), r.random(2.f);
  NormParams p = {x.device,   w.device,   with_residual ? r.device : nullptr,
                     out.device, sum.device, tokens,
                     hidden,     1e-5f,      cuda::Traits<T>::dtype};
  Twin<int32_t> ids(tokens);  // backwards; the last is out of range
  for (int t = 0; t < tokens; ++t) ids.host[t] = t + 1 < tokens ? tokens - 1 - t : tokens;
  ids.upload();
  must(by_index ? cuda::norm_rows(p, ids.device, tokens, {nullptr, true})
                : cuda::norm(p, {nullptr, true}));
  CHECK_CUDA(cudaDeviceSynchronize());
  out.download(), sum.download();
  Error error;
  for (int t = 0; t < tokens; ++t) {
    double squares = 0;
    const int id = by_index ? ids.host[t] : t;
    for (int i = t * hidden; i < (t + 1) * hidden; ++i) {
      const float source = id < tokens ? host_float(x.host[i + (id - t) * hidden]) : 0.f;
      const float v = source + (with_residual ? host_float(r.host[i]) : 0.f);
      const float rounded = host_float(host_from<T>(v));
      error.add(host_float(sum.host[i]), rounded);
      squares += double(rounded) * rounded;
    }
    const double scale = 1 / std::sqrt(squares / hidden + 1e-5);
    for (int i = 0; i < hidden; ++i) {
      error.add(host_float(out.host[t * hidden + i]),
                scale * host_float(sum.host[t * hidden + i]) * host_float(w.host[i]));
    }
  }
  report(std::string("rms_norm ") + dtype_name(p.dtype) + " " + std::to_string(tokens) + " x " +
             std::to_string(hidden) + (with_residual ? " + residual" : "") +
             (by_index ? " by index" : ""),
         error.value(), tolerance<T>());
}

template <class T>
void check_gather(int tokens, int hidden) {
  const int rows = 57;
  Twin<T> table(rows * hidden), out(tokens * hidden);
  Twin<int32_t> ids(tokens);
  table.random();
  for (auto& id : ids.host) id = static_cast<int>(rng() % (rows + 2)) - 1;  // -1 and rows: zeros
  ids.upload();
  const EmbeddingParams p = {ids.device, table.device, out.device, tokens,
                             rows,       hidden,       false,      cuda::Traits<T>::dtype};
  must(cuda::embedding(p, {nullptr, true}));
  CHECK_CUDA(cudaDeviceSynchronize());
  out.download();
  Error error;
  for (int t = 0; t < tokens; ++t) {
    for (int i = 0; i < hidden; ++i) {
      const int id = ids.host[t];
      error.add(host_float(out.host[t * hidden + i]),
                id < 0 || id >= rows ? 0 : host_float(table.host[id * hidden + i]));
    }
  }
  report(std::string("embedding ") + dtype_name(cuda::Traits<T>::dtype) + " " +
             std::to_string(tokens) + " x " + std::to_string(hidden),
         error.value(), 1e-9);
}

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
  Twin<float> logits(size_t(rows) * vocab), temperature(rows), top_p(rows), min_p(rows);
  Twin<float> typical_p(rows);
  Twin<int32_t> top_k(rows), tokens(rows);
  Twin<int64_t> seeds(rows), offsets(rows);
  fill_logits(logits.host, vocab, kind);
  if (vocab > 5) logits.host[3] = logits.host[1];
  for (int r = 0; r < rows; ++r) {
    temperature.host[r] = d.temperature, top_k.host[r] = d.top_k, top_p.host[r] = d.top_p;
    min_p.host[r] = d.min_p, typical_p.host[r] = d.typical_p;
    seeds.host[r] = int64_t(rng()) << 20 ^ rng(), offsets.host[r] = r * 7 + 1;
  }
  logits.upload(), temperature.upload(), top_p.upload(), min_p.upload(), top_k.upload();
  seeds.upload(), offsets.upload(), typical_p.upload();
  SampleParams p;
  p.logits = logits.device, p.temperature = temperature.device, p.top_k = top_k.device;
  p.top_p = top_p.device, p.seeds = seeds.device, p.offsets = offsets.device;
  p.token_ids = tokens.device, p.num_rows = rows, p.vocab_size = vocab;
  if (d.min_p > 0) p.min_p = min_p.device;
  if (d.typical_p < 1) p.typical_p = typical_p.device;
  must(cuda::sample(p, {nullptr, true}));
  CHECK_CUDA(cudaDeviceSynchronize());
  tokens.download();
  const std::vector<int32_t> once = tokens.host;
  must(cuda::sample(p, {nullptr, true}));
  CHECK_CUDA(cudaDeviceSynchronize());
  tokens.download();
  int wrong = 0, differ = 0, rounded = 0;
#pragma omp parallel for reduction(+ : wrong, rounded)
  for (int r = 0; r < rows; ++r) {
    const float u = philox_uniform(seeds.host[r], offsets.host[r]);
    const float* row = &logits.host[size_t(r) * vocab];
    // Where the typical ones end, rounding may take or leave a token.
    const bool close = is_drawn(row, vocab, d, u, once[r], d.typical_p < 1 ? 3e-5 : 1e-6);
    rounded += close && !is_drawn(row, vocab, d, u, once[r], 0);
    wrong += !close;
  }
  for (int r = 0; r < rows; ++r) differ += once[r] != tokens.host[r];
  char name[160];
  std::snprintf(
      name, sizeof name,
      "sample %3d x %6d %-6s T %.3g k %d p %.2f min_p %.2f typical %.2f%s (%d by rounding)", rows,
      vocab, kKindNames[kind], d.temperature, d.top_k, d.top_p, d.min_p, d.typical_p,
      differ ? " NOT REPEATABLE" : "", rounded);
  report(name, wrong + differ, 0.5);
}

struct Rule {
  std::vector<int> tokens;
  float amount;
  int until;
};

// Each request has `num_drafts` rows behind the one of its last token.
void check_adjust(int requests, int num_drafts, int vocab, int length, int alphabet, int ngram) {
  const int per = 1 + num_drafts, rows = requests * per, slots = requests + 3, width = 64;
  const int max_length = length + num_drafts + 5;
  Twin<float> logits(size_t(rows) * vocab);
  Twin<int32_t> columns(size_t(8) * rows), ids(rows), indices(rows);
  Twin<int32_t> history(size_t(slots) * max_length), rules(size_t(slots) * width);
  fill_logits(logits.host, vocab, kNormal);
  std::vector<float> wanted(logits.host);
  std::fill(history.host.begin(), history.host.end(), -77);
  auto put = [&](int row, int column, float x) {
    std::memcpy(&columns.host[size_t(column) * rows + row], &x, 4);
  };
  std::vector<std::vector<int>> texts(requests);
  for (int q = 0; q < requests; ++q) {
    std::vector<int>& text = texts[q];
    const int slot = slots - 1 - q, num_prompt = length * 2 / 3;
    for (int i = 0; i < length + num_drafts; ++i) text.push_back(rng() % alphabet);
    // What is new in this step is in the step's input only.
    std::copy_n(text.begin(), length - 1, &history.host[size_t(slot) * max_length]);
    const int last = text[length - 1], draft = text.back();
    const std::vector<Rule> all = {{{5 % vocab}, 2.5f, 1 << 30},
                                   {{last, 3 % vocab}, -INFINITY, 1 << 30},
                                   {{draft, 4 % vocab}, -1.5f, 1 << 30},
                                   {{alphabet + 1, last, 2 % vocab}, 9.f, 1 << 30},
                                   {{1 % vocab}, -INFINITY, length - num_prompt + 1},
                                   {{vocab}, 1.f, 1 << 30}};
    int32_t* words = &rules.host[size_t(slot) * width];
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
      put(row, 0, repetition), put(row, 1, presence), put(row, 2, frequency);
      columns.host[3 * rows + row] = idle ? -1 : slot;
      columns.host[4 * rows + row] = size, columns.host[5 * rows + row] = num_prompt;
      columns.host[6 * rows + row] = 1 + j, columns.host[7 * rows + row] = q % 4 ? ngram : 0;
      ids.host[row] = text[size - 1], indices.host[row] = row;
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
      const int n = columns.host[7 * rows + row];
      for (int i = 0; n > 0 && i + n <= size; ++i) {
        if (std::equal(text.begin() + i, text.begin() + i + n - 1, text.begin() + size - n + 1))
          x[text[i + n - 1]] = -INFINITY;
      }
    }
  }
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
  must(cuda::adjust_logits(p, {nullptr, true}));
  CHECK_CUDA(cudaDeviceSynchronize());
  logits.download(), history.download();
  int wrong = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const float got = logits.host[i], want = wanted[i];
    wrong += !(got == want || std::abs(got - want) <= 1e-5f * (1 + std::abs(want)));
  }
  for (int q = 0; q < requests; ++q) {
    if (q % 5 == 4) continue;
    wrong += !std::equal(texts[q].begin(), texts[q].end(),
                         &history.host[size_t(slots - 1 - q) * max_length]);
  }
  char name[160];
  std::snprintf(name, sizeof name, "adjust %3d rows of %d x %6d, %5d tokens of %5d, n-grams of %d",
                requests, per, vocab, length, alphabet, ngram);
  report(name, wrong, 0.5);
}

void check_long_histories() {
  for (int drafts : {0, 3}) {
    for (int length : {1, 2, 7, 100, 3000, 9001}) {
      check_adjust(11, drafts, 200, length, 7, 3);
      check_adjust(11, drafts, 200, length, 199, 1);
      check_adjust(6, drafts, 33000, length, 32000, 2);
    }
  }
}

template <class T>
void check_rows() {
  for (int hidden : {896, 4096, 5120, 100, 77}) {
    check_rms_norm<T>(5, hidden, true);
    check_rms_norm<T>(3, hidden, false);
    check_rms_norm<T>(4, hidden, false, true);
    check_gather<T>(9, hidden);
  }
  check_rms_norm<T>(300, 8192, true);
  check_rms_norm<T>(2, 40000, true);
}

void check_draws() {
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

}  // namespace

int main(int argc, char** argv) {
  const std::string part = argc > 1 ? argv[1] : "";
  if (part == "rows") {
    check_rows<float>();
    check_rows<__nv_bfloat16>();
    check_rows<__half>();
  } else if (part == "adjust") {
    check_long_histories();
  } else if (part == "sample") {
    check_draws();
  } else {
    std::printf("small_check rows|adjust|sample, got '%s'\n", part.c_str());
    return 2;
  }
  std::printf("%s: %d cases, %d failures\n", part.c_str(), cases, failures);
  return failures != 0;
}
