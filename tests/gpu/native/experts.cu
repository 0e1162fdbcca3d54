// What stands around the products of experts. check: the choice and the sorted rows must be those
// of plain loops to the last bit, with many sizes, groups, corrections, equal scores, NaN and
// infinite logits; norms, routers' logits and the sum of parts are held against doubles. time: norm
// and router, the choice and the sort, the sum of what experts made with the next norm, of a step's
// tokens; each launch alone, and all of them in turn as layers have them, beside the launches that
// larger steps and other GPUs take: a norm and a product (or one launch for few rows), a choice and
// a sort, a sum that waits for all it reads. Two launches that do nothing stand for the products.
//
//   experts check lists|routes|sums [ROUNDS]
//   experts time layers [MODEL] [TOKENS ...]
#include "cuda/experts/experts.h"
#include "cuda/experts/select.h"
#include "cuda/norm/sum_norm.h"
#include "products.cuh"
#include "regatta/cuda_ops.h"

using namespace regatta;
using namespace regatta::native;
using namespace regatta::cuda;

namespace {

// Scores of each expert in the order of sums that a warp has, by one thread a token: the functions
// of the device are not those of the host.
__global__ void scores_kernel(ChooseArgs a, float* scores) {
  const int token = blockIdx.x, count = static_cast<int>(a.router.num_experts);
  if (threadIdx.x > 0) return;
  scores += static_cast<int64_t>(token) * count;
  float largest = -INFINITY, sums[kWarp] = {};
  for (int e = 0; e < count; ++e) {
    scores[e] = a.logits[static_cast<int64_t>(token) * count + e];
    if (a.bias != nullptr) scores[e] += a.bias[e];
    largest = fmaxf(largest, scores[e]);
  }
  if (a.router.scoring == Scoring::kSigmoid) {
    for (int e = 0; e < count; ++e) scores[e] = 1.f / (1.f + expf(-scores[e]));
    return;
  }
  for (int e = 0; e < count; ++e) sums[e % kWarp] += scores[e] = expf(scores[e] - largest);
  for (int o = kWarp / 2; o > 0; o /= 2) {
    for (int i = 0; i < o; ++i) sums[i] += sums[i + o];
  }
  for (int e = 0; e < count; ++e) scores[e] = scores[e] / sums[0];
}

bool takes_route_step(const RouteParams& p) {
  ExpertProblem problem;
  problem.dtype = p.dtype;
  problem.num_tokens = p.num_tokens, problem.hidden_size = p.hidden_size;
  problem.num_experts = p.num_experts;
  return compute_capability() == 90 && route_step_sm90_refuses(problem).empty();
}

struct ListCase {
  Router router;
  int tokens = 0, hidden = 0;
  int first = 0, own = 0;  // experts that are here
  enum Kind { kPlain, kTies, kSpoiled } kind = kPlain;
  DType dtype = DType::kBFloat16;

  std::string name() const {
    const char* const kinds[] = {"plain", "ties", "spoiled"};
    return format(
        "%s tokens %d experts %ld (%d from %d on) top %ld groups %ld of which %ld hidden %d dtype "
        "%s%s%s%s%s",
        kinds[kind], tokens, router.num_experts, own, first, router.top_k, router.num_groups,
        router.top_groups, hidden, dtype_name(dtype),
        router.scoring == Scoring::kSoftmax ? " softmax" : " sigmoid", router.bias ? " bias" : "",
        router.correction ? " correction" : "", router.renormalize ? " renormalized" : "");
  }
};

// What one token's scores choose, as predict/nn/blocks.py has it.
void choose_plainly(const Router& router, const float* logits, const float* scores,
                    const float* correction, int32_t* ids, float* shares) {
  const int count = static_cast<int>(router.num_experts), top = static_cast<int>(router.top_k);
  if (std::any_of(logits, logits + count, [](float x) { return std::isnan(x); })) {
    for (int j = 0; j < top; ++j) ids[j] = j, shares[j] = NAN;
    return;
  }
  std::vector<float> choice(scores, scores + count);
  for (int e = 0; e < count; ++e) {
    if (correction != nullptr) choice[e] += correction[e];
    if (std::isnan(choice[e])) choice[e] = -INFINITY;
  }
  if (router.top_groups < router.num_groups) {
    const int groups = static_cast<int>(router.num_groups), size = count / groups;
    std::vector<float> of(groups);
    for (int g = 0; g < groups; ++g) {
      std::vector<float> own(choice.begin() + g * size, choice.begin() + (g + 1) * size);
      own.push_back(-INFINITY);
      std::sort(own.begin(), own.end(), std::greater<float>());
      of[g] = router.group_score == GroupScore::kTopTwo ? own[0] + own[1] : own[0];
    }
    std::vector<int> order(groups);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return of[a] > of[b]; });
    for (int i = static_cast<int>(router.top_groups); i < groups; ++i) {
      std::fill_n(choice.begin() + order[i] * size, size, -INFINITY);
    }
  }
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return choice[a] > choice[b]; });
  float sum = 0.f;
  for (int j = 0; j < top; ++j) sum += scores[order[j]];
  for (int j = 0; j < top; ++j) {
    ids[j] = order[j];
    shares[j] = (router.renormalize ? scores[order[j]] / sum : scores[order[j]]) * router.scale;
    if (std::isnan(shares[j])) shares[j] = NAN;  // of whatever sign
  }
}

std::vector<float> logits_of(const ListCase& c, Random& random) {
  const int64_t count = c.router.num_experts;
  std::vector<float> logits = random.floats(c.tokens * count, 6.f);
  if (c.kind == ListCase::kPlain) return logits;
  for (float& x : logits) x = std::floor(x / 3.f);
  if (c.kind == ListCase::kTies) return logits;
  for (int64_t t = 0; t < c.tokens; ++t) {
    float* const row = &logits[t * count];
    switch (random.below(6)) {
      case 0:
        row[random.below(count)] = NAN;
        break;
      case 1:
        row[random.below(count)] = INFINITY;
        break;
      case 2:
        for (int i = 0; i < 3; ++i) row[random.below(count)] = -INFINITY;
        break;
      case 3:
        std::fill_n(row, count, -INFINITY);
        break;
      case 4:
        for (int64_t e = 0; e < count; ++e) row[e] = random.below(2) ? 0.f : -0.f;
        break;
    }
  }
  return logits;
}

void check_lists(const ListCase& c, bool together, Random& random) {
  const Router& router = c.router;
  const int64_t count = router.num_experts, pairs = c.tokens * router.top_k;
  const int64_t row_bytes = c.hidden * dtype_size(c.dtype);
  const Buffer<float> logits(logits_of(c, random)), bias(random.floats(count, 0.5f)),
      correction(random.floats(count, 0.3f)), scores(c.tokens * count);
  std::vector<uint8_t> rows(c.tokens * row_bytes);
  for (uint8_t& byte : rows) byte = static_cast<uint8_t>(random.below(256));
  const Buffer<uint8_t> x(rows), sorted(pairs * row_bytes);
  const Buffer<int32_t> ids(pairs), places(pairs), ends(count), counts(sort_counts(pairs, count));
  const Buffer<float> shares(pairs);
  ChooseAndSortParams p;
  p.choose.router = router;
  p.choose.logits = logits.data;
  if (router.bias) p.choose.bias = bias.data;
  if (router.correction) p.choose.correction = correction.data;
  p.choose.ids = ids.data, p.choose.shares = shares.data, p.choose.num_tokens = c.tokens;
  p.choose.first_expert = c.first, p.choose.num_own = c.own;
  p.x = x.data, p.sorted = sorted.data, p.ends = ends.data, p.places = places.data;
  p.counts = counts.data, p.hidden_size = c.hidden, p.dtype = c.dtype;
  CHECK_STATUS(
      launch(scores_kernel, LaunchConfig({}, c.tokens, kWarp), "scores", p.choose, scores.data));
  CHECK_STATUS(choose_and_sort(p, together && sorts_together(p), {}));
  CHECK_CUDA(cudaDeviceSynchronize());

  const std::vector<float> host_logits = logits.host(), host_bias = bias.host(),
                           host_scores = scores.host(), host_correction = correction.host();
  std::vector<int32_t> want_ids(pairs), want_places(pairs), want_ends(count);
  std::vector<float> want_shares(pairs), biased(count);
  std::vector<uint8_t> want_sorted(pairs * row_bytes);
  for (int64_t t = 0; t < c.tokens; ++t) {
    for (int64_t e = 0; e < count; ++e) {
      biased[e] = host_logits[t * count + e] + (router.bias ? host_bias[e] : 0.f);
    }
    choose_plainly(router, biased.data(), &host_scores[t * count],
                   router.correction ? host_correction.data() : nullptr,
                   &want_ids[t * router.top_k], &want_shares[t * router.top_k]);
  }
  for (int32_t& id : want_ids) id = static_cast<int32_t>((id + count - c.first) % count);
  int32_t place = 0, num_rows = 0;  // of experts that are here
  for (int32_t e = 0; e < count; ++e) {
    for (int64_t pair = 0; pair < pairs; ++pair) {
      if (want_ids[pair] != e) continue;
      want_places[pair] = e < c.own ? place : -1;
      if (e < c.own) {
        std::memcpy(&want_sorted[place * row_bytes], &rows[pair / router.top_k * row_bytes],
                    row_bytes);
        num_rows = place + 1;
      }
      ++place;
    }
    want_ends[e] = place;
  }
  std::vector<uint8_t> got_sorted = sorted.host();
  for (auto* of : {&got_sorted, &want_sorted}) of->resize(num_rows * row_bytes);
  std::vector<float> got_shares = shares.host();
  for (float& share : got_shares) {
    if (std::isnan(share)) share = NAN;
  }
  std::string wrong;
  const auto compare = [&](const char* name, const auto& got, const auto& want) {
    if (!same_bits(got, want)) wrong += name;
  };
  compare(" ids", ids.host(), want_ids);
  compare(" shares", got_shares, want_shares);
  compare(" ends", ends.host(), want_ends);
  compare(" places", places.host(), want_places);
  compare(" rows", got_sorted, want_sorted);
  count_case(wrong.empty(), c.name() + (together ? "" : " apart") + " differs in" + wrong);
}

ListCase random_lists(Random& random) {
  ListCase c;
  Router& router = c.router;
  constexpr int kExperts[] = {1,  2,  3,   8,   16,  31,  32,  33,  60,
                              64, 65, 100, 128, 129, 160, 256, 300, 512};
  constexpr int kHidden[] = {8, 36, 128, 520, 1024, 2048, 2880};
  router.num_experts = random.below(3) ? kExperts[random.below(18)] : 1 + random.below(512);
  router.num_groups = 1 << random.below(6);
  if (random.below(2) || router.num_experts % router.num_groups != 0) router.num_groups = 1;
  router.top_groups = 1 + random.below(static_cast<int>(router.num_groups));
  router.group_score = random.below(2) ? GroupScore::kTopTwo : GroupScore::kMax;
  const int64_t in_groups = router.num_experts / router.num_groups * router.top_groups;
  router.top_k = 1 + random.below(static_cast<int>(std::min<int64_t>(in_groups, kMaxChosen)));
  router.scoring = random.below(2) ? Scoring::kSigmoid : Scoring::kSoftmax;
  router.renormalize = random.below(2);
  router.bias = random.below(4) == 0;
  router.correction = random.below(3) == 0;
  router.scale = random.below(2) ? 1.f : 2.5f;
  c.own = static_cast<int>(router.num_experts);
  if (random.below(3) == 0) c.own = 1 + random.below(c.own);
  c.first = random.below(static_cast<int>(router.num_experts) - c.own + 1);
  c.tokens = random.below(3) ? 1 + random.below(40) : 1 + random.below(300);
  c.hidden = kHidden[random.below(7)];
  c.kind = static_cast<ListCase::Kind>(random.below(3));
  c.dtype = random.below(4) ? DType::kBFloat16 : DType::kFloat32;
  return c;
}

// Sizes that lie at borders of the kernels, and models'.
std::vector<ListCase> chosen_lists() {
  std::vector<ListCase> all;
  const auto add = [&](int tokens, int experts, int top, int groups, int top_groups, int hidden) {
    ListCase c;
    c.tokens = tokens, c.hidden = hidden;
    c.router.num_experts = c.own = experts, c.router.top_k = top;
    c.router.num_groups = groups, c.router.top_groups = top_groups;
    if (groups > 1) {
      c.router.scoring = Scoring::kSigmoid;
      c.router.correction = true;
      c.router.group_score = GroupScore::kTopTwo;
    }
    c.router.renormalize = true;
    all.push_back(c);
  };
  for (const int tokens : {1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 127, 128, 129, 256, 257}) {
    add(tokens, 128, 8, 1, 1, 2048);
    add(tokens, 256, 8, 8, 4, 512);
    add(tokens, 8, 2, 1, 1, 4096);
    add(tokens, 64, 6, 1, 1, 136);
    add(tokens, 512, 16, 1, 1, 64);
  }
  add(600, 128, 8, 1, 1, 256);
  add(2500, 128, 8, 1, 1, 64);
  return all;
}

template <class T>
void check_route(int tokens, int hidden, int experts, bool gate, bool plus_one, Random& random) {
  std::vector<float> xf = random.floats(static_cast<int64_t>(tokens) * hidden, 2.f);
  std::vector<float> nf = random.floats(hidden, 1.5f), gf = random.floats(hidden, 0.1f);
  std::vector<float> wf = random.floats(static_cast<int64_t>(experts) * hidden, 0.1f);
  if (tokens > 2) xf[hidden] = NAN;  // of the second row
  const Buffer<T> x(rounded<T>(xf)), norm(rounded<T>(nf)), weight(rounded<T>(wf)),
      shared(rounded<T>(gf)), normed(static_cast<int64_t>(tokens) * hidden);
  const Buffer<float> logits(static_cast<int64_t>(tokens) * experts), gates(tokens);
  RouteParams p;
  p.x = x.data, p.normed = normed.data, p.weight = weight.data;
  p.norm.is_there = true, p.norm.plus_one = plus_one, p.norm_weights.weight = norm.data;
  if (gate) p.shared_gate = shared.data;
  p.logits = logits.data, p.shared_gate_out = gates.data;
  p.num_tokens = tokens, p.hidden_size = hidden, p.num_experts = experts;
  p.dtype = Traits<T>::dtype;
  if (!takes_route_step(p)) return;
  CHECK_STATUS(route_step(p, {}));
  CHECK_CUDA(cudaDeviceSynchronize());
  const std::vector<T> rows = normed.host();
  const std::vector<float> got = logits.host(), got_gates = gates.host();
  const double step = std::is_same_v<T, __half> ? 1e-3 : 8e-3;
  std::string wrong;
  for (int t = 0; t < tokens && wrong.empty(); ++t) {
    const T* const row = &rows[static_cast<int64_t>(t) * hidden];
    if (tokens > 2 && t == 1) {
      for (int e = 0; e < experts; ++e) {
        if (!std::isnan(got[static_cast<int64_t>(t) * experts + e]))
          wrong = format("sound logit %d", e);
      }
      continue;
    }
    double square = 0;
    for (int i = 0; i < hidden; ++i) {
      const double v = xf[static_cast<int64_t>(t) * hidden + i];
      square += v * v;
    }
    const double factor = 1 / std::sqrt(square / hidden + p.norm.epsilon);
    for (int i = 0; i < hidden; ++i) {
      const double want =
          xf[static_cast<int64_t>(t) * hidden + i] * factor * (nf[i] + (plus_one ? 1.f : 0.f));
      const double off = std::abs(host_float(row[i]) - want);
      if (!(off <= step * std::abs(want) + 1e-6)) wrong = format("row %d column %d", t, i);
    }
    // Of the rows as they were written: what is left is the order of the sums.
    const auto dot = [&](const float* with, double* sizes) {
      double sum = 0;
      for (int i = 0; i < hidden; ++i) {
        const double y = static_cast<double>(host_float(row[i])) * with[i];
        sum += y, *sizes += std::abs(y);
      }
      return sum;
    };
    for (int e = 0; e < experts; ++e) {
      double sizes = 0;
      const double want = dot(&wf[static_cast<int64_t>(e) * hidden], &sizes);
      const double off = std::abs(got[static_cast<int64_t>(t) * experts + e] - want);
      if (!(off <= 2e-6 * sizes)) wrong = format("token %d expert %d off %g", t, e, off);
    }
    if (!gate) continue;
    double sizes = 0;
    const double want = 1 / (1 + std::exp(-dot(gf.data(), &sizes)));
    if (!(std::abs(got_gates[t] - want) <= 1e-5)) wrong = format("gate of token %d", t);
  }
  count_case(wrong.empty(),
             format("%s tokens %d hidden %d experts %d gate %d plus one %d: %s",
                    dtype_name(p.dtype), tokens, hidden, experts, gate, plus_one, wrong.c_str()));
}

void check_routes(int rounds, Random& random) {
  const auto both = [&](int tokens, int hidden, int experts, bool gate, bool plus_one) {
    check_route<__nv_bfloat16>(tokens, hidden, experts, gate, plus_one, random);
    check_route<__half>(tokens, hidden, experts, gate, plus_one, random);
  };
  for (const int tokens : {1, 3, 8, 16, 17, 33, 128}) both(tokens, 2048, 128, false, false);
  both(16, 7168, 256, false, false);
  both(20, 4096, 8, false, true);
  both(5, 8192, 64, true, false);
  both(40, 2048, 60, true, false);
  for (int i = 0; i < rounds; ++i) {
    both(1 + random.below(70), 8 * (1 + random.below(300)), 1 + random.below(200), random.below(2),
         random.below(2));
  }
}

template <class T>
void check_sum(int rows, int width, int top, int shared, bool next, Random& random) {
  const int64_t values = static_cast<int64_t>(rows) * width;
  std::vector<float> made = random.floats(values * top, 2.f), source = random.floats(values, 2.f),
                     more = random.floats(values, 2.f), weight = random.floats(width, 1.f);
  const std::vector<float> shares = random.floats(static_cast<int64_t>(rows) * top, 1.f),
                           gates = random.floats(rows, 1.f);
  std::vector<int32_t> places(static_cast<int64_t>(rows) * top);
  std::iota(places.begin(), places.end(), 0);
  std::shuffle(places.begin(), places.end(), random.engine);
  const Buffer<T> made_there(rounded<T>(made)), source_there(rounded<T>(source)),
      more_there(rounded<T>(more)), weight_there(rounded<T>(weight));
  const Buffer<float> shares_there(shares), gates_there(gates);
  const Buffer<int32_t> places_there(places);
  std::vector<T> outs[2], normeds[2];
  for (const bool ready : {false, true}) {
    const Buffer<T> out(values), normed(values);
    SumNormParams p;
    p.made = made_there.data, p.source = source_there.data;
    p.parts = {places_there.data, shares_there.data, top};
    if (shared > 0) p.parts.shared = more_there.data;
    if (shared > 1) p.parts.shared_gate = gates_there.data;
    p.parts.ready = ready;
    p.source_scale = 0.5f, p.made_scale = 1.5f;
    p.out = out.data, p.normed = normed.data;
    p.next_norm.is_there = next, p.next_weights.weight = weight_there.data;
    p.num_rows = rows, p.width = width, p.dtype = Traits<T>::dtype;
    CHECK_STATUS(sum_norm(p, {}));
    CHECK_CUDA(cudaDeviceSynchronize());
    outs[ready] = out.host(), normeds[ready] = normed.host();
  }
  std::string wrong;
  if (!same_bits(outs[0], outs[1])) wrong += " other bits where the parts are ready";
  if (!same_bits(normeds[0], normeds[1])) wrong += " other normed bits";
  const double step = std::is_same_v<T, __half> ? 2e-3 : 1.6e-2;
  for (int t = 0; t < rows && wrong.empty(); ++t) {
    double square = 0;
    for (int i = 0; i < width; ++i) {
      double y = 0, sizes = 0;
      const auto add = [&](double x) { y += x, sizes += std::abs(x); };
      for (int j = 0; j < top; ++j) {
        const int64_t at = static_cast<int64_t>(t) * top + j;
        add(static_cast<double>(shares[at]) * made[static_cast<int64_t>(places[at]) * width + i]);
      }
      const int64_t at = static_cast<int64_t>(t) * width + i;
      if (shared > 0) add((shared > 1 ? gates[t] : 1.f) * static_cast<double>(more[at]));
      const double want = 1.5 * y + 0.5 * source[at], got = host_float(outs[1][at]);
      if (!(std::abs(got - want) <= step * (sizes + std::abs(want)))) {
        wrong = format("row %d column %d", t, i);
      }
      square += got * got;
    }
    for (int i = 0; i < width && next; ++i) {
      const int64_t at = static_cast<int64_t>(t) * width + i;
      const double want = host_float(outs[1][at]) / std::sqrt(square / width + 1e-6) * weight[i];
      if (!(std::abs(host_float(normeds[1][at]) - want) <= step * std::abs(want) + 1e-6)) {
        wrong = format("norm of row %d column %d", t, i);
      }
    }
  }
  count_case(wrong.empty(),
             format("%s rows %d width %d top %d shared %d norm %d: %s",
                    dtype_name(Traits<T>::dtype), rows, width, top, shared, next, wrong.c_str()));
}

void check_sums(int rounds, Random& random) {
  const auto both = [&](int rows, int width, int top, int shared, bool next) {
    check_sum<__nv_bfloat16>(rows, width, top, shared, next, random);
    check_sum<__half>(rows, width, top, shared, next, random);
  };
  for (const int width : {2048, 4096, 7168, 8192, 8200, 36}) {
    both(3, width, 8, 0, true);
    both(2, width, 6, 2, false);
  }
  for (int i = 0; i < rounds; ++i) {
    both(1 + random.below(20), 8 * (1 + random.below(300)), 1 + random.below(17), random.below(3),
         random.below(2));
  }
}

void check_all_lists(const Words& words) {
  Random random(7);
  for (const ListCase& c : chosen_lists()) check_lists(c, true, random);
  for (int i = 0; i < words.numbers({400})[0]; ++i) {
    check_lists(random_lists(random), i % 4 > 0, random);
  }
}

// ------------------------------------------------------------------------------------------ time

using Bf16 = __nv_bfloat16;

struct Experts {
  const char* name;
  int64_t experts, top, hidden, groups, top_groups;
};
constexpr Experts kModels[] = {{"Qwen3-30B-A3B", 128, 8, 2048, 1, 1},
                               {"DeepSeek-V2-Lite", 64, 6, 2048, 1, 1},
                               {"DeepSeek-V3", 256, 8, 7168, 8, 4},
                               {"Mixtral-8x7B", 8, 2, 4096, 1, 1}};
constexpr int kLayersTimed = 24;      // of a graph, each with a router of its own
constexpr int64_t kRowsOfRoute = 24;  // up to which route() makes logits

// Instead of a product: waits, and lets the next launch begin.
__global__ void nothing_kernel() {
  pdl_wait();
  pdl_trigger();
}

Status nothing(const Launch& on) { return launch(nothing_kernel, {on, 128, 128}, "nothing"); }

// One layer after another.
class Layers {
 public:
  Layers(const Experts& model, int64_t tokens, const GemmResources& resources)
      : model_(model),
        tokens_(tokens),
        x_(values(tokens * model.hidden, 2.f)),
        norm_(values(model.hidden, 1.f)),
        weight_(values(kLayersTimed * model.experts * model.hidden, 0.05f)),
        normed_(tokens * model.hidden),
        sorted_(tokens * model.top * model.hidden),
        out_(tokens * model.hidden),
        logits_(tokens * model.experts),
        correction_(Random(3).floats(model.experts, 0.1f)),
        shares_(tokens * model.top),
        ids_(tokens * model.top),
        places_(tokens * model.top),
        ends_(model.experts),
        counts_(sort_counts(tokens * model.top, model.experts)),
        resources_(resources) {}

  Status route(int layer, bool is_new, const Launch& on) const {
    RouteParams p;
    p.x = x_.data, p.normed = normed_.data, p.norm.is_there = true;
    p.norm_weights.weight = norm_.data;
    p.weight = weight_.data + layer * model_.experts * model_.hidden;
    p.logits = logits_.data;
    p.num_tokens = tokens_, p.hidden_size = model_.hidden, p.num_experts = model_.experts;
    if (is_new && takes_route_step(p)) return route_step(p, on);
    if (tokens_ <= kRowsOfRoute) return cuda::route(p, on);
    NormParams n = {};
    n.x = x_.data, n.weight = norm_.data, n.out = normed_.data;
    n.num_tokens = tokens_, n.hidden_size = model_.hidden, n.epsilon = 1e-6f;
    n.dtype = DType::kBFloat16;
    const Status status = norm(n, on);
    if (!status.ok()) return status;
    GemmParams g;
    g.x = normed_.data, g.weight = p.weight, g.out = logits_.data;
    g.num_rows = tokens_, g.in_features = model_.hidden, g.out_features = model_.experts;
    g.dtype = DType::kBFloat16, g.out_dtype = DType::kFloat32;
    return gemm(g, resources_, nullptr, on.stream);
  }

  Status sort(bool is_new, const Launch& on) const {
    ChooseAndSortParams p;
    Router& router = p.choose.router;
    router.num_experts = model_.experts, router.top_k = model_.top, router.renormalize = true;
    router.num_groups = model_.groups, router.top_groups = model_.top_groups;
    if (model_.groups > 1) {
      router.scoring = Scoring::kSigmoid;
      router.group_score = GroupScore::kTopTwo;
      p.choose.correction = correction_.data;
    }
    p.choose.logits = logits_.data, p.choose.ids = ids_.data, p.choose.shares = shares_.data;
    p.choose.num_tokens = static_cast<int>(tokens_);
    p.choose.num_own = static_cast<int>(model_.experts);
    p.x = normed_.data, p.sorted = sorted_.data, p.ends = ends_.data, p.places = places_.data;
    p.counts = counts_.data, p.hidden_size = model_.hidden;
    return choose_and_sort(p, is_new && sorts_together(p), on);
  }

  Status sum(bool is_new, const Launch& on) const {
    SumNormParams p;
    p.made = sorted_.data, p.source = x_.data, p.out = out_.data, p.normed = normed_.data;
    p.parts = {places_.data, shares_.data, model_.top};
    p.parts.ready = is_new;
    p.next_norm.is_there = true, p.next_weights.weight = norm_.data;
    p.num_rows = tokens_, p.width = model_.hidden;
    return sum_norm(p, on);
  }

  Status layer(int layer, bool is_new, const Launch& on) const {
    for (const auto& part :
         {Part([&] { return route(layer, is_new, on); }), Part([&] { return sort(is_new, on); }),
          Part([&] { return nothing(on); }), Part([&] { return nothing(on); }),
          Part([&] { return sum(is_new, on); })}) {
      const Status status = part();
      if (!status.ok()) return status;
    }
    return {};
  }

 private:
  using Part = std::function<Status()>;

  static std::vector<Bf16> values(int64_t count, float scale) {
    std::vector<float> floats = Random(static_cast<uint32_t>(count)).floats(count, scale);
    return rounded<Bf16>(floats);
  }

  const Experts& model_;
  int64_t tokens_;
  Buffer<Bf16> x_, norm_, weight_, normed_, sorted_, out_;
  Buffer<float> logits_, correction_, shares_;
  Buffer<int32_t> ids_, places_, ends_, counts_;
  GemmResources resources_;
};

void time_tokens(const Experts& model, int64_t tokens, const GemmResources& resources) {
  const Layers layers(model, tokens, resources);
  using Call = std::function<Status(int, bool, const Launch&)>;
  const Call calls[] = {
      [&](int i, bool is_new, const Launch& on) { return layers.route(i, is_new, on); },
      [&](int, bool is_new, const Launch& on) { return layers.sort(is_new, on); },
      // What is ready is older than the launch ahead.
      [&](int, bool is_new, const Launch& on) {
        const Status status = nothing(on);
        return status.ok() ? layers.sum(is_new, on) : status;
      },
      [&](int i, bool is_new, const Launch& on) { return layers.layer(i, is_new, on); }};
  const auto body = [&](const Call& call, bool is_new) {
    return Body([&call, is_new](cudaStream_t stream) {
      for (int i = 0; i < kLayersTimed; ++i) {
        CHECK_STATUS(call(i, is_new, Launch{stream, i > 0}));
      }
    });
  };
  std::vector<Body> bodies = {body(calls[3], false)};  // first: all lists are there for the others
  for (const Call& call : calls) {
    for (const bool is_new : {false, true}) bodies.push_back(body(call, is_new));
  }
  const std::vector<double> ms = graphs_ms(bodies, 6, 20);
  const auto us = [&](int i) { return ms[i + 1] * 1e3 / kLayersTimed; };
  std::printf("%-18s %4ld", model.name, static_cast<long>(tokens));
  for (int i = 0; i < 4; ++i) std::printf("   %6.2f %6.2f", us(2 * i), us(2 * i + 1));
  std::printf("\n");
}

void time_layers(const Words& words) {
  const GemmResources resources = blas_resources();
  std::printf("%-18s %4s   %13s   %13s   %13s   %13s\n", "us: apart, new", "rows", "norm, router",
              "choice, sort", "(nothing) sum", "layer");
  for (const Experts& model : rows_named(kModels, words)) {
    for (const int64_t tokens : words.numbers({4, 8, 32, 128, 256})) {
      time_tokens(model, tokens, resources);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  Random random(7);
  const auto rounds = [](const Words& words) { return static_cast<int>(words.numbers({20})[0]); };
  return run_parts(
      argc, argv,
      {{"check", "lists", check_all_lists},
       {"check", "routes", [&](const Words& words) { check_routes(rounds(words), random); }},
       {"check", "sums", [&](const Words& words) { check_sums(rounds(words), random); }},
       {"time", "layers", time_layers}});
}
