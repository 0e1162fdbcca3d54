// Checks few_tokens() of Hopper and of every GPU against float64 on the host: odd sizes, one and
// two tokens, routers of all kinds, logits that are NaN, infinite or equal. Weights, scales and
// biases of experts that nobody chooses are NaN. Two runs have the same bits, whatever the rings;
// nothing is written behind an output. For Hopper.
//
//   few_tokens_check dense|codes
#include <cuda_fp8.h>

#include "cuda/experts/experts.h"
#include "function_host.h"
#include "logits.cuh"

using namespace regatta;
using namespace regatta::native;
using namespace regatta::cuda;

namespace {

int failures = 0, cases = 0;

constexpr int kBehind = 64;  // values behind an output, which stay as they are

enum class Logits { kRandom, kEqual, kNan, kInfinite };
constexpr const char* kLogits[] = {"random", "equal", "NaN", "infinite"};

struct Case {
  int64_t experts, top, hidden, inner, shared = 0;
  bool shared_gate = false, biases = false, in_place = true, sumsq = true;
  Router router;
  Logits logits = Logits::kRandom;
  Activation activation;
  float act_scale = 0.f;  // of codes
  float source_scale = 1.f, made_scale = 1.f;

  std::string name(const char* kind, int tokens) const {
    return std::string(kind) + " " + std::to_string(tokens) + " tokens, " +
           std::to_string(experts) + " experts, top " + std::to_string(top) + ", hidden " +
           std::to_string(hidden) + ", inner " + std::to_string(inner) + ", shared " +
           std::to_string(shared) + (shared_gate ? " gated" : "") + (biases ? " biases" : "") +
           (router.scoring == Scoring::kSigmoid ? " sigmoid" : "") + ", logits " +
           kLogits[static_cast<int>(logits)];
  }
};

// What a token's logits choose.
struct Choice {
  std::vector<int64_t> ids;
  std::vector<double> shares;
};

Choice choose_on_host(const Router& router, const float* logits, const float* bias,
                      const float* correction) {
  const int64_t count = router.num_experts;
  std::vector<double> scores(count), order(count);
  Choice choice;
  double largest = -INFINITY, sum = 0;
  bool sound = true;
  for (int64_t e = 0; e < count; ++e) {
    scores[e] = logits[e] + (bias != nullptr ? bias[e] : 0.f);
    sound = sound && !std::isnan(scores[e]);
    largest = std::max(largest, scores[e]);
  }
  if (!sound) {
    for (int64_t k = 0; k < router.top_k; ++k) choice.ids.push_back(k);
    choice.shares.assign(router.top_k, NAN);
    return choice;
  }
  const bool softmax = router.scoring == Scoring::kSoftmax;
  for (double& s : scores) sum += s = softmax ? std::exp(s - largest) : 1 / (1 + std::exp(-s));
  for (int64_t e = 0; e < count; ++e) {
    if (softmax) scores[e] /= sum;
    order[e] = scores[e] + (correction != nullptr ? correction[e] : 0.f);
    if (std::isnan(order[e])) order[e] = -INFINITY;
  }
  if (router.top_groups < router.num_groups) {
    const int64_t size = count / router.num_groups;
    std::vector<std::pair<double, int64_t>> groups;
    for (int64_t g = 0; g < router.num_groups; ++g) {
      std::vector<double> own(order.begin() + g * size, order.begin() + (g + 1) * size);
      std::sort(own.rbegin(), own.rend());
      groups.push_back({router.group_score == GroupScore::kTopTwo ? -own[0] - own[1] : -own[0], g});
    }
    std::sort(groups.begin(), groups.end());
    for (int64_t i = router.top_groups; i < router.num_groups; ++i) {
      std::fill_n(order.begin() + groups[i].second * size, size, -INFINITY);
    }
  }
  std::vector<int64_t> ids(count);
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(),
                   [&](int64_t a, int64_t b) { return order[a] > order[b]; });
  double chosen = 0;
  for (int64_t k = 0; k < router.top_k; ++k) chosen += scores[ids[k]];
  for (int64_t k = 0; k < router.top_k; ++k) {
    choice.ids.push_back(ids[k]);
    choice.shares.push_back(scores[ids[k]] / (router.renormalize ? chosen : 1.) * router.scale);
  }
  return choice;
}

double gated(const Activation& of, double gate, double up) {
  if (of.clamp != 0.f) {
    gate = std::min<double>(gate, of.clamp);
    up = std::clamp<double>(up, -of.clamp, of.clamp);
  }
  const bool sloped = of.function == Function::kSilu && of.slope != 1.f;
  return (sloped ? gate / (1 + std::exp(-of.slope * gate)) : function_of(of.function, gate)) *
         (up + of.up_offset);
}

float code_value(uint8_t code) {
  __nv_fp8_e4m3 x;
  x.__x = code;
  return static_cast<float>(x);
}

// A row as its codes stand for it.
void round_to_codes(std::vector<double>& row, int64_t first, int64_t count, float fixed) {
  float largest = 0.f;
  for (int64_t i = first; i < first + count; ++i) {
    largest = std::max(largest, std::abs(static_cast<float>(row[i])));
  }
  const float scale = fixed > 0.f ? fixed : largest > 0.f ? largest / 448.f : 1.f;
  for (int64_t i = first; i < first + count; ++i) {
    const float x = static_cast<float>(row[i]) * (1.f / scale);
    row[i] = static_cast<double>(code_value(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3))) *
             scale;
  }
}

// A matrix of each expert [E, N, K] (or one), NaN on the device but for those that are made.
template <class T, bool kCodes>
struct Matrices {
  using Stored = std::conditional_t<kCodes, uint8_t, T>;
  int64_t rows, columns;
  Buffer<Stored> weights;
  Buffer<float> scales;
  Buffer<T> biases;
  std::vector<std::vector<float>> values, bias_values;  // of experts that are made

  Matrices(int64_t experts, int64_t n, int64_t k)
      : rows(n),
        columns(k),
        weights(experts * n * k),
        scales(experts * n),
        biases(experts * n),
        values(experts),
        bias_values(experts) {}

  void make(int64_t expert, Random& random) {
    if (!values[expert].empty() || rows * columns == 0) return;
    std::vector<float>& of = values[expert];
    of = random.floats(rows * columns, 1.7f / std::sqrt(static_cast<float>(columns)));
    std::vector<Stored> stored;
    if constexpr (kCodes) {
      std::vector<float> scale(rows);
      for (float& s : scale) s = (1.5f + random.uniform()) * .004f;
      stored.resize(of.size());
      for (int64_t i = 0; i < rows * columns; ++i) {
        const float s = scale[i / columns];
        stored[i] = __nv_cvt_float_to_fp8(of[i] / s, __NV_SATFINITE, __NV_E4M3);
        of[i] = code_value(stored[i]) * s;
      }
      CHECK_CUDA(
          cudaMemcpy(scales.data + expert * rows, scale.data(), rows * 4, cudaMemcpyHostToDevice));
    } else {
      stored = rounded<T>(of);
    }
    CHECK_CUDA(cudaMemcpy(weights.data + expert * rows * columns, stored.data(),
                          stored.size() * sizeof(Stored), cudaMemcpyHostToDevice));
    bias_values[expert] = random.floats(rows, .3f);
    const std::vector<T> bias = rounded<T>(bias_values[expert]);
    CHECK_CUDA(cudaMemcpy(biases.data + expert * rows, bias.data(), rows * sizeof(T),
                          cudaMemcpyHostToDevice));
  }

  std::vector<double> times(int64_t expert, const double* x, bool add_bias) const {
    std::vector<double> y(rows);
#pragma omp parallel for
    for (int64_t n = 0; n < rows; ++n) {
      double sum = add_bias ? bias_values[expert][n] : 0.;
      for (int64_t k = 0; k < columns; ++k) sum += x[k] * values[expert][n * columns + k];
      y[n] = sum;
    }
    return y;
  }
};

template <class T>
double error_of(const std::vector<T>& got, const std::vector<double>& want, int64_t first,
                int64_t count) {
  double difference = 0, norm = 0;
  for (int64_t i = first; i < first + count; ++i) {
    const double x = host_float(got[i]);
    if (std::isnan(want[i])) {
      difference += std::isnan(x) ? 0. : INFINITY;
    } else {
      difference += std::isfinite(x) ? (x - want[i]) * (x - want[i]) : INFINITY;
      norm += want[i] * want[i];
    }
  }
  return std::sqrt(norm > 0 ? difference / norm : difference);
}

void fill_logits(const Case& c, int tokens, Random& random, std::vector<float>& logits) {
  logits = random.floats(tokens * c.experts, 4.f);
  const auto at = [&](int64_t e) -> float& { return logits[e % c.experts]; };
  if (c.logits == Logits::kNan) at(c.experts / 2) = NAN;
  if (c.logits == Logits::kInfinite) at(3) = INFINITY, at(5) = -INFINITY;
  if (c.logits == Logits::kEqual) {
    for (float& x : logits) x = static_cast<float>(random.below(3));
    if (c.experts > 2) at(0) = 0.f, at(1) = -0.f;
  }
}

template <class T, bool kCodes>
void check(const Case& c, int tokens, uint32_t seed) {
  Random random(seed);
  const int64_t up_rows = 2 * c.inner, width = c.shared + c.top * c.inner;
  Matrices<T, kCodes> gate_up(c.experts, up_rows, c.hidden), down(c.experts, c.hidden, c.inner);
  Matrices<T, false> shared_up(1, 2 * c.shared, c.hidden), shared_down(1, c.hidden, c.shared);
  shared_up.make(0, random), shared_down.make(0, random);
  std::vector<float> logits, router_bias = random.floats(c.experts, 1.f),
                             correction = random.floats(c.experts, .5f);
  fill_logits(c, tokens, random, logits);
  std::vector<float> x_values = random.floats(tokens * c.hidden, 1.7f),
                     source_values = random.floats(tokens * c.hidden, 1.f),
                     shared_gates = {.3f, .8f};
  const std::vector<T> x = rounded<T>(x_values), source = rounded<T>(source_values);

  // The reference.
  std::vector<double> want(tokens * c.hidden);
  for (int t = 0; t < tokens; ++t) {
    const Choice choice = choose_on_host(c.router, logits.data() + t * c.experts,
                                         c.router.bias ? router_bias.data() : nullptr,
                                         c.router.correction ? correction.data() : nullptr);
    std::vector<double> row(x_values.begin() + t * c.hidden, x_values.begin() + (t + 1) * c.hidden),
        sum(c.hidden);
    const auto add = [&](const auto& up, const auto& to, int64_t expert, int64_t size, double share,
                         bool codes, bool biases) {
      std::vector<double> in = row;
      if (codes) round_to_codes(in, 0, c.hidden, c.act_scale);
      const std::vector<double> both = up.times(expert, in.data(), biases);
      std::vector<double> made(size);
      for (int64_t i = 0; i < size; ++i) {
        made[i] = host_float(
            host_from<T>(static_cast<float>(gated(c.activation, both[i], both[size + i]))));
      }
      if (codes) round_to_codes(made, 0, size, c.act_scale);
      const std::vector<double> y = to.times(expert, made.data(), biases);
      for (int64_t n = 0; n < c.hidden; ++n) sum[n] += share * y[n];
    };
    if (c.shared > 0) {
      add(shared_up, shared_down, 0, c.shared, c.shared_gate ? shared_gates[t] : 1., false, false);
    }
    for (int64_t k = 0; k < c.top; ++k) {
      gate_up.make(choice.ids[k], random), down.make(choice.ids[k], random);
      add(gate_up, down, choice.ids[k], c.inner, choice.shares[k], kCodes, c.biases);
    }
    for (int64_t n = 0; n < c.hidden; ++n) {
      want[t * c.hidden + n] =
          c.made_scale * sum[n] + c.source_scale * source_values[t * c.hidden + n];
    }
  }

  const int64_t parts = ceil_div(c.hidden, gemm_sumsq_columns(tokens));
  Buffer<float> logits_buffer(logits), bias_buffer(router_bias), correction_buffer(correction),
      gates_buffer(shared_gates), act_buffer(std::vector<float>{c.act_scale});
  Buffer<T> x_buffer(x), source_buffer(source);
  FewTokensParams p;
  p.choose.router = c.router;
  p.choose.logits = logits_buffer.data;
  if (c.router.bias) p.choose.bias = bias_buffer.data;
  if (c.router.correction) p.choose.correction = correction_buffer.data;
  p.choose.num_tokens = tokens;
  p.x = x_buffer.data;
  p.gate_up = gate_up.weights.data, p.down = down.weights.data;
  if (c.biases) p.gate_up_bias = gate_up.biases.data, p.down_bias = down.biases.data;
  if (kCodes) {
    p.gate_up_scale = gate_up.scales.data, p.down_scale = down.scales.data;
    p.gate_up_act = p.down_act = act_buffer.data;
  }
  if (c.shared > 0) {
    p.shared_gate_up = shared_up.weights.data, p.shared_down = shared_down.weights.data;
  }
  if (c.shared_gate) p.shared_gate = gates_buffer.data;
  p.source_scale = c.source_scale, p.made_scale = c.made_scale;
  p.hidden_size = c.hidden, p.intermediate_size = c.inner, p.shared_size = c.shared;
  p.activation = c.activation;
  p.dtype = Traits<T>::dtype;

  const double tolerance = kCodes ? 1e-2 : std::is_same_v<T, __half> ? 1e-3 : 5e-3;
  const auto fail = [&](const std::string& way, const char* what, double error) {
    ++failures;
    printf("FAILED %s %s: %s %.1e\n",
           c.name(kCodes ? "codes" : dtype_name(p.dtype), tokens).c_str(), way.c_str(), what,
           error);
  };
  std::vector<T> first;  // of Hopper's
  const auto run = [&](const std::string& way, bool hopper, const FewTokensRings& rings) {
    Buffer<T> inner(tokens * width + kBehind), out(tokens * c.hidden + kBehind);
    Buffer<float> sumsq(tokens * parts + kBehind);
    p.inner = inner.data, p.out = out.data;
    p.sumsq_out = c.sumsq ? sumsq.data : nullptr;
    p.source = source_buffer.data;
    if (c.in_place) {
      CHECK_CUDA(
          cudaMemcpy(out.data, source.data(), source.size() * sizeof(T), cudaMemcpyHostToDevice));
      p.source = out.data;
    }
    CHECK_CUDA(cudaDeviceSynchronize());
    must(hopper ? few_tokens_sm90(p, rings, {nullptr, true})
                : few_tokens_generic(p, {nullptr, true}));
    CHECK_CUDA(cudaDeviceSynchronize());
    const std::vector<T> got = out.host(), made = inner.host();
    const std::vector<float> squares = sumsq.host();
    ++cases;
    for (int t = 0; t < tokens; ++t) {
      const double error = error_of(got, want, t * c.hidden, c.hidden);
      if (!(error < tolerance)) fail(way, t == 0 ? "token 0" : "token 1", error);
    }
    std::vector<double> sums(tokens * parts);
    for (int64_t i = 0; c.sumsq && i < tokens * c.hidden; ++i) {
      const double y = host_float(got[i]);
      sums[i / c.hidden * parts + i % c.hidden / gemm_sumsq_columns(tokens)] += y * y;
    }
    for (int64_t t = 0; c.sumsq && t < tokens; ++t) {
      const double error = error_of(squares, sums, t * parts, parts);
      if (!(error < 1e-5)) fail(way, "sums of squares", error);
    }
    T untouched;
    std::memset(&untouched, 0xff, sizeof(T));
    for (int64_t i = 0; i < kBehind; ++i) {
      const bool kept = std::memcmp(&got[tokens * c.hidden + i], &untouched, sizeof(T)) == 0 &&
                        std::memcmp(&made[tokens * width + i], &untouched, sizeof(T)) == 0 &&
                        std::isnan(squares[tokens * parts + i]);
      if (!kept) {
        fail(way, "written behind an output", static_cast<double>(i));
        break;
      }
    }
    if (!hopper) return;
    if (first.empty()) first = got;
    if (std::memcmp(first.data(), got.data(), got.size() * sizeof(T)) != 0) {
      fail(way, "other bits than the first run", 0);
    }
  };
  run("generic", false, {});
  run("sm90", true, {});
  run("sm90 again", true, {});
  run("sm90 pieces of 2048 bytes, 2 of them", true, {2048, 2, true});
  run("sm90 one after the other", true, {512, 5, false});
}

Router router_of(int64_t experts, int64_t top, bool renormalize) {
  Router router;
  router.num_experts = experts, router.top_k = top, router.renormalize = renormalize;
  return router;
}

template <class T, bool kCodes>
void check_all() {
  uint32_t seed = kCodes ? 1000 : 1;
  const auto both = [&](Case c) {
    c.router.num_experts = c.experts, c.router.top_k = c.top;
    for (const int tokens : {1, 2}) check<T, kCodes>(c, tokens, seed++);
  };
  // Of codes rows are whole units of 16.
  const int64_t odd = kCodes ? 16 : 8;
  for (int64_t top = 1; top <= 8; ++top) {
    Case c = {60, top, 2048 + odd * (top % 4), top % 3 == 0 || top == 8 ? 1408 : 416};
    c.router = router_of(60, top, top % 2 == 0);
    c.in_place = top % 3 != 0, c.sumsq = top != 5;
    if (!kCodes && top % 2 == 1) c.shared = top == 3 ? 2816 : 8 * top, c.shared_gate = top % 4 == 1;
    if (top == 4) c.source_scale = .5f, c.made_scale = 1.25f;
    if (kCodes && top == 7) c.act_scale = .02f;
    both(c);
  }
  // A row of less than a unit of every kind, and columns that are no whole tile.
  for (const int64_t inner : {odd, int64_t{48}, int64_t{208}, int64_t{272}, int64_t{784}}) {
    Case c = {16, 3, 128 + odd, inner};
    c.router = router_of(16, 3, false);
    c.biases = inner != 48;
    if (!kCodes) c.shared = inner == 272 ? 520 : inner == 48 ? 8 : 0;
    both(c);
    c.hidden = 4096 + 512 + odd;
    both(c);
  }
  for (const int64_t experts : {1, 5, 8, 31, 64, 128, 130, 256, 257, 300, 510, 512}) {
    Case c = {experts, std::min<int64_t>(experts, 10), 256, 64};
    c.router = router_of(experts, c.top, true);
    for (const Logits logits : {Logits::kRandom, Logits::kEqual, Logits::kNan, Logits::kInfinite}) {
      c.logits = logits;
      c.router.bias = experts % 2 == 1 && logits != Logits::kEqual;
      both(c);
    }
  }
  for (const Logits logits : {Logits::kRandom, Logits::kNan, Logits::kInfinite}) {
    Case c = {32, 4, 512, 96};
    c.logits = logits;
    c.router = router_of(32, 4, true);
    c.router.scoring = Scoring::kSigmoid, c.router.scale = 2.5f, c.router.correction = true;
    c.router.num_groups = 8, c.router.top_groups = 3, c.router.group_score = GroupScore::kTopTwo;
    both(c);
    c.router.group_score = GroupScore::kMax;
    if (logits != Logits::kInfinite) c.router.scoring = Scoring::kSoftmax;
    c.router.correction = false;
    both(c);
  }
  Case most = {64, 32, 256, 16};
  most.router = router_of(64, 32, true);
  both(most);
  for (const Function function : {Function::kGelu, Function::kGeluTanh, Function::kRelu}) {
    Case c = {16, 4, 256, 96};
    c.router = router_of(16, 4, true);
    c.activation.function = function;
    both(c);
  }
  Case clamped = {32, 4, 576, 288};
  clamped.router = router_of(32, 4, true);
  clamped.activation = {Function::kSilu, true, 1.f, 1.702f, 1.f};
  clamped.biases = true;
  both(clamped);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "dense";
  if (what == "codes") {
    check_all<__nv_bfloat16, true>();
    check_all<__half, true>();
  } else {
    check_all<__nv_bfloat16, false>();
    check_all<__half, false>();
  }
  printf("%s: %d cases, %d failures\n", what.c_str(), cases, failures);
  return failures > 0;
}
