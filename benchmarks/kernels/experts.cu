// Times what stands around the products of experts, of a step's tokens: norm and router, the choice
// and the sort, the sum of what experts made with the next norm. Each launch alone, and all of them
// in turn as layers have them, beside the launches that larger steps and other GPUs take: a norm
// and a product (or one launch for few rows), a choice and a sort, a sum that waits for all it
// reads. Two launches that do nothing stand for the products. Microseconds of a launch or a layer.
//
//   experts [MODEL]
#include "cuda/experts/experts.h"
#include "cuda/norm/sum_norm.h"
#include "regatta/cuda_ops.h"
#include "timing.cuh"

using namespace regatta;
using namespace regatta::bench;
using namespace regatta::cuda;

namespace {

using Bf16 = __nv_bfloat16;

struct Experts {
  const char* name;
  int64_t experts, top, hidden, groups, top_groups;
};
constexpr Experts kModels[] = {{"Qwen3-30B-A3B", 128, 8, 2048, 1, 1},
                               {"DeepSeek-V2-Lite", 64, 6, 2048, 1, 1},
                               {"DeepSeek-V3", 256, 8, 7168, 8, 4},
                               {"Mixtral-8x7B", 8, 2, 4096, 1, 1}};
constexpr int64_t kTokens[] = {4, 8, 32, 128, 256};
constexpr int kLayersTimed = 24;      // of a graph, each with a router of its own
constexpr int64_t kRowsOfRoute = 24;  // up to which route() makes logits

// Instead of a product: waits, and lets the next launch begin.
__global__ void nothing_kernel() {
  pdl_wait();
  pdl_trigger();
}

Status nothing(const Launch& on) {
  LaunchConfig config;
  config.grid = dim3(128);
  config.block = dim3(128);
  config.stream = on.stream;
  config.pdl = on.pdl;
  return launch(nothing_kernel, config, "nothing");
}

// One layer after another.
class Layers {
 public:
  Layers(const Experts& model, int64_t tokens)
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
        resources_(blas_resources(GemmOperands::kDense, tokens, model.experts)) {}

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

void time_tokens(const Experts& model, int64_t tokens) {
  const Layers layers(model, tokens);
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

}  // namespace

int main(int argc, char** argv) {
  std::printf("%-18s %4s   %13s   %13s   %13s   %13s\n", "us: apart, new", "rows", "norm, router",
              "choice, sort", "(nothing) sum", "layer");
  for (const Experts& model : kModels) {
    if (argc > 1 && std::string(argv[1]) != model.name) continue;
    for (const int64_t tokens : kTokens) time_tokens(model, tokens);
  }
  return 0;
}
