// Times products whose groups of rows have a weight each, of models with experts: each token takes
// `top` of them at random, and every launch has tokens of its own. TB/s: of the weights of experts
// that are taken; TFLOP/s: of rows.
//
//   groups [decode | prompt | chain | tune TOKENS ...] [SCHEME ...] [MODEL]
//   SCHEME: bf16, fp8, blocks, int8; of packed weights int4_32, int4_128 (columns that share a
//   scale), weight_int8, mxfp4, w4a8; packed: the first four of these
// chain: both products of a layer in turn, the second one's ends ready or not, and with and without
// dependent launches. tune: the tiles of gemm_sm90 (tokens, features, stages, blocks, trigger) for
// so many tokens, best first; of packed weights those of every kernel. What is chosen comes ahead
// of them.
#include "cuda/gemm/select.h"
#include "cuda/gemm/tiles.h"
#include "cuda/host.h"
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

struct Scheme {
  const char* name;
  GemmOperands operands;
  int64_t group_size = 128, scale_rows = 0;
};
constexpr Scheme kSchemes[] = {{"bf16", GemmOperands::kDense},
                               {"fp8", GemmOperands::kFp8},
                               {"blocks", GemmOperands::kFp8, 128, kScaleBlock},
                               {"int8", GemmOperands::kInt8},
                               {"int4_32", GemmOperands::kWeightInt4, 32},
                               {"int4_128", GemmOperands::kWeightInt4, 128},
                               {"weight_int8", GemmOperands::kWeightInt8},
                               {"mxfp4", GemmOperands::kWeightMxfp4, 32},
                               {"w4a8", GemmOperands::kW4A8, 128}};
constexpr int kFirstPacked = 4, kNumPacked = 4;  // that "packed" stands for

constexpr int kLaunches = 16;  // of a graph, each with ends of its own
constexpr double kMostBytes = 12e9;

__global__ void fill_kernel(uint8_t* p, int64_t n, uint32_t seed) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < n;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    // As 16-bit values and as codes of moderate size.
    p[i] = i % 2 == 1 ? (random_byte(i, seed) & 0x83) | 0x38 : random_byte(i, seed) & 0xbf;
  }
}

uint8_t* filled(int64_t bytes, uint32_t seed) {
  uint8_t* p;
  CHECK_CUDA(cudaMalloc(&p, bytes));
  fill_kernel<<<2048, 256>>>(p, bytes, seed);
  return p;
}

float* ones(int64_t count) {
  float* p;
  CHECK_CUDA(cudaMalloc(&p, count * 4));
  set_kernel<<<256, 256>>>(p, count, 1e-3f);
  return p;
}

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

  Model(const Experts& e, const Scheme& k, int64_t most_tokens)
      : experts(e), scheme(k), rows(most_tokens * e.top) {
    const double layer = static_cast<double>(bytes(0) + bytes(1)) * e.groups;
    const int layers = std::clamp(static_cast<int>(kMostBytes / layer), 1, 4);
    for (int i = 0; i < layers; ++i) {
      for (int product = 0; product < 2; ++product) {
        weights[product].push_back(filled(bytes(product) * e.groups, 2 * i + product));
      }
    }
    hidden = filled(rows * e.hidden * 2, 98);
    inner = filled(rows * e.inner * 2, 99);
    out = filled(rows * std::max(e.hidden, e.inner) * 2, 97);
    const int64_t blocks = ceil_div(std::max(e.hidden, e.inner), kScaleBlock);
    x_scale = ones(gemm_block_stride(rows) * blocks);
    weight_scale = ones(e.groups * std::max(2 * e.inner, e.hidden) * blocks);
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
    if (is_packed(scheme.operands)) {
      return packed_weight_bytes(features(product), depth(product), scheme.operands,
                                 scheme.group_size);
    }
    return features(product) * depth(product) * (scheme.operands == GemmOperands::kDense ? 2 : 1);
  }

  GemmParams params(int product, int launch, int64_t tokens, const Routing& routing) const {
    GemmParams p;
    p.operands = scheme.operands;
    p.x = product == 0 ? hidden : inner;
    p.out = out;
    p.weight = weights[product][launch % weights[product].size()];
    const bool x_codes = !is_packed(scheme.operands) && scheme.operands != GemmOperands::kDense;
    if (x_codes || scheme.operands == GemmOperands::kW4A8) p.x_scale = x_scale;
    if (x_codes || scheme.operands == GemmOperands::kWeightInt8) p.weight_scale = weight_scale;
    p.scale_rows = scheme.scale_rows;
    p.group_size = scheme.group_size;
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
      const std::vector<const char*> names =
          is_packed(model.scheme.operands) ? std::vector<const char*>{""}
                                           : std::vector<const char*>{"", "gemv", "sm90", "tiles"};
      for (const char* name : names) {
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
          for (const int blocks : {1, 2}) {
            for (const int trigger : {-1, 4}) {
              const GemmTile t = {rows, features, std::min(16, budget * 8 / (features + rows)),
                                  1,    trigger,  blocks};
              if (rows < 8 || rows > 64 || t.stages < 3 || budget * blocks > 216) continue;
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
           chosen.blocks, chosen.trigger);
    model.print_rates(product, tokens, routing, time(chosen));
    for (size_t i = 0; i < std::min<size_t>(6, all.size()); ++i) {
      const GemmTile& t = all[i].tile;
      printf(" | {%d, %d, %d, %d, %d} %.1f", t.tokens, t.features, t.stages, t.blocks, t.trigger,
             all[i].time);
    }
    printf("\n");
  }
}

// A kernel's tile of packed weights.
struct PackedWay {
  std::string label;
  Model::Run run;
  double time = 0.;
};

PackedWay packed_way(const PackedGroupsTile& t) {
  char label[64];
  snprintf(label, sizeof(label), "%d tokens %d x %d KB grain %d trigger %d", t.tokens, t.blocks,
           t.kilobytes, t.grain, t.trigger);
  return {label, [t](const GemmParams& p, cudaStream_t stream) {
            return gemm_packed_groups_sm90(p, t, stream);
          }};
}

// The tiles of every kernel for p but those that differ in grains and triggers alone.
std::vector<PackedWay> packed_ways(const GemmParams& p) {
  std::vector<PackedWay> ways;
  const int64_t mean = ceil_div(p.num_rows, p.num_groups);
  const PackedGroupsTile chosen = choose_packed_groups_tile(p);
  constexpr int kShared[][2] = {{1, 75}, {1, 112}, {1, 220}, {2, 56}, {2, 75}, {2, 112}, {3, 75}};
  for (const int tokens : {chosen.tokens / 2, chosen.tokens, chosen.tokens * 2}) {
    for (const auto& [blocks, kilobytes] : kShared) {
      if (tokens < 8 || tokens > 128) continue;
      ways.push_back(packed_way({tokens, blocks, kilobytes, chosen.grain, chosen.trigger}));
    }
  }
  for (const int kilobytes : {112, 220}) {
    if (mean > 8) continue;
    const GemvTile t = {1, kilobytes, p.gated ? 4 : 3};
    ways.push_back(
        {"vector " + std::to_string(kilobytes) + " KB",
         [t](const GemmParams& q, cudaStream_t stream) { return gemv_packed_sm90(q, t, stream); }});
  }
  for (const PackedTileCost& shape : kPackedTiles) {
    if (mean < 8 || !shape.grouped || (p.gated && !shape.gated)) continue;
    const PackedTiles t = {shape.rows, shape.tokens};
    ways.push_back({"large " + std::to_string(t.rows) + " x " + std::to_string(t.tokens),
                    [t](const GemmParams& q, cudaStream_t stream) {
                      return gemm_packed_tiles_sm90(q, t, stream);
                    }});
  }
  return ways;
}

void tune_packed(const Model& model, int64_t tokens) {
  const Routing routing(model.experts, tokens);
  for (int product = 0; product < 2; ++product) {
    GemmParams p = model.params(product, 0, tokens, routing);
    const auto time = [&](PackedWay& way) {
      way.time = model.us(product, tokens, routing, way.run);
    };
    std::vector<PackedWay> ways = packed_ways(p);
    for (PackedWay& way : ways) time(way);
    // Grains and triggers of the best one.
    PackedGroupsTile best = choose_packed_groups_tile(p);
    for (const int grain : {1, 2, 4}) {
      for (const int trigger : {-1, 0, 4}) {
        if ((p.gated && grain > 2) || (grain == best.grain && trigger == best.trigger)) continue;
        PackedGroupsTile other = best;
        other.grain = grain, other.trigger = trigger;
        ways.push_back(packed_way(other));
        time(ways.back());
      }
    }
    std::sort(ways.begin(), ways.end(),
              [](const PackedWay& a, const PackedWay& b) { return a.time < b.time; });
    const GemmCandidate* candidate = select_gemm(p, {90, num_multiprocessors(), 227 << 10});
    PackedWay chosen = {kernel_name(candidate->kernel), [](const GemmParams& q, cudaStream_t s) {
                          return gemm(q, {}, nullptr, s);
                        }};
    time(chosen);
    printf("%6ld tokens, %5.1f experts, %-7s chosen %s", tokens, routing.mean_experts,
           kProducts[product], chosen.label.c_str());
    if (candidate->kernel == GemmKernel::kSmallPacked) {
      printf(" (%s)", packed_way(best).label.c_str());
    }
    model.print_rates(product, tokens, routing, chosen.time);
    for (const PackedWay& way : ways) {
      if (way.time > 0.) printf(" | %s %.1f", way.label.c_str(), way.time);
    }
    printf("\n");
  }
}

void run_mode(const std::string& mode, const Model& model, const std::vector<int64_t>& tokens) {
  printf("%s, %s: %ld experts, top %ld, hidden %ld, inner %ld, %zu layers in turn\n",
         model.scheme.name, model.experts.name, model.experts.groups, model.experts.top,
         model.experts.hidden, model.experts.inner, model.weights[0].size());
  if (mode == "chain") return time_chain(model, tokens);
  if (mode != "tune") return time_candidates(model, tokens);
  for (const int64_t count : tokens) {
    if (is_packed(model.scheme.operands)) {
      tune_packed(model, count);
    } else {
      tune(model, count);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::string mode = "decode", name;
  std::vector<Scheme> schemes;
  std::vector<int64_t> tokens;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const auto* found = std::find_if(std::begin(kSchemes), std::end(kSchemes),
                                     [&](const Scheme& s) { return word == s.name; });
    if (found != std::end(kSchemes)) {
      schemes.push_back(*found);
    } else if (word == "packed") {
      schemes.assign(kSchemes + kFirstPacked, kSchemes + kFirstPacked + kNumPacked);
    } else if (word == "decode" || word == "prompt" || word == "chain" || word == "tune") {
      mode = word;
    } else if (std::isdigit(word[0])) {
      tokens.push_back(std::atoll(argv[i]));
    } else {
      name = word;
    }
  }
  if (tokens.empty() && mode == "prompt") tokens = {1024, 2048, 4096, 8192};
  if (tokens.empty() && mode == "tune") tokens = {1, 2, 8, 32, 128};
  if (schemes.empty()) schemes.push_back(kSchemes[0]);
  if (tokens.empty()) tokens = {1, 2, 4, 8, 16, 32, 64, 128, 256};
  setvbuf(stdout, nullptr, _IOLBF, 4096);
  cudaDeviceProp properties;
  CHECK_CUDA(cudaGetDeviceProperties(&properties, 0));
  printf("%s, us of a product\n", properties.name);
  for (const Experts& experts : kModels) {
    if (!name.empty() && std::string(experts.name).find(name) == std::string::npos) continue;
    for (const Scheme& scheme : schemes) {
      run_mode(mode, Model(experts, scheme, *std::max_element(tokens.begin(), tokens.end())),
               tokens);
    }
  }
  return 0;
}
