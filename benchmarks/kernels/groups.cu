// Times products whose groups of rows have a weight each, of models with experts: each token takes
// `top` of them at random, and every launch has tokens of its own. TB/s: of the weights of experts
// that are taken; TFLOP/s: of rows.
//
//   groups [decode | prompt | chain | tune TOKENS ...] [bf16 | fp8 | blocks | int8] [MODEL]
// chain: both products of a layer in turn, the second one's ends ready or not, and with and without
// dependent launches. tune: the best tiles of gemm_sm90 for so many tokens.
#include "cuda/gemm/select.h"
#include "timing.cuh"

using namespace regatta;
using namespace regatta::bench;
using namespace regatta::cuda;

namespace {

struct Experts {
  const char* name;
  int64_t groups, top, hidden, inner;
};
constexpr Experts kModels[] = {{"Qwen3-30B-A3B", 128, 8, 2048, 768},
                               {"Mixtral-8x7B", 8, 2, 4096, 14336},
                               {"DeepSeek-V2-Lite", 64, 6, 2048, 1408},
                               {"Qwen1.5-MoE", 60, 4, 2048, 1408},
                               {"gpt-oss-20b", 32, 4, 2880, 2880}};

enum class Scheme { kDense, kFp8, kBlocks, kInt8 };
constexpr const char* kSchemes[] = {"bf16", "fp8", "blocks", "int8"};

constexpr int kLaunches = 16;  // of a graph, each with ends of its own
constexpr double kMostBytes = 12e9;

// Rows of each of kLaunches launches, as they lie by expert.
struct Routing {
  int32_t* ends;            // [kLaunches, G] on the device
  double mean_experts = 0;  // that a launch takes

  Routing(const Experts& model, int64_t tokens) {
    Random random(static_cast<uint32_t>(tokens) + 5);
    std::vector<int32_t> all;
    for (int i = 0; i < kLaunches; ++i) {
      std::vector<int32_t> counts(model.groups, 0);
      for (int64_t token = 0; token < tokens; ++token) {
        std::vector<bool> taken(model.groups);
        for (int64_t k = 0; k < model.top; ++k) {
          int expert = random.below(static_cast<int>(model.groups));
          while (taken[expert]) expert = random.below(static_cast<int>(model.groups));
          taken[expert] = true;
          ++counts[expert];
        }
      }
      int32_t end = 0;
      for (const int32_t count : counts) {
        mean_experts += (count > 0) / static_cast<double>(kLaunches);
        all.push_back(end += count);
      }
    }
    CHECK_CUDA(cudaMalloc(&ends, all.size() * 4));
    CHECK_CUDA(cudaMemcpy(ends, all.data(), all.size() * 4, cudaMemcpyHostToDevice));
  }
  ~Routing() { cudaFree(ends); }
  Routing(const Routing&) = delete;
};

// A model's two products of experts: gates and ups, and down.
struct Model {
  Experts experts;
  Scheme scheme;
  int64_t rows;
  std::vector<uint8_t*> weights[2];  // of layers
  uint8_t *hidden, *inner, *out;     // x stays as it is: zeros take less power
  float *x_scale, *weight_scale;

  Model(const Experts& e, Scheme k, int64_t most_tokens)
      : experts(e), scheme(k), rows(most_tokens * e.top) {
    const double layer = static_cast<double>(bytes(0) + bytes(1)) * e.groups;
    const int layers = std::clamp(static_cast<int>(kMostBytes / layer), 1, 4);
    for (int i = 0; i < layers; ++i) {
      for (int product = 0; product < 2; ++product) {
        weights[product].push_back(random_bytes(bytes(product) * e.groups, 2 * i + product));
      }
    }
    hidden = random_bytes(rows * e.hidden * 2, 98);
    inner = random_bytes(rows * e.inner * 2, 99);
    out = random_bytes(rows * std::max(e.hidden, e.inner) * 2, 97);
    const int64_t blocks = ceil_div(std::max(e.hidden, e.inner), kScaleBlock);
    x_scale = filled_floats(gemm_block_stride(rows) * blocks, kCodeScale);
    weight_scale = filled_floats(e.groups * std::max(2 * e.inner, e.hidden) * blocks, kCodeScale);
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  ~Model() {
    for (const auto& of : weights) {
      for (uint8_t* p : of) cudaFree(p);
    }
    for (void* p : {static_cast<void*>(hidden), static_cast<void*>(inner), static_cast<void*>(out),
                    static_cast<void*>(x_scale), static_cast<void*>(weight_scale)}) {
      cudaFree(p);
    }
  }
  Model(const Model&) = delete;

  int64_t features(int product) const { return product == 0 ? 2 * experts.inner : experts.hidden; }
  int64_t depth(int product) const { return product == 0 ? experts.hidden : experts.inner; }
  int64_t bytes(int product) const {  // of an expert's weight
    return features(product) * depth(product) * (scheme == Scheme::kDense ? 2 : 1);
  }

  GemmParams params(int product, int launch, int64_t tokens, const Routing& routing) const {
    GemmParams p;
    p.operands = scheme == Scheme::kDense  ? GemmOperands::kDense
                 : scheme == Scheme::kInt8 ? GemmOperands::kInt8
                                           : GemmOperands::kFp8;
    p.x = product == 0 ? hidden : inner;
    p.out = out;
    p.weight = weights[product][launch % weights[product].size()];
    if (scheme != Scheme::kDense) p.x_scale = x_scale, p.weight_scale = weight_scale;
    p.scale_rows = scheme == Scheme::kBlocks ? kScaleBlock : 0;
    p.num_rows = tokens * experts.top;
    p.in_features = depth(product);
    p.out_features = features(product);
    p.gated = product == 0;
    p.num_groups = experts.groups;
    p.group_ends = routing.ends + launch * experts.groups;
    return p;
  }

  // Microseconds of a launch; 0 where the kernel refuses.
  using Run = std::function<Status(const GemmParams&, cudaStream_t)>;
  double us(int product, int64_t tokens, const Routing& routing, const Run& run) const {
    if (!run(params(product, 0, tokens, routing), nullptr).ok()) return 0.;
    CHECK_CUDA(cudaDeviceSynchronize());
    return 1e3 / kLaunches *
           graph_ms(
               [&](cudaStream_t stream) {
                 for (int i = 0; i < kLaunches; ++i) {
                   CHECK_STATUS(run(params(product, i, tokens, routing), stream));
                 }
               },
               7);
  }

  void print_rates(int product, int64_t tokens, const Routing& routing, double time) const {
    const double flops = 2. * tokens * experts.top * features(product) * depth(product);
    printf("%8.1f (%.2f TB/s, %.0f TFLOP/s)", time,
           routing.mean_experts * bytes(product) / time / 1e6, flops / time / 1e6);
  }
};

constexpr const char* kProducts[] = {"gate_up", "down"};

void time_candidates(const Model& model, const std::vector<int64_t>& all_tokens) {
  for (const int64_t tokens : all_tokens) {
    const Routing routing(model.experts, tokens);
    for (int product = 0; product < 2; ++product) {
      printf("%6ld tokens, %5.1f experts, %-7s", tokens, routing.mean_experts, kProducts[product]);
      for (const char* name : {"", "gemv", "sm90", "tiles"}) {
        const double time =
            model.us(product, tokens, routing, [&](const GemmParams& p, cudaStream_t stream) {
              // Past the choice, which leaves rows that may share an expert to others.
              if (name[0] == 'g' && p.num_rows <= 32) return gemm_stream_sm80(p, false, stream);
              return gemm(p, {}, name[0] == 0 ? nullptr : name, stream);
            });
        if (time == 0.) continue;
        printf(" | %s", name[0] == 0 ? "chosen" : name);
        model.print_rates(product, tokens, routing, time);
      }
      printf("\n");
    }
  }
}

void time_chain(const Model& model, const std::vector<int64_t>& all_tokens) {
  for (const int64_t tokens : all_tokens) {
    const Routing routing(model.experts, tokens);
    printf("%6ld tokens, %5.1f experts, both products", tokens, routing.mean_experts);
    for (const int way : {2, 1, 0}) {
      const double time = 1e3 / kLaunches *
                          graph_ms(
                              [&](cudaStream_t stream) {
                                for (int i = 0; i < 2 * kLaunches; ++i) {
                                  GemmParams p = model.params(i % 2, i / 2, tokens, routing);
                                  p.dependent_launch = way > 0;
                                  p.group_ends_ready = way == 2 && i % 2 == 1;
                                  CHECK_STATUS(gemm(p, {}, nullptr, stream));
                                }
                              },
                              7);
      const double bytes = routing.mean_experts * (model.bytes(0) + model.bytes(1));
      printf(" | %s %.1f (%.2f TB/s)",
             way == 2   ? "ends ready"
             : way == 1 ? "not ready"
                        : "no PDL",
             time, bytes / time / 1e6);
    }
    printf("\n");
  }
}

void tune(const Model& model, int64_t tokens) {
  struct Timed {
    double time;
    GemmTile tile;
  };
  const Routing routing(model.experts, tokens);
  for (int product = 0; product < 2; ++product) {
    const GemmTile chosen = choose_gemm_tile(model.params(product, 0, tokens, routing));
    std::vector<Timed> all;
    const auto time = [&](const GemmTile& tile) {
      return model.us(product, tokens, routing, [&](const GemmParams& p, cudaStream_t stream) {
        return gemm_sm90(p, tile, stream);
      });
    };
    for (const int rows : {chosen.tokens / 2, chosen.tokens, chosen.tokens * 2}) {
      for (const int features : {64, 128}) {
        for (const int budget : {50, 66, 100, 146, 216}) {
          for (const int split : {1, 2, 4}) {
            for (const int trigger : {-1, 4}) {
              const GemmTile t = {rows, features, std::min(16, budget * 8 / (features + rows)),
                                  split, trigger};
              if (rows < 8 || rows > 128 || t.stages < 3) continue;
              all.push_back({time(t), t});
            }
          }
        }
      }
    }
    std::sort(all.begin(), all.end(),
              [](const Timed& a, const Timed& b) { return a.time < b.time; });
    printf("%6ld tokens, %5.1f experts, %-7s chosen {%d, %d, %d, %d, %d}", tokens,
           routing.mean_experts, kProducts[product], chosen.tokens, chosen.features, chosen.stages,
           chosen.split, chosen.trigger);
    model.print_rates(product, tokens, routing, time(chosen));
    for (size_t i = 0; i < std::min<size_t>(6, all.size()); ++i) {
      const GemmTile& t = all[i].tile;
      printf(" | {%d, %d, %d, %d, %d} %.1f", t.tokens, t.features, t.stages, t.split, t.trigger,
             all[i].time);
    }
    printf("\n");
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::string mode = "decode", name;
  Scheme scheme = Scheme::kDense;
  std::vector<int64_t> tokens;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const auto* found = std::find(std::begin(kSchemes), std::end(kSchemes), word);
    if (found != std::end(kSchemes)) {
      scheme = static_cast<Scheme>(found - std::begin(kSchemes));
    } else if (word == "decode" || word == "prompt" || word == "chain" || word == "tune") {
      mode = word;
    } else if (std::isdigit(word[0])) {
      tokens.push_back(std::atoll(argv[i]));
    } else {
      name = word;
    }
  }
  if (tokens.empty() && mode == "prompt") tokens = {1024, 2048, 4096, 8192};
  if (tokens.empty() && mode == "tune") tokens = {1, 8, 32, 128};
  if (tokens.empty()) tokens = {1, 2, 4, 8, 16, 32, 64, 128, 256};
  setvbuf(stdout, nullptr, _IOLBF, 4096);
  cudaDeviceProp properties;
  CHECK_CUDA(cudaGetDeviceProperties(&properties, 0));
  printf("%s, %s, us of a product\n", properties.name, kSchemes[static_cast<int>(scheme)]);
  for (const Experts& experts : kModels) {
    if (!name.empty() && std::string(experts.name).find(name) == std::string::npos) continue;
    const Model model(experts, scheme, *std::max_element(tokens.begin(), tokens.end()));
    printf("%s: %ld experts, top %ld, hidden %ld, inner %ld, %zu layers in turn\n", experts.name,
           experts.groups, experts.top, experts.hidden, experts.inner, model.weights[0].size());
    if (mode == "chain") {
      time_chain(model, tokens);
    } else if (mode == "tune") {
      for (const int64_t count : tokens) tune(model, count);
    } else {
      time_candidates(model, tokens);
    }
  }
  return 0;
}
