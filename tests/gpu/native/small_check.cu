// Checks what works on rows (norms, activations, sums, embeddings, rotary embedding and cache
// writes, the last of logits) against float64, sample against the definition in regatta/sample.h,
// and adjust_logits against plain loops over long histories.
//
//   small_check rows|adjust|sample
#include "cuda/sampling/finish_logits.h"
#include "kv_host.h"
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

struct Norm {
  bool residual = false, by_index = false;
  NormKind kind = NormKind::kRms;
  bool weight = true, bias = false, plus_one = false;
};

template <class T>
void check_norm(int tokens, int hidden, const Norm& norm) {
  Twin<T> x(tokens * hidden), w(hidden), b(hidden), r(tokens * hidden), out(tokens * hidden),
      sum(tokens * hidden);
  x.random(), w.random(), b.random(), r.random(2.f);
  if (norm.kind == NormKind::kLayer) {  // a mean that a difference of squares would suffer from
    for (T& each : x.host) each = host_from<T>(host_float(each) + 100.f);
    x.upload();
  }
  NormParams p;
  p.x = x.device, p.out = out.device, p.residual_out = sum.device;
  if (norm.weight) p.weight = w.device;
  if (norm.bias) p.bias = b.device;
  if (norm.residual) p.residual = r.device;
  p.num_tokens = tokens, p.hidden_size = hidden, p.epsilon = 1e-5f;
  p.dtype = cuda::Traits<T>::dtype, p.kind = norm.kind, p.plus_one = norm.plus_one;
  Twin<int32_t> ids(tokens);  // backwards; the last is out of range
  for (int t = 0; t < tokens; ++t) ids.host[t] = t + 1 < tokens ? tokens - 1 - t : tokens;
  ids.upload();
  must(norm.by_index ? cuda::norm_rows(p, ids.device, tokens, {nullptr, true})
                     : cuda::norm(p, {nullptr, true}));
  CHECK_CUDA(cudaDeviceSynchronize());
  out.download(), sum.download();
  Error error;
  for (int t = 0; t < tokens; ++t) {
    double total = 0, squares = 0;
    const int id = norm.by_index ? ids.host[t] : t;
    for (int i = t * hidden; i < (t + 1) * hidden; ++i) {
      const float source = id < tokens ? host_float(x.host[i + (id - t) * hidden]) : 0.f;
      const float v = source + (norm.residual ? host_float(r.host[i]) : 0.f);
      const float rounded = host_float(host_from<T>(v));
      error.add(host_float(sum.host[i]), rounded);
      total += rounded;
    }
    const double mean = norm.kind == NormKind::kLayer ? total / hidden : 0;
    for (int i = t * hidden; i < (t + 1) * hidden; ++i) {
      const double left = host_float(sum.host[i]) - mean;
      squares += left * left;
    }
    const double scale = 1 / std::sqrt(squares / hidden + 1e-5);
    for (int i = 0; i < hidden; ++i) {
      double factor = 1;
      if (norm.weight) factor = host_float(w.host[i]) + (norm.plus_one ? 1. : 0.);
      error.add(host_float(out.host[t * hidden + i]),
                scale * (host_float(sum.host[t * hidden + i]) - mean) * factor +
                    (norm.bias ? host_float(b.host[i]) : 0.));
    }
  }
  report(std::string(norm.kind == NormKind::kLayer ? "layer norm " : "norm ") +
             dtype_name(p.dtype) + " " + std::to_string(tokens) + " x " + std::to_string(hidden) +
             (norm.residual ? " + residual" : "") + (norm.by_index ? " by index" : "") +
             (norm.weight ? "" : " no weight") + (norm.bias ? " bias" : "") +
             (norm.plus_one ? " plus one" : ""),
         error.value(),
         norm.kind == NormKind::kLayer ? std::max(1e-4, tolerance<T>()) : tolerance<T>());
}

double apply(Function function, double x) {
  switch (function) {
    case Function::kSilu:
      return x / (1 + std::exp(-x));
    case Function::kGelu:
      return x / 2 * (1 + std::erf(x / std::sqrt(2.)));
    case Function::kGeluTanh:
      return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Function::kRelu:
      return std::max(x, 0.);
    case Function::kReluSquared:
      return std::max(x, 0.) * std::max(x, 0.);
  }
  return NAN;
}

// large: gates where exponentials are infinite or nothing.
template <class T>
void check_activate(int tokens, int size, Function function, bool gated, bool large) {
  const int width = gated ? 2 * size : size;
  Twin<T> x(tokens * width), out(tokens * size);
  x.random(2.f);
  if (large) {
    for (int i = 0; i < tokens * width; ++i) {
      const bool is_gate = i % width < size;
      x.host[i] = host_from<T>(!is_gate ? 1.f : i % 3 == 0 ? 200.f : -200.f);
    }
    x.upload();
  }
  ActivateParams p;
  p.x = x.device, p.out = out.device, p.num_tokens = tokens, p.intermediate_size = size;
  p.dtype = cuda::Traits<T>::dtype;
  p.activation.function = function, p.activation.gated = gated;
  must(cuda::activate(p, {nullptr, true}));
  CHECK_CUDA(cudaDeviceSynchronize());
  out.download();
  Error error;
  for (int t = 0; t < tokens; ++t) {
    for (int i = 0; i < size; ++i) {
      const double gate = apply(function, host_float(x.host[t * width + i]));
      error.add(host_float(out.host[t * size + i]),
                gated ? gate * host_float(x.host[t * width + size + i]) : gate);
    }
  }
  report("activate " + std::to_string(static_cast<int>(function)) + " " + dtype_name(p.dtype) +
             " " + std::to_string(tokens) + " x " + std::to_string(size) + (gated ? " gated" : "") +
             (large ? " large" : ""),
         error.value(), 3 * tolerance<T>());
}

// in_place: 0 no, 1 over a, 2 over b.
template <class T>
void check_add(int count, bool adds, float a_scale, float b_scale, int in_place) {
  Twin<T> a(count), b(count), out(count);
  a.random(), b.random();
  Twin<T>& to = in_place == 1 ? a : in_place == 2 ? b : out;
  const std::vector<T> a_before = a.host, b_before = b.host;
  AddParams p;
  p.a = a.device, p.out = to.device, p.count = count;
  if (adds) p.b = b.device;
  p.a_scale = a_scale, p.b_scale = b_scale, p.dtype = cuda::Traits<T>::dtype;
  must(cuda::add(p, {nullptr, true}));
  CHECK_CUDA(cudaDeviceSynchronize());
  to.download();
  Error error;
  for (int i = 0; i < count; ++i) {
    error.add(host_float(to.host[i]), double(a_scale) * host_float(a_before[i]) +
                                          (adds ? double(b_scale) * host_float(b_before[i]) : 0));
  }
  report(std::string("add ") + dtype_name(p.dtype) + " " + std::to_string(count) +
             (adds ? "" : " alone") + " in place " + std::to_string(in_place),
         error.value(), tolerance<T>());
}

template <class T>
void check_embedding(int tokens, int hidden, float scale, bool learned) {
  const int rows = 57, places = 11;
  Twin<T> table(rows * hidden), positions(places * hidden), out(tokens * hidden);
  Twin<int32_t> ids(tokens), at(tokens);
  table.random(), positions.random();
  for (auto& id : ids.host) id = static_cast<int>(rng() % (rows + 2)) - 1;  // -1 and rows: zeros
  for (auto& each : at.host) each = static_cast<int>(rng() % (places + 3)) - 1;
  ids.upload(), at.upload();
  EmbeddingParams p = {ids.device, table.device, out.device, tokens,
                       rows,       hidden,       false,      cuda::Traits<T>::dtype};
  p.scale = scale;
  if (learned) {
    p.position_table = positions.device, p.positions = at.device;
    p.num_positions = places;
  }
  must(cuda::embedding(p, {nullptr, true}));
  CHECK_CUDA(cudaDeviceSynchronize());
  out.download();
  Error error;
  for (int t = 0; t < tokens; ++t) {
    for (int i = 0; i < hidden; ++i) {
      const int id = ids.host[t], place = at.host[t];
      double want = 0;
      if (id >= 0 && id < rows) want += double(scale) * host_float(table.host[id * hidden + i]);
      if (learned && place >= 0 && place < places) {
        want += host_float(positions.host[place * hidden + i]);
      }
      error.add(host_float(out.host[t * hidden + i]), want);
    }
  }
  const bool exact = scale == 1.f && !learned;
  report(std::string("embedding ") + dtype_name(p.dtype) + " " + std::to_string(tokens) + " x " +
             std::to_string(hidden) + (exact ? "" : " scaled") + (learned ? " + positions" : ""),
         error.value(), exact ? 1e-9 : tolerance<T>());
}

template <class T>
void check_finish_logits(int rows, int vocab, bool bias, float scale, float softcap) {
  Twin<float> logits(size_t(rows) * vocab);
  Twin<T> biases(vocab);
  logits.random(20.f), biases.random();
  const std::vector<float> before = logits.host;
  must(cuda::finish_logits({logits.device, bias ? biases.device : nullptr, rows, vocab, scale,
                            softcap, cuda::Traits<T>::dtype},
                           {nullptr, true}));
  CHECK_CUDA(cudaDeviceSynchronize());
  logits.download();
  Error error;
  for (int i = 0; i < rows * vocab; ++i) {
    double want = scale * (before[i] + (bias ? double(host_float(biases.host[i % vocab])) : 0.));
    if (softcap > 0) want = softcap * std::tanh(want / softcap);
    error.add(logits.host[i], want);
  }
  report(std::string("logits ") + dtype_name(cuda::Traits<T>::dtype) + " " + std::to_string(rows) +
             " x " + std::to_string(vocab),
         error.value(), 1e-6);
}

// What rope_and_cache_write may do to a head.
struct Rope {
  int heads, kv_heads, dim, rotary;
  bool rotates = true, query_table = false, interleaved = false;
  bool norms = false, whole = false, plus_one = false;
  KvFormat format = KvFormat::kDense;
};

template <class T>
void check_rope(int tokens, const Rope& rope) {
  const int all = rope.heads + 2 * rope.kv_heads, dim = rope.dim, num_positions = 40;
  const int block_size = 16, num_blocks = tokens / block_size + 3;
  const int64_t rows = int64_t{num_blocks} * rope.kv_heads * block_size;
  const KvFormatInfo info = kv_format_info(rope.format);
  const int64_t row_bytes = kv_row_bytes(rope.format, dim, sizeof(T));
  const int64_t num_scales = 1 + info.scale_floats * (info.token_scales ? rows : rope.kv_heads);
  Twin<T> qkv(size_t(tokens) * all * dim), q_out(size_t(tokens) * rope.heads * dim);
  Twin<T> q_norm(size_t(rope.whole ? rope.heads : 1) * dim);
  Twin<T> k_norm(size_t(rope.whole ? rope.kv_heads : 1) * dim);
  Twin<float> table(num_positions * rope.rotary), query_table(num_positions * rope.rotary);
  Twin<float> key_scale(num_scales), value_scale(num_scales);
  Twin<uint8_t> key(rows * row_bytes), value(rows * row_bytes);
  Twin<int32_t> positions(tokens), slots(tokens);
  qkv.random(), q_norm.random(0.5f), k_norm.random(0.5f);
  for (Twin<float>* each : {&table, &query_table}) {
    for (int i = 0; i < num_positions * rope.rotary; ++i) {
      const int half = rope.rotary / 2, column = i % rope.rotary;
      const double angle = (i / rope.rotary + 1) * std::pow(100., -(column % half) / double(half)) *
                           (each == &table ? 1 : 0.7);
      each->host[i] = static_cast<float>(column < half ? std::cos(angle) : std::sin(angle));
    }
    each->upload();
  }
  if (!info.token_scales) {
    for (Twin<float>* each : {&key_scale, &value_scale}) {
      for (float& x : each->host) x = rope.format == KvFormat::kFp8 ? 0.7f : 0.2f;
      each->upload();
    }
  }
  std::vector<int> free_slots(num_blocks * block_size);
  std::iota(free_slots.begin(), free_slots.end(), 0);
  std::shuffle(free_slots.begin(), free_slots.end(), rng);
  for (int t = 0; t < tokens; ++t) {
    positions.host[t] = rng() % num_positions;
    slots.host[t] = t % 7 == 2 ? -1 : free_slots[t];
  }
  positions.upload(), slots.upload();
  RopeAndCacheWriteParams p;
  p.dtype = cuda::Traits<T>::dtype, p.qkv = qkv.device;
  p.positions = positions.device, p.slot_mapping = slots.device;
  if (rope.rotates) p.rope_cache = table.device;
  if (rope.query_table) p.query_rope_cache = query_table.device;
  if (rope.norms) p.q_norm = q_norm.device, p.k_norm = k_norm.device;
  p.cache.key = key.device, p.cache.value = value.device, p.cache.num_blocks = num_blocks;
  p.cache.block_size = block_size, p.cache.format = rope.format;
  p.cache.key_scale = key_scale.device, p.cache.value_scale = value_scale.device;
  p.q_out = q_out.device, p.num_tokens = tokens, p.num_heads = rope.heads;
  p.num_kv_heads = rope.kv_heads, p.head_dim = dim, p.rotary_dim = rope.rotary;
  p.num_positions = num_positions, p.epsilon = 1e-5f, p.plus_one = rope.plus_one;
  p.whole = rope.whole, p.interleaved = rope.interleaved;
  must(cuda::rope_and_cache_write(p, {nullptr, true}));
  CHECK_CUDA(cudaDeviceSynchronize());
  q_out.download(), key.download(), value.download(), key_scale.download(), value_scale.download();
  Error error;
  std::vector<uint8_t> written(rows, 0);
  int wrong = 0;
  for (int t = 0; t < tokens; ++t) {
    for (int h = 0; h < all; ++h) {
      const bool is_query = h < rope.heads, is_value = h >= rope.heads + rope.kv_heads;
      const int kv_head = is_query ? 0 : (h - rope.heads) % rope.kv_heads;
      const int in_kind = is_query ? h : kv_head;
      const T* source = &qkv.host[(size_t(t) * all + h) * dim];
      std::vector<double> x(dim);
      for (int d = 0; d < dim; ++d) x[d] = host_float(source[d]);
      if (rope.norms && !is_value) {
        const int count = rope.whole ? (is_query ? rope.heads : rope.kv_heads) * dim : dim;
        const T* from = rope.whole ? source - size_t(in_kind) * dim : source;
        double squares = 0;
        for (int d = 0; d < count; ++d)
          squares += double(host_float(from[d])) * host_float(from[d]);
        const double scale = 1 / std::sqrt(squares / count + 1e-5);
        const std::vector<T>& weight = is_query ? q_norm.host : k_norm.host;
        for (int d = 0; d < dim; ++d) {
          const double w = host_float(weight[(rope.whole ? in_kind * dim : 0) + d]);
          x[d] *= scale * (rope.plus_one ? 1 + w : w);
        }
      }
      if (rope.rotates && !is_value) {
        const int half = rope.rotary / 2;
        const std::vector<float>& angles =
            is_query && rope.query_table ? query_table.host : table.host;
        const float* row = &angles[size_t(positions.host[t]) * rope.rotary];
        for (int i = 0; i < half; ++i) {
          const int first = rope.interleaved ? 2 * i : i;
          const int second = rope.interleaved ? 2 * i + 1 : i + half;
          const double a = x[first], b = x[second];
          x[first] = a * row[i] - b * row[half + i];
          x[second] = b * row[i] + a * row[half + i];
        }
      }
      if (is_query) {
        for (int d = 0; d < dim; ++d) {
          error.add(host_float(q_out.host[(size_t(t) * rope.heads + h) * dim + d]), x[d]);
        }
        continue;
      }
      if (slots.host[t] < 0) continue;
      const int slot = slots.host[t];
      const int64_t row =
          (int64_t{slot / block_size} * rope.kv_heads + kv_head) * block_size + slot % block_size;
      written[row] = 1;
      for (int d = 0; d < dim; ++d) {
        double step = 0;
        const float got =
            cache_element<T>(rope.format, is_value ? value.host.data() : key.host.data(),
                             is_value ? value_scale.host.data() : key_scale.host.data(), row,
                             kv_head, d, dim, &step);
        if (rope.format == KvFormat::kDense) {
          error.add(got, x[d]);
        } else {
          wrong += !(std::abs(got - x[d]) <= 0.51 * step + 1e-4 * (1 + std::abs(x[d])));
        }
      }
    }
  }
  for (int64_t row = 0; row < rows; ++row) {
    if (written[row]) continue;
    for (int64_t i = row * row_bytes; i < (row + 1) * row_bytes; ++i) {
      wrong += key.host[i] != 0xff || value.host[i] != 0xff;
    }
  }
  char name[200];
  std::snprintf(name, sizeof name,
                "rope %s %s %d tokens, %d/%d heads of %d/%d%s%s%s%s%s%s: %d wrong",
                dtype_name(p.dtype), info.name, tokens, rope.heads, rope.kv_heads, dim, rope.rotary,
                rope.rotates ? "" : " not rotated", rope.query_table ? " own queries" : "",
                rope.interleaved ? " interleaved" : "", rope.norms ? " norms" : "",
                rope.whole ? " whole" : "", rope.plus_one ? " plus one" : "", wrong);
  report(name, error.value() + wrong, 2 * tolerance<T>());
}

template <class T>
void check_ropes() {
  int device = 0, major = 0, minor = 0;
  CHECK_CUDA(cudaGetDevice(&device));
  CHECK_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  CHECK_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  for (int what = 0; what < 64; ++what) {
    Rope rope = {8, 2, 128, 128};
    rope.rotates = what % 4 != 3, rope.query_table = what % 4 == 2, rope.interleaved = what & 4;
    rope.norms = what & 8, rope.whole = what & 16, rope.plus_one = what & 32;
    if (!rope.rotates && rope.interleaved) continue;
    if (!rope.norms && (rope.whole || rope.plus_one)) continue;
    check_rope<T>(5, rope);
    rope.rotary = 64;  // partly
    check_rope<T>(3, rope);
    rope.dim = 80, rope.rotary = 20;  // the kernel for odd sizes
    check_rope<T>(5, rope);
    rope.heads = 30, rope.kv_heads = 6, rope.dim = rope.rotary = 64;  // several heads a thread
    check_rope<T>(520, rope);
  }
  for (KvFormat format :
       {KvFormat::kInt8Static, KvFormat::kInt8Dynamic, KvFormat::kInt4, KvFormat::kFp8}) {
    if (format == KvFormat::kFp8 && major * 10 + minor < 89) continue;
    for (int dim : {128, 256, 20}) {
      Rope rope = {6, 2, dim, dim == 20 ? 12 : dim};
      rope.format = format;
      check_rope<T>(9, rope);
      rope.interleaved = rope.query_table = rope.norms = rope.plus_one = true;
      check_rope<T>(9, rope);
      rope.whole = true, rope.rotates = rope.interleaved = rope.query_table = false;
      check_rope<T>(9, rope);
    }
  }
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
    check_norm<T>(5, hidden, {true});
    check_norm<T>(3, hidden, {});
    check_norm<T>(4, hidden, {false, true});
    for (NormKind kind : {NormKind::kRms, NormKind::kLayer}) {
      for (int what = 0; what < 8; ++what) {
        const bool bias = what & 1, plus_one = what & 2, weight = !(what & 4);
        check_norm<T>(3, hidden, {false, false, kind, weight, bias, plus_one});
        check_norm<T>(5, hidden, {true, false, kind, weight, bias, plus_one});
        check_norm<T>(4, hidden, {false, true, kind, weight, bias, plus_one});
      }
    }
    check_embedding<T>(9, hidden, 1.f, false);
    check_embedding<T>(40, hidden, 1.f, true);
    check_embedding<T>(40, hidden, 3.5f, false);
    check_embedding<T>(40, hidden, 3.5f, true);
    for (int function = 0; function < kNumFunctions; ++function) {
      for (bool gated : {false, true}) {
        check_activate<T>(7, hidden, static_cast<Function>(function), gated, false);
        check_activate<T>(2, hidden, static_cast<Function>(function), gated, true);
      }
    }
  }
  for (NormKind kind : {NormKind::kRms, NormKind::kLayer}) {
    const Norm norm = {true, false, kind, true, kind == NormKind::kLayer};
    check_norm<T>(300, 8192, norm);
    check_norm<T>(2, 24576, norm);
    check_norm<T>(2, 40000, norm);
  }
  for (int count : {1, 7, 8, 4096, 4099, 100000}) {
    check_add<T>(count, false, 0.3f, 5.f, 0);
    check_add<T>(count, true, 1.f, 1.f, 0);
    for (int in_place : {0, 1, 2}) check_add<T>(count, true, -1.5f, 0.25f, in_place);
  }
  for (int vocab : {5, 2049, 50000}) {
    check_finish_logits<T>(3, vocab, true, 1.f, 0.f);
    check_finish_logits<T>(3, vocab, false, 0.125f, 0.f);
    check_finish_logits<T>(3, vocab, true, 2.f, 30.f);
  }
  check_ropes<T>();
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
