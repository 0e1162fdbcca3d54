// Times the experts of one and two tokens, layer behind layer in one graph: the router, then
// few_tokens() as Hopper and as every GPU has it, or the launches that sort rows. Each launch has a
// router of its own, so that layers choose alike no two times. TB/s: of the chosen weights, over
// all of the time.
//
//   few_tokens [tune] [bf16 | fp8] [MODEL]
// layer: with the products of qkv and of attention's output around it, of one token. tune: rings of
// Hopper's first launch.
#include "cuda/experts/experts.h"
#include "cuda/norm/sum_norm.h"
#include "timing.cuh"

using namespace regatta;
using namespace regatta::bench;
using namespace regatta::cuda;

namespace {

struct Experts {
  const char* name;
  int64_t experts, top, hidden, inner, shared;
};
constexpr Experts kModels[] = {{"Qwen3-30B-A3B", 128, 8, 2048, 768, 0},
                               {"DeepSeek-V2-Lite", 64, 6, 2048, 1408, 2816},
                               {"Mixtral-8x7B", 8, 2, 4096, 14336, 0}};

constexpr int kLaunches = 24;  // layers of a graph
constexpr int64_t kMostTokens = 2;
constexpr double kMostBytes = 16e9;

enum class Way { kSorted, kGeneric, kHopper };
constexpr const char* kWays[] = {"sorted rows", "every GPU's", "Hopper's"};

struct Layer {
  uint8_t *gate_up, *down, *shared_gate_up = nullptr, *shared_down = nullptr, *qkv, *out;
};

class Model {
 public:
  Model(const Experts& e, bool codes) : e_(e), codes_(codes) {
    const int64_t pairs = kMostTokens * e.top, widest = std::max(2 * e.inner, e.hidden);
    const int layers =
        std::clamp(static_cast<int>(kMostBytes / (expert_bytes() * e.experts)), 1, kLaunches);
    for (int i = 0; i < layers; ++i) {
      const auto some = [&](int64_t bytes, int which) {
        return random_bytes(bytes, 8 * i + which);
      };
      Layer layer;
      layer.gate_up = some(e.experts * 2 * e.inner * e.hidden * element(), 0);
      layer.down = some(e.experts * e.inner * e.hidden * element(), 1);
      if (shared() > 0) {
        layer.shared_gate_up = some(2 * shared() * e.hidden * 2, 2);
        layer.shared_down = some(shared() * e.hidden * 2, 3);
      }
      layer.qkv = some(qkv_size() * e.hidden * 2, 4);
      layer.out = some(mixed_size() * e.hidden * 2, 5);
      layers_.push_back(layer);
    }
    routers_ = random_bytes(kLaunches * e.experts * e.hidden * 2, 90);
    hidden_ = random_bytes(kMostTokens * e.hidden * 2, 98);
    norm_ = random_bytes(e.hidden * 2, 91);
    mixed_ = random_bytes(kMostTokens * mixed_size() * 2, 92);
    normed_ = random_bytes(kMostTokens * e.hidden * 2, 93);
    sorted_ = random_bytes(pairs * e.hidden * 2, 94);
    rows_ = random_bytes(pairs * widest * 2, 95);
    inner_ = random_bytes(kMostTokens * (shared() + e.top * e.inner) * 2, 96);
    shared_ = random_bytes(kMostTokens * e.hidden * 2, 97);
    attended_ = random_bytes(kMostTokens * qkv_size() * 2, 99);
    row_codes_ = random_bytes(pairs * widest, 101);
    made_ = random_bytes(kMostTokens * e.hidden * 2, 100);
    logits_ = filled_floats(kMostTokens * e.experts, 0.f);
    weight_scale_ = filled_floats(e.experts * widest, kCodeScale);
    code_scale_ = filled_floats(pairs, kCodeScale);
    act_scale_ = filled_floats(1, 0.f);
    shares_ = filled_floats(pairs, 0.f);
    const auto words = [](int64_t count) {
      return reinterpret_cast<int32_t*>(filled_floats(count, 0.f));
    };
    ids_ = words(pairs), places_ = words(pairs), ends_ = words(kMaxExperts);
    counts_ = words(std::max<int64_t>(1, sort_counts(pairs, e.experts)));
    CHECK_CUDA(cudaDeviceSynchronize());
  }

  size_t num_layers() const { return layers_.size(); }
  // Of what a token chooses.
  double bytes() const { return expert_bytes() * e_.top + 6. * shared() * e_.hidden; }

  // One layer.
  void put(int launch, int64_t tokens, Way way, bool with_products, const FewTokensRings& rings,
           cudaStream_t stream) const {
    const Layer& layer = layers_[launch % layers_.size()];
    if (with_products) {
      multiply(layer.qkv, hidden_, attended_, tokens, e_.hidden, qkv_size(), stream);
      multiply(layer.out, mixed_, made_, tokens, mixed_size(), e_.hidden, stream);
    }
    RouteParams route;
    route.x = hidden_;
    route.norm.is_there = true;
    route.norm_weights.weight = norm_;
    route.normed = normed_;
    route.weight = routers_ + launch * e_.experts * e_.hidden * 2;
    route.logits = logits_;
    route.num_tokens = tokens;
    route.hidden_size = e_.hidden;
    route.num_experts = e_.experts;
    CHECK_STATUS(cuda::route(route, {stream, true}));
    if (way == Way::kSorted) return put_sorted(layer, tokens, stream);
    FewTokensParams p;
    p.choose = choose_args(tokens);
    p.x = normed_;
    p.gate_up = layer.gate_up, p.down = layer.down;
    p.shared_gate_up = layer.shared_gate_up, p.shared_down = layer.shared_down;
    if (codes_) {
      p.gate_up_scale = p.down_scale = weight_scale_;
      p.gate_up_act = p.down_act = act_scale_;
    }
    p.inner = inner_, p.source = hidden_, p.out = made_;
    p.hidden_size = e_.hidden, p.intermediate_size = e_.inner, p.shared_size = shared();
    CHECK_STATUS(way == Way::kHopper ? few_tokens_sm90(p, rings, {stream, true})
                                     : few_tokens_generic(p, {stream, true}));
  }

 private:
  Experts e_;
  bool codes_;
  std::vector<Layer> layers_;
  uint8_t *routers_, *hidden_, *norm_, *mixed_, *normed_, *sorted_, *rows_, *inner_, *shared_,
      *attended_, *made_, *row_codes_;
  float *logits_, *weight_scale_, *code_scale_, *act_scale_, *shares_;
  int32_t *ids_, *places_, *ends_, *counts_;

  int64_t element() const { return codes_ ? 1 : 2; }
  // few_tokens() takes codes without shared experts.
  int64_t shared() const { return codes_ ? 0 : e_.shared; }
  int64_t qkv_size() const { return 5 * e_.hidden / 2; }
  int64_t mixed_size() const { return 2 * e_.hidden; }
  double expert_bytes() const { return 3. * e_.inner * e_.hidden * element(); }

  ChooseArgs choose_args(int64_t tokens) const {
    ChooseArgs choose;
    choose.router.num_experts = e_.experts;
    choose.router.top_k = e_.top;
    choose.router.renormalize = true;
    choose.logits = logits_;
    choose.num_tokens = static_cast<int>(tokens);
    return choose;
  }

  static void multiply(const uint8_t* weight, const void* x, void* out, int64_t rows,
                       int64_t in_features, int64_t out_features, cudaStream_t stream,
                       bool is_gated = false) {
    GemmParams p;
    p.x = x, p.weight = weight, p.out = out;
    p.num_rows = rows, p.in_features = in_features, p.out_features = out_features;
    p.gated = is_gated;
    CHECK_STATUS(gemm(p, {}, nullptr, stream));
  }

  // Of rows sorted by expert; codes of them first, where weights are codes.
  void multiply_groups(const uint8_t* weight, void* x, void* out, int64_t rows, int64_t in_features,
                       int64_t out_features, bool is_gated, cudaStream_t stream) const {
    GemmParams p;
    p.x = x, p.weight = weight, p.out = out;
    p.num_rows = rows, p.in_features = in_features, p.out_features = out_features;
    p.gated = is_gated;
    p.num_groups = e_.experts, p.group_ends = ends_, p.group_ends_ready = !is_gated;
    if (codes_) {
      QuantizeRowsParams q;
      q.x = x, q.codes = row_codes_, q.scale = code_scale_;
      q.num_rows = rows, q.width = in_features;
      CHECK_STATUS(quantize_rows(q, stream));
      p.operands = GemmOperands::kFp8;
      p.x = q.codes, p.x_scale = code_scale_, p.weight_scale = weight_scale_;
    }
    CHECK_STATUS(gemm(p, {}, nullptr, stream));
  }

  void put_sorted(const Layer& layer, int64_t tokens, cudaStream_t stream) const {
    const int64_t pairs = tokens * e_.top;
    if (shared() > 0) {
      multiply(layer.shared_gate_up, normed_, rows_, tokens, e_.hidden, 2 * shared(), stream, true);
      multiply(layer.shared_down, rows_, shared_, tokens, shared(), e_.hidden, stream);
    }
    ChooseAndSortParams sort;
    sort.choose = choose_args(tokens);
    sort.choose.ids = ids_, sort.choose.shares = shares_;
    sort.x = normed_, sort.sorted = sorted_;
    sort.ends = ends_, sort.places = places_, sort.counts = counts_;
    sort.hidden_size = e_.hidden;
    CHECK_STATUS(choose_and_sort(sort, {stream, true}));
    multiply_groups(layer.gate_up, sorted_, rows_, pairs, e_.hidden, 2 * e_.inner, true, stream);
    multiply_groups(layer.down, rows_, sorted_, pairs, e_.inner, e_.hidden, false, stream);
    SumNormParams sum;
    sum.made = sorted_;
    sum.parts.places = places_, sum.parts.shares = shares_, sum.parts.top_k = e_.top;
    if (shared() > 0) sum.parts.shared = shared_;
    sum.source = hidden_, sum.out = made_;
    sum.num_rows = tokens, sum.width = e_.hidden;
    CHECK_STATUS(sum_norm(sum, {stream, true}));
  }
};

Body chain(const Model& model, int64_t tokens, Way way, bool with_products,
           const FewTokensRings& rings) {
  return [=, &model](cudaStream_t stream) {
    for (int i = 0; i < kLaunches; ++i) model.put(i, tokens, way, with_products, rings, stream);
  };
}

void compare(const Model& model) {
  for (int64_t tokens = 1; tokens <= kMostTokens; ++tokens) {
    for (const bool with_products : {false, true}) {
      std::vector<Body> bodies;
      for (const Way way : {Way::kSorted, Way::kGeneric, Way::kHopper}) {
        bodies.push_back(chain(model, tokens, way, with_products, {}));
      }
      const std::vector<double> times = graphs_ms(bodies, 3, 12);
      printf("%ld tokens, %-7s", tokens, with_products ? "layer" : "experts");
      for (size_t i = 0; i < times.size(); ++i) {
        const double us = 1e3 * times[i] / kLaunches;
        printf(" | %s %6.1f us (%.2f TB/s)", kWays[i], us, tokens * model.bytes() / us / 1e6);
      }
      printf("\n");
    }
  }
}

void tune(const Model& model) {
  const FewTokensRings all[] = {
      {1024, 0, true},  {1024, 0, false}, {1024, 3, true}, {1024, 4, true},  {1024, 5, true},
      {1024, 6, false}, {2048, 2, true},  {2048, 3, true}, {2048, 3, false}, {512, 6, true}};
  for (const bool with_products : {false, true}) {
    std::vector<Body> bodies;
    for (const FewTokensRings& rings : all) {
      bodies.push_back(chain(model, 1, Way::kHopper, with_products, rings));
    }
    const std::vector<double> times = graphs_ms(bodies, 3, 12);
    printf("%s", with_products ? "layer  " : "experts");
    for (size_t i = 0; i < times.size(); ++i) {
      printf(" | %ld x %ld%s %.1f", all[i].depth, all[i].piece, all[i].together ? "" : " apart",
             1e3 * times[i] / kLaunches);
    }
    printf("\n");
  }
}

}  // namespace

int main(int argc, char** argv) {
  bool is_tuned = false, codes = false;
  std::string name;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "tune") {
      is_tuned = true;
    } else if (word == "fp8" || word == "bf16") {
      codes = word == "fp8";
    } else {
      name = word;
    }
  }
  setvbuf(stdout, nullptr, _IOLBF, 4096);
  cudaDeviceProp properties;
  CHECK_CUDA(cudaGetDeviceProperties(&properties, 0));
  printf("%s, %s, us of a layer\n", properties.name, codes ? "fp8" : "bf16");
  for (const Experts& e : kModels) {
    if (!name.empty() && std::string(e.name).find(name) == std::string::npos) continue;
    const Model model(e, codes);
    printf("%s: %ld experts, top %ld, hidden %ld, inner %ld, shared %ld, %zu layers in turn\n",
           e.name, e.experts, e.top, e.hidden, e.inner, codes ? 0 : e.shared, model.num_layers());
    is_tuned ? tune(model) : compare(model);
  }
  return 0;
}
