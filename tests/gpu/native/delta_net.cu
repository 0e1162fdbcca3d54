// The delta net between its products, every way, against a twin that goes token by token in double;
// how spans are cut; the short convolution; and their times.
//
//   delta_net check any|steps|chunks|cuts|extremes|long|conv
//   delta_net time decode [REQUESTS...]
//   delta_net time prefill [TOKENS...]
#include <omp.h>

#include "cuda/states/delta_net.h"
#include "cuda/states/short_conv.h"
#include "native.cuh"

using namespace regatta;
using namespace regatta::native;

namespace {

struct SpanOf {
  int before, length;  // tokens of the request ahead of the step, and in it
  bool keeps = true;
};

// A delta net's tensors, rounded as the kernels read them.
template <class T>
struct Net {
  DeltaNetBlock block;
  Twin<float> conv, conv_bias, decay_log, step_bias, skip, out_norm;

  explicit Net(const DeltaNetBlock& b)
      : block(b),
        conv(b.conv_width * b.conv_size()),
        conv_bias(b.conv_size()),
        decay_log(b.num_value_heads),
        step_bias(b.decay_size()),
        skip(b.num_value_heads),
        out_norm(b.norm_groups > 0 ? b.value_size() : b.value_dim) {
    conv.random(0.6f), conv_bias.random(0.2f), decay_log.random(0.5f);
    step_bias.random(1.f), skip.random(), out_norm.random(0.3f);
    for (float& x : out_norm.host) x += 1.f;
    out_norm.upload();
  }

  int64_t slot_size() const { return block.num_value_heads * block.key_dim * block.value_dim; }
  int64_t kept_size() const { return (block.conv_width - 1) * block.conv_size(); }
};

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double softplus(double x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// A request's state, on the host.
struct HostState {
  std::vector<double> columns, heads;  // [width - 1, C], [V, D, E]
};

// Tokens of a request through a net, from rows of its first products.
template <class T>
std::vector<double> twin(const Net<T>& net, const T* qkvz, const T* ba, int tokens,
                         HostState* state) {
  const DeltaNetBlock& b = net.block;
  const int64_t channels = b.conv_size(), row = channels + b.value_size();
  const int64_t heads = b.num_value_heads, dim = b.key_dim, width = b.value_dim;
  const int64_t kept = b.conv_width - 1;
  std::vector<double> columns = state->columns, y(tokens * channels), o(tokens * b.value_size());
  columns.resize((kept + tokens) * channels);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t c = 0; c < channels; ++c) {
      columns[(kept + t) * channels + c] = host_float(qkvz[t * row + c]);
    }
  }
#pragma omp parallel for
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t c = 0; c < channels; ++c) {
      double sum = b.conv_bias ? net.conv_bias.host[c] : 0.;
      for (int64_t tap = 0; tap <= kept; ++tap) {
        sum += net.conv.host[tap * channels + c] * columns[(t + tap) * channels + c];
      }
      y[t * channels + c] = sum * sigmoid(sum);
    }
  }
  state->columns.assign(columns.end() - kept * channels, columns.end());
#pragma omp parallel for
  for (int64_t h = 0; h < heads; ++h) {
    const int64_t group = heads / b.num_key_heads;
    const int64_t key_head = b.tiled_heads ? h % b.num_key_heads : h / group;
    std::vector<double> q(dim), k(dim), decay(dim), seen(width), made(width);
    double* const s = &state->heads[h * dim * width];
    for (int64_t t = 0; t < tokens; ++t) {
      const double *from_q = &y[t * channels + key_head * dim], *from_k = from_q + b.key_size();
      const double* const v = &y[t * channels + 2 * b.key_size() + h * width];
      double squares_q = 1e-6, squares_k = 1e-6;
      for (int64_t i = 0; i < dim; ++i) {
        squares_q += from_q[i] * from_q[i], squares_k += from_k[i] * from_k[i];
      }
      for (int64_t i = 0; i < dim; ++i) {
        q[i] = b.unit_keys ? from_q[i] / std::sqrt(squares_q * dim) : from_q[i];
        k[i] = b.unit_keys ? from_k[i] / std::sqrt(squares_k) : from_k[i];
      }
      const bool by_step = b.write == WriteBy::kStep;
      const T* const gates = ba + t * b.gate_size();
      double step = 0;
      for (int64_t i = 0; i < dim; ++i) {
        const int64_t at = h * b.decays() + (b.decays() > 1 ? i : 0);
        const double x =
            host_float(gates[(by_step ? 0 : heads) + at]) + double(net.step_bias.host[at]);
        const double rate = std::exp(double(net.decay_log.host[h]));
        step = softplus(x);
        decay[i] = std::exp(b.decay_bound < 0 ? b.decay_bound * sigmoid(rate * x) : -rate * step);
      }
      const double strength = b.write_scale * (by_step ? step : sigmoid(host_float(gates[h])));
      std::fill(seen.begin(), seen.end(), 0.);
      std::fill(made.begin(), made.end(), 0.);
      for (int64_t i = 0; i < dim; ++i) {
        for (int64_t e = 0; e < width; ++e) {
          s[i * width + e] *= decay[i];
          seen[e] += k[i] * s[i * width + e];
        }
      }
      for (int64_t e = 0; e < width; ++e) seen[e] = strength * (b.delta ? v[e] - seen[e] : v[e]);
      for (int64_t i = 0; i < dim; ++i) {
        for (int64_t e = 0; e < width; ++e) {
          s[i * width + e] += k[i] * seen[e];
          made[e] += q[i] * s[i * width + e];
        }
      }
      for (int64_t e = 0; e < width; ++e) {
        o[t * b.value_size() + h * width + e] = made[e] + (b.skip ? net.skip.host[h] * v[e] : 0.);
      }
    }
  }
  const int64_t groups = b.norm_groups > 0 ? b.norm_groups : heads;
  const int64_t group_size = b.value_size() / groups;
#pragma omp parallel for
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t g = 0; g < groups; ++g) {
      double squares = 0;
      const auto gate = [&](int64_t i) {
        const double z = host_float(qkvz[t * row + channels + g * group_size + i]);
        return b.gate == OutGate::kSilu ? z * sigmoid(z) : sigmoid(z);
      };
      double* const own = &o[t * b.value_size() + g * group_size];
      for (int64_t i = 0; i < group_size; ++i) {
        if (b.gate_first) own[i] *= gate(i);
        squares += own[i] * own[i];
      }
      const double scale = 1 / std::sqrt(squares / group_size + b.out_norm.epsilon);
      for (int64_t i = 0; i < group_size; ++i) {
        own[i] *= scale * net.out_norm.host[(b.norm_groups > 0 ? g * group_size : 0) + i];
        if (!b.gate_first) own[i] *= gate(i);
      }
    }
  }
  return o;
}

// Requests' tokens: rows of the first products, of each request from its beginning on.
template <class T>
struct Text {
  int tokens;
  std::vector<T> qkvz, ba;

  Text(const Net<T>& net, int count) : tokens(count) {
    const DeltaNetBlock& b = net.block;
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<T>& to, int64_t row) {
      to.resize(count * row);
      for (T& x : to) x = host_from<T>(normal(rng));
    };
    fill(qkvz, b.conv_size() + b.value_size());
    fill(ba, b.gate_size());
  }
};

// Slots of states on the GPU: two of each request, and one that nothing may write.
template <class T>
struct Slots {
  const Net<T>& net;
  int count;
  DType dtype;
  Twin<float> columns;
  Twin<float> floats;
  Twin<__nv_bfloat16> halves;

  Slots(const Net<T>& n, int num_requests, DType states)
      : net(n),
        count(2 * num_requests + 1),
        dtype(states),
        columns(count * n.kept_size()),
        floats(states == DType::kFloat32 ? count * n.slot_size() : 1),
        halves(states == DType::kFloat32 ? 1 : count * n.slot_size()) {}

  void* data() { return dtype == DType::kFloat32 ? (void*)floats.device : halves.device; }
  void download() { columns.download(), floats.download(), halves.download(); }
  float at(int slot, int64_t i) const {
    const int64_t place = slot * net.slot_size() + i;
    return dtype == DType::kFloat32 ? floats.host[place] : host_float(halves.host[place]);
  }
};

// A step of some spans; `texts` has the request of each.
template <class T>
std::vector<float> run_step(const Net<T>& net, const std::vector<const Text<T>*>& texts,
                            const std::vector<SpanOf>& spans, const std::vector<int>& src,
                            const std::vector<int>& dst, Slots<T>& slots, cuda::DeltaWay way,
                            int num_padding = 0) {
  const DeltaNetBlock& b = net.block;
  const int64_t row = b.conv_size() + b.value_size();
  Twin<int32_t> borders(spans.size() + 1), contexts(spans.size());
  Twin<int32_t> from(spans.size()), to(spans.size());
  borders.host[0] = 0;
  for (size_t i = 0; i < spans.size(); ++i) {
    borders.host[i + 1] = borders.host[i] + spans[i].length;
    contexts.host[i] = spans[i].before + spans[i].length;
  }
  from.host = src, to.host = dst;
  borders.upload(), contexts.upload(), from.upload(), to.upload();
  const int64_t tokens = borders.host.back() + num_padding;
  Twin<T> qkvz(tokens * row), ba(tokens * b.gate_size()), mixed(tokens * b.value_size());
  std::fill(qkvz.host.begin(), qkvz.host.end(), host_from<T>(1.f));
  for (size_t i = 0; i < spans.size(); ++i) {
    const auto copy = [&](const std::vector<T>& rows, std::vector<T>& all, int64_t width) {
      std::copy_n(rows.begin() + spans[i].before * width, spans[i].length * width,
                  all.begin() + borders.host[i] * width);
    };
    copy(texts[i]->qkvz, qkvz.host, row);
    copy(texts[i]->ba, ba.host, b.gate_size());
  }
  qkvz.upload(), ba.upload();
  DeltaNetBlockParams p;
  p.block = b, p.dtype = cuda::Traits<T>::dtype, p.num_tokens = tokens;
  p.batch.cu_seqlens_q = borders.device, p.batch.context_lens = contexts.device;
  p.batch.num_seqs = static_cast<int64_t>(spans.size()), p.batch.num_tokens = tokens;
  p.state_src = from.device, p.state_dst = to.device;
  p.conv = net.conv.device, p.decay_log = net.decay_log.device;
  if (b.conv_bias) p.conv_bias = net.conv_bias.device;
  if (b.skip) p.skip = net.skip.device;
  p.step_bias = net.step_bias.device, p.out_norm = net.out_norm.device;
  p.conv_states = slots.columns.device, p.states = static_cast<float*>(slots.data());
  p.states_dtype = slots.dtype;
  p.made_qkvz = qkvz.device, p.made_ba = ba.device, p.mixed = mixed.device;
  const cuda::DeltaNeeds needs = cuda::delta_needs(p, way);
  Buffer<T> convolved(needs.convolved), solved(needs.solved);
  Buffer<float> floats(needs.floats);
  run_graph([&](cudaStream_t stream) {
    CHECK_STATUS(cuda::delta_net(p, way, convolved.data, solved.data, floats.data, {stream, true}));
  });
  mixed.download();
  std::vector<float> made;
  for (const T& x : mixed.host) made.push_back(host_float(x));
  return made;
}

// All texts in steps of these cuts, whose slots change at each; outputs of each text, and their
// states. ways: of each step.
template <class T>
struct Answer {
  std::vector<std::vector<float>> outputs;
  std::vector<int> slots;
};

template <class T>
Answer<T> run_texts(const Net<T>& net, const std::vector<Text<T>>& texts,
                    const std::vector<std::vector<int>>& cuts, Slots<T>& slots,
                    cuda::DeltaWay way) {
  Answer<T> answer;
  answer.outputs.resize(texts.size());
  answer.slots.assign(texts.size(), -1);
  std::vector<int> done(texts.size(), 0);
  const int64_t values = net.block.value_size();
  for (size_t step = 0; step < cuts.size(); ++step) {
    std::vector<const Text<T>*> some;
    std::vector<SpanOf> spans;
    std::vector<int> src, dst, which;
    for (size_t i = 0; i < texts.size(); ++i) {
      const int length = cuts[step][i];
      if (length == 0) continue;
      some.push_back(&texts[i]), which.push_back(static_cast<int>(i));
      spans.push_back({done[i], length});
      src.push_back(answer.slots[i]);
      dst.push_back(static_cast<int>(2 * i + (answer.slots[i] == static_cast<int>(2 * i))));
    }
    const std::vector<float> made =
        run_step(net, some, spans, src, dst, slots, way, static_cast<int>(step % 3));
    int64_t at = 0;
    for (size_t n = 0; n < which.size(); ++n) {
      const int64_t count = spans[n].length * values;
      std::vector<float>& to = answer.outputs[which[n]];
      to.insert(to.end(), made.begin() + at, made.begin() + at + count);
      at += count, done[which[n]] += spans[n].length;
      answer.slots[which[n]] = dst[n];
    }
    for (; at < static_cast<int64_t>(made.size()); ++at) {
      if (made[at] != 0.f) count_case(false, "padding is not zero");
    }
  }
  return answer;
}

template <class T>
double tolerance(cuda::DeltaWay way, DType states) {
  const double half = states == DType::kBFloat16 ? 0.01 : 0.;
  if (sizeof(T) == 4) return 2e-5 + half;
  const double rounding = std::is_same_v<T, __half> ? 1. / 8 : 1.;
  return (way == cuda::DeltaWay::kChunks ? 0.015 : 0.003) * rounding + half;
}

const char* name_of(cuda::DeltaWay way) {
  return way == cuda::DeltaWay::kAny ? "any" : way == cuda::DeltaWay::kSteps ? "steps" : "chunks";
}

// Against the twin: outputs, states, columns, and that no other slot changed.
template <class T>
void check_answer(const Net<T>& net, const std::vector<Text<T>>& texts, const Answer<T>& answer,
                  Slots<T>& slots, cuda::DeltaWay way, const std::string& what) {
  const DeltaNetBlock& b = net.block;
  slots.download();
  Error outputs, states, columns;
  for (size_t i = 0; i < texts.size(); ++i) {
    HostState state = {std::vector<double>(net.kept_size()), std::vector<double>(net.slot_size())};
    const std::vector<double> wanted =
        twin(net, texts[i].qkvz.data(), texts[i].ba.data(), texts[i].tokens, &state);
    for (size_t n = 0; n < wanted.size(); ++n) outputs.add(answer.outputs[i][n], wanted[n]);
    for (int64_t n = 0; n < net.slot_size(); ++n) {
      states.add(slots.at(answer.slots[i], n), state.heads[n]);
    }
    for (int64_t n = 0; n < net.kept_size(); ++n) {
      columns.add(slots.columns.host[answer.slots[i] * net.kept_size() + n], state.columns[n]);
    }
  }
  for (int64_t n = 0; n < net.slot_size(); ++n) {
    if (!std::isnan(slots.at(slots.count - 1, n))) {
      count_case(false, what + ": a slot of no request was written");
      break;
    }
  }
  const std::string name =
      format("%s %s, states %s, heads %ld/%ld of %ld/%ld: %s", name_of(way),
             dtype_name(cuda::Traits<T>::dtype), dtype_name(slots.dtype), long(b.num_key_heads),
             long(b.num_value_heads), long(b.key_dim), long(b.value_dim), what.c_str());
  count_error(name, outputs.value(), tolerance<T>(way, slots.dtype));
  count_error(name + ", states", states.value(), tolerance<T>(way, slots.dtype));
  count_error(name + ", columns", columns.value(), 1e-7);
}

DeltaNetBlock block_of(int key_heads, int value_heads, int dim = 128, int width = 128) {
  DeltaNetBlock b;
  b.num_key_heads = key_heads, b.num_value_heads = value_heads;
  b.key_dim = dim, b.value_dim = width;
  b.out_norm.is_there = true;
  return b;
}

using Cuts = std::vector<std::vector<int>>;  // of each step, of each text

// Texts as long as their cuts say.
template <class T>
void check_cuts(const DeltaNetBlock& block, const Cuts& cuts, cuda::DeltaWay way,
                DType states = DType::kFloat32, const std::string& what = "") {
  const Net<T> net(block);
  std::vector<Text<T>> texts;
  for (size_t i = 0; i < cuts[0].size(); ++i) {
    int count = 0;
    for (const auto& step : cuts) count += step[i];
    texts.emplace_back(net, count);
  }
  Slots<T> slots(net, static_cast<int>(texts.size()), states);
  const Answer<T> answer = run_texts(net, texts, cuts, slots, way);
  std::string name = what;
  for (const auto& step : cuts) {
    for (int count : step) name += format(" %d", count);
    name += ";";
  }
  check_answer(net, texts, answer, slots, way, name);
}

// Of every form that a record may have.
template <class T>
void check_forms() {
  std::vector<DeltaNetBlock> forms = {block_of(3, 3, 8, 16), block_of(2, 4, 6, 20),
                                      block_of(1, 2, 16, 80), block_of(1, 2)};
  forms[0].conv_width = 2;
  DeltaNetBlock tiled = block_of(2, 4, 6, 20), kimi = block_of(2, 2, 6, 8), strong = tiled;
  tiled.tiled_heads = true;
  kimi.decay = Decay::kChannel, kimi.gate = OutGate::kSigmoid;
  strong.write_scale = 2.f;
  DeltaNetBlock bounded = kimi, mamba = block_of(2, 4, 6, 20);
  bounded.decay_bound = -5.f;
  mamba.delta = false, mamba.write = WriteBy::kStep, mamba.unit_keys = false, mamba.skip = true;
  mamba.conv_bias = true, mamba.norm_groups = 2, mamba.gate_first = true;
  for (const DeltaNetBlock& each : {tiled, kimi, strong, bounded, mamba}) forms.push_back(each);
  for (const DeltaNetBlock& form : forms) {
    check_cuts<T>(form, {{9, 1, 14}}, cuda::DeltaWay::kAny);
    check_cuts<T>(form, {{1, 1, 2}, {3, 0, 1}, {0, 0, 7}, {5, 0, 1}}, cuda::DeltaWay::kAny);
  }
}

void check_any(const Words&) {
  check_forms<float>();
  check_forms<__nv_bfloat16>();
  check_forms<__half>();
  check_cuts<float>(block_of(1, 2), {{70}}, cuda::DeltaWay::kAny, DType::kBFloat16);
}

// Heads of 128: fewer key heads, tiled, as many; a bias, sigmoid gates.
std::vector<DeltaNetBlock> own_forms() {
  std::vector<DeltaNetBlock> forms = {block_of(1, 3), block_of(2, 4), block_of(1, 4),
                                      block_of(2, 2)};
  forms[1].tiled_heads = true, forms[1].conv_bias = true;
  forms[2].gate = OutGate::kSigmoid, forms[2].decay_bound = -4.f;
  forms[3].write_scale = 2.f;
  return forms;
}

template <class T>
void check_steps_of() {
  for (const DeltaNetBlock& form : own_forms()) {
    check_cuts<T>(form, {{1, 1, 1}, {1, 1, 1}, {1, 0, 1}, {1, 1, 1}, {1, 1, 1}},
                  cuda::DeltaWay::kSteps);
    check_cuts<T>(form, {{5, 1}, {2, 8}, {70, 3}}, cuda::DeltaWay::kSteps);
    check_cuts<T>(form, {{3, 1}, {1, 1}}, cuda::DeltaWay::kSteps, DType::kBFloat16);
  }
}

void check_steps(const Words&) {
  check_steps_of<float>();
  check_steps_of<__nv_bfloat16>();
  check_steps_of<__half>();
}

template <class T>
void check_chunks_of() {
  const cuda::DeltaWay way = cuda::DeltaWay::kChunks;
  for (const DeltaNetBlock& form : own_forms()) {
    check_cuts<T>(form, {{9, 63, 64, 65, 1}}, way);
    check_cuts<T>(form, {{200, 128, 71}}, way);
    check_cuts<T>(form, {{30, 1, 63}, {100, 1, 9}, {1, 70, 64}, {1, 1, 8}}, way);
    check_cuts<T>(form, {{70, 12}, {20, 1}}, way, DType::kBFloat16);
  }
  Cuts many = {std::vector<int>(67, 1), std::vector<int>(67, 1)};  // more requests than lanes
  for (int i = 0; i < 67; i += 5) many[0][i] = 20 + i;
  check_cuts<T>(block_of(1, 1), many, way);
}

void check_chunks(const Words&) {
  check_chunks_of<__nv_bfloat16>();
  check_chunks_of<__half>();
}

// Whether a text has the same bits however it is cut at multiples of 64, and in whose company.
template <class T>
void check_same_bits() {
  const cuda::DeltaWay way = cuda::DeltaWay::kChunks;
  const Net<T> net(block_of(1, 3));
  std::vector<Text<T>> texts;
  for (int tokens : {203, 330, 65}) texts.emplace_back(net, tokens);
  // Answers' tokens behind 200, 320 and 64: one by one, or as drafts.
  const std::vector<Cuts> ways = {
      {{200, 0, 0}, {0, 320, 0}, {0, 0, 64}, {1, 1, 1}, {1, 3, 0}, {1, 4, 0}, {0, 2, 0}},
      {{64, 320, 0}, {128, 1, 64}, {8, 1, 1}, {3, 8, 0}},
      {{128, 64, 64}, {72, 192, 1}, {2, 64, 0}, {1, 8, 0}, {0, 2, 0}},
  };
  std::vector<std::vector<float>> outputs, states;
  for (const Cuts& cuts : ways) {
    Slots<T> slots(net, 3, DType::kFloat32);
    const Answer<T> answer = run_texts(net, texts, cuts, slots, way);
    check_answer(net, texts, answer, slots, way, "cut at multiples of 64");
    std::vector<float> all, kept;
    for (size_t i = 0; i < texts.size(); ++i) {
      all.insert(all.end(), answer.outputs[i].begin(), answer.outputs[i].end());
      for (int64_t n = 0; n < net.slot_size(); ++n) kept.push_back(slots.at(answer.slots[i], n));
    }
    outputs.push_back(all), states.push_back(kept);
    const std::string name = format("%s: cuts %zu change bits of ",
                                    dtype_name(cuda::Traits<T>::dtype), outputs.size() - 1);
    count_case(same_bits(outputs[0], all), name + "outputs");
    count_case(same_bits(states[0], kept), name + "states");
  }
}

void check_bits(const Words&) {
  check_same_bits<__nv_bfloat16>();
  check_same_bits<__half>();
}

// Decays of exp(-80) and 1, nothing or all written, one token again and again.
template <class T>
void check_extremes_of(cuda::DeltaWay way) {
  for (float decay : {-80.f, 0.f}) {
    for (float strength : {0.f, 1.f}) {
      for (bool equal : {false, true}) {
        Net<T> net(block_of(1, 2));
        std::fill(net.decay_log.host.begin(), net.decay_log.host.end(), std::log(0.8f));
        std::fill(net.step_bias.host.begin(), net.step_bias.host.end(), decay < 0 ? 100.f : -200.f);
        net.decay_log.upload(), net.step_bias.upload();
        std::vector<Text<T>> texts;
        texts.emplace_back(net, 150);
        Text<T>& text = texts[0];
        const size_t row = text.qkvz.size() / 150;
        for (size_t i = row; equal && i < text.qkvz.size(); ++i) text.qkvz[i] = text.qkvz[i % row];
        for (size_t i = 0; i < text.ba.size(); ++i) {
          text.ba[i] = host_from<T>(i % 4 < 2 ? (strength > 0 ? 1000.f : -1000.f) : 0.f);
        }
        Slots<T> slots(net, 1, DType::kFloat32);
        const Answer<T> answer = run_texts(net, texts, {{77}, {73}}, slots, way);
        check_answer(net, texts, answer, slots, way,
                     format("g %g, beta %g, equal keys %d", decay, strength, equal));
      }
    }
  }
}

void check_extremes(const Words&) {
  check_extremes_of<float>(cuda::DeltaWay::kAny);
  check_extremes_of<float>(cuda::DeltaWay::kSteps);
  check_extremes_of<__nv_bfloat16>(cuda::DeltaWay::kSteps);
  check_extremes_of<__nv_bfloat16>(cuda::DeltaWay::kChunks);
  check_extremes_of<__half>(cuda::DeltaWay::kChunks);
}

void check_long(const Words& words) {
  const int tokens = static_cast<int>(words.numbers({32000})[0]);
  check_cuts<float>(block_of(1, 1), {{tokens}}, cuda::DeltaWay::kSteps);
  check_cuts<__nv_bfloat16>(block_of(1, 2), {{tokens}}, cuda::DeltaWay::kChunks);
  check_cuts<__nv_bfloat16>(block_of(1, 2), {{tokens / 2 + 5}, {tokens / 2 - 5}},
                            cuda::DeltaWay::kChunks);
}

// ---------------------------------------------------------------------------- short convolution

template <class T>
void check_short_conv(int size, int width, bool bias, const Cuts& cuts) {
  const int64_t kept = int64_t{width - 1} * size;
  const size_t count = cuts[0].size();
  Twin<float> taps(width * size), biases(size), slots((2 * count + 1) * kept);
  taps.random(), biases.random();
  std::vector<std::vector<T>> texts(count);
  std::vector<int> done(count, 0), slot(count, -1);
  Error outputs, states;
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < count; ++i) {
    int tokens = 0;
    for (const auto& step : cuts) tokens += step[i];
    texts[i].resize(int64_t{tokens} * 3 * size);
    for (T& x : texts[i]) x = host_from<T>(normal(rng));
  }
  const auto input = [&](size_t i, int token, int c) {
    if (token < 0) return 0.;
    const T* const row = &texts[i][int64_t{token} * 3 * size + c];
    return double(host_float(row[0])) * host_float(row[2 * size]);
  };
  for (size_t step = 0; step < cuts.size(); ++step) {
    std::vector<size_t> some;
    for (size_t i = 0; i < count; ++i) {
      if (cuts[step][i] > 0) some.push_back(i);
    }
    Twin<int32_t> borders(some.size() + 1), src(some.size()), dst(some.size());
    borders.host[0] = 0;
    std::vector<T> rows;
    for (size_t n = 0; n < some.size(); ++n) {
      const size_t i = some[n];
      const int length = cuts[step][i];
      borders.host[n + 1] = borders.host[n] + length;
      src.host[n] = slot[i];
      dst.host[n] = slot[i] = static_cast<int>(2 * i + (slot[i] == static_cast<int>(2 * i)));
      const auto begin = texts[i].begin() + int64_t{done[i]} * 3 * size;
      rows.insert(rows.end(), begin, begin + int64_t{length} * 3 * size);
    }
    const int padding = 2, tokens = borders.host.back() + padding;
    rows.resize(int64_t{tokens} * 3 * size, host_from<T>(1.f));
    borders.upload(), src.upload(), dst.upload();
    const Buffer<T> bcx(rows);
    Twin<T> mixed(int64_t{tokens} * size);
    ShortConvBlockParams p;
    p.block.size = size, p.block.width = width, p.dtype = cuda::Traits<T>::dtype;
    p.num_tokens = tokens, p.batch.num_seqs = static_cast<int64_t>(some.size());
    p.batch.cu_seqlens_q = borders.device, p.state_src = src.device, p.state_dst = dst.device;
    p.taps = taps.device, p.states = slots.device;
    if (bias) p.taps_bias = biases.device;
    p.made_bcx = bcx.data, p.mixed = mixed.device;
    CHECK_STATUS(cuda::short_conv(p, {nullptr, true}));
    CHECK_CUDA(cudaDeviceSynchronize());
    mixed.download();
    for (size_t n = 0; n < some.size(); ++n) {
      const size_t i = some[n];
      for (int t = borders.host[n]; t < borders.host[n + 1]; ++t) {
        const int token = done[i] + t - borders.host[n];
        for (int c = 0; c < size; ++c) {
          double sum = bias ? biases.host[c] : 0.;
          for (int tap = 0; tap < width; ++tap) {
            sum += taps.host[tap * size + c] * input(i, token + tap - (width - 1), c);
          }
          sum *= host_float(texts[i][(int64_t{token} * 3 + 1) * size + c]);
          outputs.add(host_float(mixed.host[int64_t{t} * size + c]), sum);
        }
      }
      done[i] += cuts[step][i];
    }
    for (int64_t j = int64_t{tokens - padding} * size; j < int64_t{tokens} * size; ++j) {
      outputs.add(host_float(mixed.host[j]), 0.);
    }
  }
  slots.download();
  for (size_t i = 0; i < count; ++i) {
    for (int j = 0; j < width - 1; ++j) {
      for (int c = 0; c < size; ++c) {
        states.add(slots.host[slot[i] * kept + j * size + c],
                   input(i, done[i] - (width - 1) + j, c));
      }
    }
  }
  const std::string name =
      format("conv %s %d channels, %d taps", dtype_name(cuda::Traits<T>::dtype), size, width);
  count_error(name, outputs.value(), sizeof(T) == 4 ? 1e-6 : 0.003);
  count_error(name + ", states", states.value(), 1e-6);
}

void check_conv(const Words&) {
  const Cuts cuts = {{9, 1, 14}, {1, 1, 0}, {2, 1, 1}};
  check_short_conv<float>(20, 3, false, cuts);
  check_short_conv<float>(7, 4, true, cuts);
  check_short_conv<__nv_bfloat16>(2048, 3, false, cuts);
  check_short_conv<__half>(300, 2, true, cuts);
}

// ----------------------------------------------------------------------------------------- times

// Random tensors of a step on the GPU: 16 key heads and 48 value heads of 128, bf16.
struct Timed {
  using T = __nv_bfloat16;
  Net<T> net{block_of(16, 48)};
  int64_t tokens, requests;
  Buffer<T> qkvz, ba, mixed;
  Buffer<float> columns, states;
  Buffer<int32_t> borders, contexts, src, dst;
  DeltaNetBlockParams p;

  // sets: of slots, each for all requests, read and written.
  Timed(int64_t num_requests, int64_t length, int64_t sets)
      : tokens(num_requests * length),
        requests(num_requests),
        qkvz(tokens * (net.block.conv_size() + net.block.value_size())),
        ba(tokens * net.block.gate_size()),
        mixed(tokens * net.block.value_size()),
        columns(2 * sets * requests * net.kept_size()),
        states(2 * sets * requests * net.slot_size()),
        borders(requests + 1),
        contexts(requests),
        src(sets * requests),
        dst(sets * requests) {
    fill_random(qkvz.data, qkvz.size, 1), fill_random(ba.data, ba.size, 2);
    fill_random(columns.data, columns.size, 3), fill_random(states.data, states.size, 4, 0.1f);
    std::vector<int32_t> border(requests + 1), context(requests), from, to;
    for (int64_t i = 0; i <= requests; ++i) border[i] = static_cast<int32_t>(i * length);
    for (int64_t i = 0; i < requests; ++i) context[i] = static_cast<int32_t>(length);
    for (int64_t i = 0; i < sets * requests; ++i) {
      from.push_back(static_cast<int32_t>(2 * i)), to.push_back(static_cast<int32_t>(2 * i + 1));
    }
    borders.put(border), contexts.put(context), src.put(from), dst.put(to);
    p.block = net.block, p.dtype = DType::kBFloat16, p.num_tokens = tokens;
    p.batch.cu_seqlens_q = borders.data, p.batch.context_lens = contexts.data;
    p.batch.num_seqs = requests, p.batch.num_tokens = tokens;
    p.conv = net.conv.device, p.decay_log = net.decay_log.device;
    p.step_bias = net.step_bias.device, p.out_norm = net.out_norm.device;
    p.conv_states = columns.data, p.states = states.data;
    p.made_qkvz = qkvz.data, p.made_ba = ba.data, p.mixed = mixed.data;
    of_set(0);
  }

  void of_set(int64_t set) {
    p.state_src = src.data + set * requests, p.state_dst = dst.data + set * requests;
  }
};

void time_decode(const Words& words) {
  for (const int64_t requests : words.numbers({1, 8, 32, 128})) {
    // More than the L2 cache holds, and no more than 20 GB.
    const int64_t sets = std::max<int64_t>(1, std::min<int64_t>(20, 256 / requests));
    Timed t(requests, 1, sets);
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      t.p.states_dtype = dtype;
      const double us = call_us(40, 10, [&](int i, cudaStream_t stream) {
        t.of_set(i % sets);
        CHECK_STATUS(cuda::delta_net(t.p, cuda::DeltaWay::kSteps, nullptr, nullptr, nullptr,
                                     {stream, true}));
      });
      const double bytes =
          2. * requests * (t.net.slot_size() * dtype_size(dtype) + t.net.kept_size() * 4.);
      printf("decode %3ld requests, states %-8s  %8.2f us  %5.0f GB/s\n", long(requests),
             dtype_name(dtype), us, bytes / us * 1e-3);
    }
  }
}

void time_prefill(const Words& words) {
  const auto time = [](int64_t requests, int64_t length) {
    Timed t(requests, length, 1);
    const cuda::DeltaNeeds needs = cuda::delta_needs(t.p, cuda::DeltaWay::kChunks);
    Buffer<Timed::T> convolved(needs.convolved), solved(needs.solved);
    Buffer<float> floats(needs.floats);
    cuda::DeltaArgs args = cuda::delta_args(t.p);
    args.convolved = convolved.data, args.solved = solved.data, args.logs = floats.data;
    args.strengths = floats.data + t.tokens * t.net.block.num_value_heads;
    const auto ms = [](const std::function<Status(const cuda::Launch&)>& run) {
      return graph_ms([&](cudaStream_t stream) { CHECK_STATUS(run({stream, true})); }, 10);
    };
    const DType bf16 = DType::kBFloat16, states = DType::kFloat32;
    const double all = ms([&](const cuda::Launch& on) {
      return cuda::delta_net(t.p, cuda::DeltaWay::kChunks, convolved.data, solved.data, floats.data,
                             on);
    });
    const double prepare =
        ms([&](const cuda::Launch& on) { return cuda::delta_prepare(args, bf16, on); });
    const double pass =
        ms([&](const cuda::Launch& on) { return cuda::delta_pass(args, bf16, states, on); });
    const double norm =
        ms([&](const cuda::Launch& on) { return cuda::delta_norm(args, nullptr, true, bf16, on); });
    const double ends =
        ms([&](const cuda::Launch& on) { return cuda::delta_steps(args, true, bf16, states, on); });
    printf("prefill %ld x %5ld tokens  %7.3f ms: prepare %.3f, pass %.3f, norm %.3f, ends %.3f\n",
           long(requests), long(length), all, prepare, pass, norm, ends);
  };
  for (const int64_t length : words.numbers({2048, 8192, 65536})) time(1, length);
  time(8, 1024);
}

}  // namespace

int main(int argc, char** argv) {
  return run_parts(argc, argv,
                   {{"check", "any", check_any},
                    {"check", "steps", check_steps},
                    {"check", "chunks", check_chunks},
                    {"check", "cuts", check_bits},
                    {"check", "extremes", check_extremes},
                    {"check", "long", check_long},
                    {"check", "conv", check_conv},
                    {"time", "decode", time_decode},
                    {"time", "prefill", time_prefill}});
}
