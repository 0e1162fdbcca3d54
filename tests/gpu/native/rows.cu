// What works on rows (norms, activations, sums, embeddings, the last of logits, rotary embedding
// and cache writes) against float64.
//
//   rows check float32|bfloat16|float16
#include "cuda/sampling/finish_logits.h"
#include "paged_batch.cuh"
#include "regatta/cuda_ops.h"

using namespace regatta;
using namespace regatta::native;

namespace {

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
  CHECK_STATUS(norm.by_index ? cuda::norm_rows(p, ids.device, tokens, {nullptr, true})
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
  const bool layer = norm.kind == NormKind::kLayer;
  count_error(format("%snorm %s %d x %d residual %d by index %d weight %d bias %d plus one %d",
                     layer ? "layer " : "", dtype_name(p.dtype), tokens, hidden, norm.residual,
                     norm.by_index, norm.weight, norm.bias, norm.plus_one),
              error.value(), layer ? std::max(1e-4, tolerance<T>()) : tolerance<T>());
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
  CHECK_STATUS(cuda::activate(p, {nullptr, true}));
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
  count_error(format("activate %d %s %d x %d gated %d large %d", static_cast<int>(function),
                     dtype_name(p.dtype), tokens, size, gated, large),
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
  CHECK_STATUS(cuda::add(p, {nullptr, true}));
  CHECK_CUDA(cudaDeviceSynchronize());
  to.download();
  Error error;
  for (int i = 0; i < count; ++i) {
    error.add(host_float(to.host[i]), double(a_scale) * host_float(a_before[i]) +
                                          (adds ? double(b_scale) * host_float(b_before[i]) : 0));
  }
  count_error(
      format("add %s %d, of two %d, in place %d", dtype_name(p.dtype), count, adds, in_place),
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
  CHECK_STATUS(cuda::embedding(p, {nullptr, true}));
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
  count_error(format("embedding %s %d x %d scale %g positions %d", dtype_name(p.dtype), tokens,
                     hidden, scale, learned),
              error.value(), exact ? 1e-9 : tolerance<T>());
}

template <class T>
void check_finish_logits(int rows, int vocab, bool bias, float scale, float softcap) {
  Twin<float> logits(size_t(rows) * vocab);
  Twin<T> biases(vocab);
  logits.random(20.f), biases.random();
  const std::vector<float> before = logits.host;
  CHECK_STATUS(cuda::finish_logits({logits.device, bias ? biases.device : nullptr, rows, vocab,
                                    scale, softcap, cuda::Traits<T>::dtype},
                                   {nullptr, true}));
  CHECK_CUDA(cudaDeviceSynchronize());
  logits.download();
  Error error;
  for (int i = 0; i < rows * vocab; ++i) {
    double want = scale * (before[i] + (bias ? double(host_float(biases.host[i % vocab])) : 0.));
    if (softcap > 0) want = softcap * std::tanh(want / softcap);
    error.add(logits.host[i], want);
  }
  count_error(format("logits %s %d x %d", dtype_name(cuda::Traits<T>::dtype), rows, vocab),
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
  CHECK_STATUS(cuda::rope_and_cache_write(p, {nullptr, true}));
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
  count_error(
      format("rope %s %s %d tokens, %d/%d heads of %d/%d rotates %d own queries %d interleaved %d "
             "norms %d whole %d plus one %d: %d wrong",
             dtype_name(p.dtype), info.name, tokens, rope.heads, rope.kv_heads, dim, rope.rotary,
             rope.rotates, rope.query_table, rope.interleaved, rope.norms, rope.whole,
             rope.plus_one, wrong),
      error.value() + wrong, 2 * tolerance<T>());
}

template <class T>
void check_ropes() {
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
    if (format == KvFormat::kFp8 && architecture() < 89) continue;
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

template <class T>
void check_rows(const Words&) {
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

}  // namespace

int main(int argc, char** argv) {
  return run_parts(argc, argv,
                   {{"check", "float32", check_rows<float>},
                    {"check", "bfloat16", check_rows<__nv_bfloat16>},
                    {"check", "float16", check_rows<__half>}});
}
