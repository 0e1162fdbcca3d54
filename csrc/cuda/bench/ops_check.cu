// Checks and times the small operators: ops_check [check|bench [TOKENS]|small]. No framework.
//
// embedding / gather_rows, rms_norm, silu_mul, rope_and_cache_write against float64, sample against
// the definition in regatta/sample.h. small: few shapes, for compute-sanitizer.
// Build: as attention_check.cu, with gather_rows.cu rms_norm.cu silu_mul.cu rope_and_cache_write.cu
//        sample.cu adjust_logits.cu verify_window.cu and --expt-relaxed-constexpr (philox.h).
#include <cstring>
#include <numeric>

#include "bench.cuh"
#include "kv_host.h"
#include "regatta/cuda_ops.h"
#include "regatta/philox.h"

using namespace regatta;

namespace {

int failures = 0;
std::mt19937 rng(11);

void must(const Status& status) {
  if (!status.ok()) {
    std::printf("%s\n", status.message().c_str());
    std::exit(1);
  }
}

template <class T>
T host_from(float x);
template <>
float host_from<float>(float x) {
  return x;
}
template <>
__nv_bfloat16 host_from<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__half host_from<__half>(float x) {
  return __float2half_rn(x);
}

template <class T>
struct Buffer {
  std::vector<T> host;
  T* device = nullptr;
  explicit Buffer(size_t n) : host(n) {
    CHECK_CUDA(cudaMalloc(&device, std::max<size_t>(n, 1) * sizeof(T)));
    CHECK_CUDA(cudaMemset(device, 0xff, n * sizeof(T)));
  }
  ~Buffer() { CHECK_CUDA(cudaFree(device)); }
  Buffer(const Buffer&) = delete;
  void upload() {
    CHECK_CUDA(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  void download() {
    CHECK_CUDA(cudaMemcpy(host.data(), device, host.size() * sizeof(T), cudaMemcpyDeviceToHost));
  }
  Buffer& random(float scale = 1.f) {
    std::normal_distribution<float> normal(0.f, scale);
    for (T& x : host) x = host_from<T>(normal(rng));
    upload();
    return *this;
  }
};

void report(const std::string& name, double error, double tolerance) {
  const bool ok = error < tolerance;
  failures += !ok;
  std::printf("%s%-58s %.1e\n", ok ? "" : "FAILED ", name.c_str(), error);
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
  Buffer<T> x(tokens * hidden), w(hidden), r(tokens * hidden), out(tokens * hidden),
      sum(tokens * hidden);
  x.random(), w.random(), r.random(2.f);
  RmsNormParams p = {x.device,   w.device,   with_residual ? r.device : nullptr,
                     out.device, sum.device, tokens,
                     hidden,     1e-5f,      cuda::Traits<T>::dtype};
  Buffer<int32_t> ids(tokens);  // backwards; the last is out of range
  for (int t = 0; t < tokens; ++t) ids.host[t] = t + 1 < tokens ? tokens - 1 - t : tokens;
  ids.upload();
  must(by_index ? cuda::rms_norm_rows(p, ids.device, tokens, {nullptr, true})
                : cuda::rms_norm(p, {nullptr, true}));
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
void check_silu_mul(int tokens, int size) {
  Buffer<T> x(2 * tokens * size), out(tokens * size);
  x.random(2.f);
  const SiluMulParams p = {x.device, out.device, tokens, size, cuda::Traits<T>::dtype};
  must(cuda::silu_mul(p, {nullptr, true}));
  CHECK_CUDA(cudaDeviceSynchronize());
  out.download();
  Error error;
  for (int t = 0; t < tokens; ++t) {
    for (int i = 0; i < size; ++i) {
      const double g = host_float(x.host[2 * t * size + i]),
                   u = host_float(x.host[(2 * t + 1) * size + i]);
      error.add(host_float(out.host[t * size + i]), g / (1 + std::exp(-g)) * u);
    }
  }
  report(std::string("silu_mul ") + dtype_name(cuda::Traits<T>::dtype) + " " +
             std::to_string(tokens) + " x " + std::to_string(size),
         error.value(), tolerance<T>());
}

template <class T>
void check_gather(int tokens, int hidden) {
  const int rows = 57;
  Buffer<T> table(rows * hidden), out(tokens * hidden);
  Buffer<int32_t> ids(tokens);
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

template <class T>
void check_rope(int tokens, int heads, int kv_heads, int dim, int rotary, int block_size,
                bool norms, KvFormat format = KvFormat::kDense) {
  const int all = heads + 2 * kv_heads, blocks = tokens / block_size + 3, positions = 300;
  Buffer<T> qkv(tokens * all * dim), qn(dim), kn(dim), q(tokens * heads * dim);
  const KvFormatInfo info = kv_format_info(format);
  const int64_t rows = int64_t{blocks} * kv_heads * block_size;
  const int64_t row_bytes = kv_row_bytes(format, dim, sizeof(T));
  Buffer<uint8_t> key(rows * row_bytes), value(key.host.size());
  Buffer<float> key_scale(info.scale_floats * (info.token_scales ? rows : kv_heads));
  Buffer<float> value_scale(key_scale.host.size());
  if (info.scale_floats > 0 && !info.token_scales) {
    for (auto* scale : {&key_scale, &value_scale}) {
      for (float& x : scale->host) x = format == KvFormat::kFp8 ? 0.1f : 0.2f;
      scale->upload();
    }
  }
  Buffer<int32_t> position(tokens), slot(tokens);
  Buffer<float> angles(positions * rotary);
  qkv.random(), qn.random(), kn.random();
  for (int p = 0; p < positions; ++p) {
    for (int i = 0; i < rotary / 2; ++i) {
      const double a = p * std::pow(10000.0, -2.0 * i / rotary);
      angles.host[p * rotary + i] = std::cos(a),
                               angles.host[p * rotary + rotary / 2 + i] = std::sin(a);
    }
  }
  std::vector<int> slots(blocks * block_size);
  std::iota(slots.begin(), slots.end(), 0);
  std::shuffle(slots.begin(), slots.end(), rng);
  for (int t = 0; t < tokens; ++t) {
    position.host[t] = rng() % positions;
    slot.host[t] = t % 7 == 3 ? -1 : slots[t];
  }
  angles.upload(), position.upload(), slot.upload();
  RopeAndCacheWriteParams p;
  p.dtype = cuda::Traits<T>::dtype;
  p.qkv = qkv.device, p.positions = position.device, p.slot_mapping = slot.device;
  p.rope_cache = angles.device;
  if (norms) p.q_norm = qn.device, p.k_norm = kn.device;
  p.cache = {key.device,       value.device,      blocks, block_size, format,
             key_scale.device, value_scale.device};
  p.q_out = q.device;
  p.num_tokens = tokens, p.num_heads = heads, p.num_kv_heads = kv_heads, p.head_dim = dim;
  p.rotary_dim = rotary, p.num_positions = positions, p.epsilon = 1e-6f;
  must(cuda::rope_and_cache_write(p, {nullptr, true}));
  CHECK_CUDA(cudaDeviceSynchronize());
  q.download(), key.download(), value.download(), key_scale.download(), value_scale.download();
  Error error;
  std::vector<bool> written(rows, false);
  double rounding = 0;  // largest distance from the value that was coded, in steps of the code
  for (int t = 0; t < tokens; ++t) {
    for (int h = 0; h < all; ++h) {
      std::vector<double> x(dim);
      double squares = 0;
      for (int d = 0; d < dim; ++d) {
        x[d] = host_float(qkv.host[(t * all + h) * dim + d]);
        squares += x[d] * x[d];
      }
      if (h < heads + kv_heads) {
        if (norms) {
          for (int d = 0; d < dim; ++d) {
            x[d] *= host_float((h < heads ? qn : kn).host[d]) / std::sqrt(squares / dim + 1e-6);
          }
        }
        for (int i = 0; i < rotary / 2; ++i) {
          const double c = angles.host[position.host[t] * rotary + i];
          const double s = angles.host[position.host[t] * rotary + rotary / 2 + i];
          const double a = x[i], b = x[i + rotary / 2];
          x[i] = a * c - b * s, x[i + rotary / 2] = b * c + a * s;
        }
      }
      const int s = slot.host[t];
      if (h >= heads && s < 0) continue;
      const int kv = h < heads + kv_heads ? h - heads : h - heads - kv_heads;
      const int64_t row = int64_t{s} / block_size * kv_heads * block_size +
                          int64_t{kv} * block_size + s % block_size;
      if (h >= heads) written[row] = true;
      for (int d = 0; d < dim; ++d) {
        if (h < heads) {
          error.add(host_float(q.host[(t * heads + h) * dim + d]), x[d]);
          continue;
        }
        const bool is_key = h < heads + kv_heads;
        double step;
        const double got = cache_element<T>(format, (is_key ? key : value).host.data(),
                                            (is_key ? key_scale : value_scale).host.data(), row, kv,
                                            d, dim, &step);
        if (format == KvFormat::kDense) {
          error.add(got, x[d]);
        } else if (!(std::abs(got - x[d]) <= 1e-5)) {
          rounding = std::max(rounding, std::abs(got - x[d]) / step);
          if (!std::isfinite(got)) rounding = INFINITY;
        }
      }
    }
  }
  bool stray = rounding > 0.501;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = row * row_bytes; i < (row + 1) * row_bytes && !written[row]; ++i) {
      stray = stray || key.host[i] != 0xff || value.host[i] != 0xff;
    }
  }
  report(std::string("rope ") + dtype_name(p.dtype) + " " + info.name + " T " +
             std::to_string(tokens) + " heads " + std::to_string(heads) + "/" +
             std::to_string(kv_heads) + " D " + std::to_string(dim) + "/" + std::to_string(rotary) +
             (norms ? " norms" : "") + (stray ? " STRAY WRITES OR ROUNDING" : ""),
         stray ? 1.0 : error.value(), tolerance<T>());
}

struct Draw {
  float temperature;
  int top_k;
  float top_p, min_p, typical_p = 1;
};

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

enum Kind { kNormal, kPeaked, kFlat, kEqual, kCoarse, kFew };
const char* kKindNames[] = {"normal", "peaked", "flat", "equal", "coarse", "few"};

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

void check_sample(int rows, int vocab, Kind kind, const Draw& d) {
  Buffer<float> logits(size_t(rows) * vocab), temperature(rows), top_p(rows), min_p(rows);
  Buffer<float> typical_p(rows);
  Buffer<int32_t> top_k(rows), tokens(rows);
  Buffer<int64_t> seeds(rows), offsets(rows);
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
  Buffer<float> logits(size_t(rows) * vocab);
  Buffer<int32_t> columns(size_t(8) * rows), ids(rows), indices(rows);
  Buffer<int32_t> history(size_t(slots) * max_length), rules(size_t(slots) * width);
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

void check_all(bool small) {
  for (int drafts : {0, 3}) {
    for (int length : {1, 2, 7, 100, 3000, 9001}) {
      if (small && length > 100) continue;
      check_adjust(11, drafts, 200, length, 7, 3);
      check_adjust(11, drafts, 200, length, 199, 1);
      check_adjust(6, drafts, 33000, length, 32000, 2);
    }
  }
  auto each = [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    for (int hidden : {896, 4096, 5120, 100, 77}) {
      check_rms_norm<T>(small ? 2 : 5, hidden, true);
      check_rms_norm<T>(3, hidden, false);
      check_rms_norm<T>(4, hidden, false, true);
      check_gather<T>(9, hidden);
      check_silu_mul<T>(3, hidden);
    }
    if (!small) check_rms_norm<T>(300, 8192, true);
    if (!small) check_rms_norm<T>(2, 40000, true);
    check_rope<T>(5, 4, 2, 64, 64, 16, false);
    check_rope<T>(19, 14, 2, 64, 64, 32, true);
    check_rope<T>(9, 8, 1, 80, 80, 16, false);
    check_rope<T>(9, 8, 8, 80, 20, 16, true);
    check_rope<T>(9, 8, 2, 96, 96, 64, true);
    check_rope<T>(9, 32, 8, 128, 128, 128, true);
    check_rope<T>(9, 4, 1, 256, 128, 64, true);
    if (!small) check_rope<T>(600, 32, 8, 128, 128, 64, false);
    for (KvFormat format :
         {KvFormat::kInt8Static, KvFormat::kInt8Dynamic, KvFormat::kFp8, KvFormat::kInt4}) {
      check_rope<T>(9, 8, 2, 64, 64, 16, true, format);
      check_rope<T>(9, 8, 8, 80, 20, 32, true, format);
      check_rope<T>(9, 32, 8, 128, 128, 64, false, format);
      check_rope<T>(5, 4, 1, 256, 128, 128, true, format);
      if (!small) check_rope<T>(600, 8, 2, 96, 96, 64, false, format);
      if (!small) check_rope<T>(9, 4, 2, 36, 36, 16, true, format);
    }
  };
  each(static_cast<float*>(nullptr));
  each(static_cast<__nv_bfloat16*>(nullptr));
  each(static_cast<__half*>(nullptr));
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
      if (small && vocab > 1000) continue;
      for (Kind kind : {kNormal, kPeaked, kFlat, kEqual, kCoarse, kFew}) {
        if (vocab > 100000 && kind == kCoarse) continue;
        if (vocab < 1000 && kind == kFew) continue;  // a row would have no token
        check_sample(vocab > 1000 ? 6 : 20, vocab, kind, d);
      }
    }
    if (!small) check_sample(150, 32000, kNormal, d);
    if (!small) check_sample(600, 4001, kPeaked, d);
  }
  std::printf("%d failures\n", failures);
}

// Microseconds per call: 8 calls in a graph, median of replays.
double time_calls(const std::function<void(int, cudaStream_t)>& call, int calls = 8) {
  return 1e3 / calls *
         bench::graph_ms(
             [&](cudaStream_t stream) {
               for (int i = 0; i < calls; ++i) call(i, stream);
             },
             10, 4);
}

// Drafts of one rank in each row, in spans of 8 rows.
void bench_verify(int rows, int vocab, int rank, int top_k) {
  Buffer<float> logits(size_t(rows) * vocab), floats(size_t(3) * rows);
  Buffer<int32_t> top_ks(rows), num_drafts(rows), ids(rows + 1), indices(rows), verdicts(rows);
  Buffer<int32_t> drawn(rows);
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
      time_calls([&](int, cudaStream_t s) { must(cuda::verify_window(p, {s, true})); });
  std::printf("verify_window %4d x %d, rank %d, top_k %2d: %7.2f us\n", rows, vocab, rank, top_k,
              us);
}

void bench_all(const std::vector<int>& lengths) {
  using T = __nv_bfloat16;
  const DType dtype = DType::kBFloat16;
  for (int tokens : lengths) {
    const int hidden = 4096, inner = 14336, heads = 32, kv = 8, dim = 128;
    const int copies = tokens > 1000 ? 3 : 8;
    Buffer<T> x(size_t(copies) * tokens * hidden), w(hidden), r(size_t(copies) * tokens * hidden);
    Buffer<T> out(tokens * hidden), gate_up(size_t(copies) * tokens * 2 * inner),
        act(size_t(tokens) * inner);
    Buffer<T> qkv(size_t(copies) * tokens * 6144), q(tokens * 4096);
    Buffer<T> key(size_t(8192 + 64) * kv * dim), value(key.host.size());
    Buffer<int32_t> position(tokens), slot(tokens), ids(tokens);
    Buffer<float> angles(8192 * dim);
    for (int t = 0; t < tokens; ++t) position.host[t] = slot.host[t] = t, ids.host[t] = t;
    position.upload(), slot.upload(), ids.upload();
    for (void* p : {(void*)x.device, (void*)r.device})
      CHECK_CUDA(cudaMemset(p, 0x3c, x.host.size() * 2));
    double us = time_calls([&](int i, cudaStream_t s) {
      const size_t at = size_t(i % copies) * tokens * hidden;
      must(cuda::rms_norm({x.device + at, w.device, r.device + at, out.device, r.device + at,
                           tokens, hidden, 1e-5f, dtype},
                          {s, true}));
    });
    std::printf("rms_norm + residual %5d x 4096: %7.2f us %.2f TB/s\n", tokens, us,
                8.0 * tokens * hidden / us / 1e6);
    us = time_calls([&](int i, cudaStream_t s) {
      must(cuda::silu_mul({gate_up.device + size_t(i % copies) * tokens * 2 * inner, act.device,
                           tokens, inner, dtype},
                          {s, true}));
    });
    std::printf("silu_mul            %5d x 14336: %6.2f us %.2f TB/s\n", tokens, us,
                6.0 * tokens * inner / us / 1e6);
    us = time_calls([&](int i, cudaStream_t s) {
      RopeAndCacheWriteParams p;
      p.dtype = dtype;
      p.qkv = qkv.device + size_t(i % copies) * tokens * 6144;
      p.positions = position.device, p.slot_mapping = slot.device, p.rope_cache = angles.device;
      p.cache = {key.device, value.device, 8192 / 64, 64};
      p.q_out = q.device;
      p.num_tokens = tokens, p.num_heads = heads, p.num_kv_heads = kv, p.head_dim = dim;
      p.rotary_dim = dim, p.num_positions = 8192;
      must(cuda::rope_and_cache_write(p, {s, true}));
    });
    std::printf("rope + cache write  %5d x 6144: %7.2f us %.2f TB/s\n", tokens, us,
                4.0 * tokens * 6144 / us / 1e6);
    us = time_calls([&](int i, cudaStream_t s) {
      must(cuda::embedding({ids.device, x.device + size_t(i % copies) * tokens * hidden, out.device,
                            tokens, tokens, hidden, false, dtype},
                           {s, true}));
    });
    std::printf("embedding           %5d x 4096: %7.2f us %.2f TB/s\n", tokens, us,
                4.0 * tokens * hidden / us / 1e6);
  }
  const int vocab = 128256;
  for (int rows : {1, 64, 256}) {
    for (int length : {200, 2000, 8000}) {
      Buffer<float> logits(size_t(rows) * vocab);
      Buffer<int32_t> columns(size_t(8) * rows), ids(rows), indices(rows);
      Buffer<int32_t> history(size_t(rows) * 8192), rules(size_t(rows) * 64);
      for (int32_t& token : history.host) token = rng() % vocab;
      const float ones[3] = {1.1f, 0.1f, 0.1f};
      for (int r = 0; r < rows; ++r) {
        for (int i = 0; i < 3; ++i) std::memcpy(&columns.host[i * rows + r], &ones[i], 4);
        columns.host[3 * rows + r] = indices.host[r] = r, columns.host[4 * rows + r] = length;
        columns.host[5 * rows + r] = length / 2, columns.host[6 * rows + r] = 1;
        columns.host[7 * rows + r] = 3;
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
      p.rules = rules.device, p.num_rows = rows, p.vocab_size = vocab, p.max_length = 8192;
      p.rules_width = 64;
      const double us =
          time_calls([&](int, cudaStream_t s) { must(cuda::adjust_logits(p, {s, true})); });
      std::printf("adjust %3d x %d, %4d tokens, penalties and 3-grams: %7.2f us\n", rows, vocab,
                  length, us);
    }
  }
  for (int rows : {8, 64, 512}) {
    for (int rank : {0, 2}) bench_verify(rows, vocab, rank, 0);
    bench_verify(rows, vocab, 2, 50);
  }
  for (Kind kind : {kNormal, kPeaked}) {
    for (int rows : {1, 8, 32, 64, 128, 256}) {
      Buffer<float> logits(size_t(rows) * vocab), temperature(rows), top_p(rows), typical_p(rows);
      Buffer<int32_t> top_k(rows), tokens(rows);
      Buffer<int64_t> seeds(rows), offsets(rows);
      std::vector<float> one(vocab * 4);
      fill_logits(one, vocab, kind);
      for (int r = 0; r < rows; ++r)
        std::copy_n(&one[r % 4 * vocab], vocab, &logits.host[size_t(r) * vocab]);
      logits.upload();
      std::printf("sample %-6s %3d x 128256:", kKindNames[kind], rows);
      for (const Draw& d : {Draw{0, 0, 1, 0}, Draw{1, 0, 1, 0}, Draw{1, 0, 0.9f, 0},
                            Draw{0.7f, 50, 0.9f, 0}, Draw{1, 0, 1, 0, 0.9f}}) {
        for (int r = 0; r < rows; ++r) {
          typical_p.host[r] = d.typical_p;
          temperature.host[r] = d.temperature, top_k.host[r] = d.top_k, top_p.host[r] = d.top_p;
          seeds.host[r] = r, offsets.host[r] = r;
        }
        temperature.upload(), top_p.upload(), top_k.upload(), seeds.upload(), offsets.upload();
        typical_p.upload();
        SampleParams p;
        p.typical_p = typical_p.device;
        p.logits = logits.device, p.temperature = temperature.device, p.top_k = top_k.device;
        p.top_p = top_p.device, p.seeds = seeds.device, p.offsets = offsets.device;
        p.token_ids = tokens.device, p.num_rows = rows, p.vocab_size = vocab;
        const double us =
            time_calls([&](int, cudaStream_t s) { must(cuda::sample(p, {s, true})); });
        std::printf("  T %.1f k %2d p %.1f typical %.1f %7.2f us", d.temperature, d.top_k, d.top_p,
                    d.typical_p, us);
      }
      std::printf("\n");
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "check";
  if (mode == "bench") {
    bench_all(argc > 2 ? std::vector<int>{std::atoi(argv[2])} : std::vector<int>{1, 32, 128, 8192});
  } else {
    check_all(mode == "small");
  }
  return failures != 0;
}
