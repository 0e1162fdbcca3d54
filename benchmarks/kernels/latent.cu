// Times latent_attention() of 512 + 64 values (DeepSeek) in CUDA graphs, by each kernel; and what a
// decode step's layers launch from the product that makes queries and latents to the one behind
// attention, with the products of few tokens and with those of any number.
//
//   latent [chain | once HEADS REQUESTS CONTEXT]
#include <array>

#include "native/latent_setup.cuh"
#include "timing.cuh"

using namespace regatta;
using namespace regatta::native;

namespace {

using T = __nv_bfloat16;
constexpr double kBandwidth = 4.66e6, kProducts = 800e6;  // an H200's, bytes and operations per us

LatentCase decode(int heads, int requests, int context) {
  return {"decode", std::vector<Span>(requests, Span{1, context}), heads};
}

// Pairs of a row and a token that it sees.
double num_pairs(const LatentCase& c) {
  double pairs = 0;
  for (const Span& s : c.spans) {
    pairs += double(c.heads) * s.num_tokens * (s.context_len - (s.num_tokens - 1) / 2.0);
  }
  return pairs;
}

double cache_bytes(const LatentCase& c) {
  double tokens = 0;
  for (const Span& s : c.spans) tokens += s.context_len;
  return tokens * kLatentSize * sizeof(T);
}

// Both kernels over caches that L2 does not hold, where there is more than one layer.
void compare(const LatentCase& c) {
  const double bytes = cache_bytes(c), operations = 2 * num_pairs(c) * (kLatentSize + kLatentRank);
  const int layers = std::clamp(static_cast<int>(400e6 / bytes), 1, 32);
  const int launches = std::max(layers, 4);
  const LatentSetup<T> s(c, layers);
  std::vector<bench::Body> bodies;
  const char* const kernels[] = {"", "sm80"};
  for (const char* kernel : kernels) {
    bodies.push_back([&s, kernel, layers, launches](cudaStream_t stream) {
      force_latent_kernel(kernel);
      for (int i = 0; i < launches; ++i) s.run(i % layers, stream, true);
    });
  }
  const std::vector<double> ms = bench::graphs_ms(bodies, 4, 6);
  const double limit = std::max(bytes / kBandwidth, operations / kProducts);
  for (size_t k = 0; k < bodies.size(); ++k) {
    const double us = 1e3 * ms[k] / launches;
    std::printf(
        "%-6s %3d heads %4zu x %6d tokens of %6d  %-6s %9.1f us %5.2f TB/s %6.1f TFLOP/s  %3.0f %% "
        "of %.1f us\n",
        c.name.c_str(), c.heads, c.spans.size(), c.spans[0].num_tokens, c.spans[0].context_len,
        *kernels[k] != '\0' ? kernels[k] : "chosen", us, bytes / us / 1e6, operations / us / 1e6,
        100 * limit / us, limit);
  }
  std::fflush(stdout);
}

// Launches of a block between its outer products, of one token of each request.
class Chain {
 public:
  Chain(int heads, int requests, int context, int layers, int cache_layers)
      : layers_(layers),
        cache_layers_(cache_layers),
        attention_(with_limits(decode(heads, requests, context)), cache_layers),
        step_({heads}, last_slots(attention_), attention_.num_blocks * attention_.c.block_size,
              layers),
        resources_(bench::blas_resources(GemmOperands::kDense, step_.pairs, kLatentRank)) {}
  ~Chain() {
    cudaFree(resources_.scratch);
    if (resources_.blas != nullptr) cuda::destroy_blas(resources_.blas);
  }

  // As blocks.cu does with few tokens.
  void by_few(cudaStream_t stream) const {
    for (int layer = 0; layer < layers_; ++layer) {
      write_and_multiply(layer, stream);
      attend(layer, stream);
      CHECK_STATUS(cuda::head_product(step_.outputs(step_.mixed.data, layer), {stream, true}));
    }
  }
  // And with any number.
  void by_any(cudaStream_t stream) const {
    for (int layer = 0; layer < layers_; ++layer) {
      write(layer, stream);
      multiply_queries(layer, stream);
      attend(layer, stream);
      multiply_values(layer, stream);
      if (step_.num_tokens > 1) to_rows(stream);
    }
  }
  // Each launch alone, of the layers in turn.
  std::vector<std::pair<const char*, bench::Body>> parts() const {
    const auto repeat = [this](void (Chain::*part)(int, cudaStream_t) const) {
      return [this, part](cudaStream_t stream) {
        for (int layer = 0; layer < layers_; ++layer) (this->*part)(layer, stream);
      };
    };
    return {{"write", repeat(&Chain::write)},
            {"queries by gemm", repeat(&Chain::multiply_queries)},
            {"write and queries", repeat(&Chain::write_and_multiply)},
            {"attention", repeat(&Chain::attend)},
            {"values by gemm", repeat(&Chain::multiply_values)},
            {"rows", repeat(&Chain::rows_of)},
            {"values", repeat(&Chain::multiply_to_rows)}};
  }

 private:
  static constexpr int kGraphContext = 16384;  // graphs are of the engine's longest context

  static LatentCase with_limits(LatentCase c) {
    c.most_context = kGraphContext;
    return c;
  }
  // Of each request's last token.
  static std::vector<int32_t> last_slots(const LatentSetup<T>& s) {
    std::vector<int32_t> slots;
    for (size_t b = 0; b < s.ctx.size(); ++b) {
      const int last = s.ctx[b] - 1, size = s.c.block_size;
      slots.push_back(s.table[b * s.max_blocks + last / size] * size + last % size);
    }
    return slots;
  }

  cuda::LatentWriteParams write_params(int layer) const {
    return step_.write(attention_.cache.data + layer % cache_layers_ * attention_.cache_values);
  }
  void write(int layer, cudaStream_t stream) const {
    CHECK_STATUS(cuda::latent_write(write_params(layer), {stream, true}));
  }
  void write_and_multiply(int layer, cudaStream_t stream) const {
    CHECK_STATUS(
        cuda::latent_write_and_queries(write_params(layer), step_.queries(layer), {stream, true}));
  }
  void attend(int layer, cudaStream_t stream) const {
    cuda::LatentAttentionParams p = attention_.params(layer % cache_layers_);
    p.q_latent = step_.q_latent.data;
    p.q_rope = step_.q_rope.data;
    p.out = step_.mixed.data;
    CHECK_STATUS(
        cuda::latent_attention(p, attention_.limits, attention_.workspace->data, {stream, true}));
  }
  void multiply_to_rows(int layer, cudaStream_t stream) const {
    CHECK_STATUS(cuda::head_product(step_.outputs(step_.mixed.data, layer), {stream, true}));
  }
  void multiply(const T* x, const T* weight, T* out, int64_t in, int64_t outs, bool ready,
                cudaStream_t stream) const {
    GemmParams p;
    p.x = x;
    p.weight = weight;
    p.out = out;
    p.num_rows = step_.pairs;
    p.in_features = in;
    p.out_features = outs;
    p.num_groups = step_.h.heads;
    p.group_ends = step_.ends.data;
    p.group_ends_ready = ready;
    CHECK_STATUS(cuda::gemm(p, resources_, nullptr, stream));
  }
  void multiply_queries(int layer, cudaStream_t stream) const {
    multiply(step_.q_nope.data, step_.key_absorb.data + layer * step_.matrix * step_.h.nope,
             step_.q_latent.data, step_.h.nope, kLatentRank, false, stream);
  }
  void multiply_values(int layer, cudaStream_t stream) const {
    multiply(step_.mixed.data, step_.value_up.data + layer * step_.matrix * step_.h.value,
             step_.values.data, kLatentRank, step_.h.value, true, stream);
  }
  void rows_of(int, cudaStream_t stream) const { to_rows(stream); }
  void to_rows(cudaStream_t stream) const {
    cuda::HeadsToRowsParams p;
    p.x = step_.values.data;
    p.out = step_.rows.data;
    p.num_tokens = step_.num_tokens;
    p.num_heads = step_.h.heads;
    p.width = step_.h.value;
    CHECK_STATUS(cuda::heads_to_rows(p, {stream, true}));
  }

  int layers_, cache_layers_;
  LatentSetup<T> attention_;
  LatentStep<T> step_;
  cuda::GemmResources resources_;
};

// A layer's launches both ways, and each launch alone. Layers' matrices are more than L2 holds.
void compare_chain(int heads, int requests, int context) {
  const int layers = heads > 64 ? 8 : 27;
  const double bytes = cache_bytes(decode(heads, requests, context));
  const int cache_layers = std::clamp(static_cast<int>(4e9 / bytes), 1, layers);
  const Chain chain(heads, requests, context, layers, cache_layers);
  force_latent_kernel("");
  std::vector<std::pair<const char*, bench::Body>> named = chain.parts();
  named.insert(named.begin(), {{"any", [&](cudaStream_t stream) { chain.by_any(stream); }},
                               {"few", [&](cudaStream_t stream) { chain.by_few(stream); }}});
  // What reads what others write, once in the right order.
  bench::graph_ms(named[0].second, 1);
  std::vector<bench::Body> bodies;
  for (const auto& [name, body] : named) bodies.push_back(body);
  const std::vector<double> ms = bench::graphs_ms(bodies, 4, 6);
  const double weights = 2. * heads * kLatentRank * 128 * sizeof(T);
  std::printf("%3d heads %3d x %4d  us a layer: any %6.2f  few %6.2f  (bytes alone %.2f);", heads,
              requests, context, 1e3 * ms[0] / layers, 1e3 * ms[1] / layers,
              (weights + bytes) / kBandwidth);
  for (size_t k = 2; k < ms.size(); ++k) {
    std::printf("  %s %.2f", named[k].first, 1e3 * ms[k] / layers);
  }
  std::printf("\n");
  std::fflush(stdout);
}

void compare_chains() {
  for (int heads : {16, 128}) {
    for (int context : {160, 8000}) {
      for (int requests : {1, 8, 32, 64, 128}) compare_chain(heads, requests, context);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 5 && std::string(argv[1]) == "once") {  // for profilers
    const LatentSetup<T> s(decode(std::atoi(argv[2]), std::atoi(argv[3]), std::atoi(argv[4])));
    force_latent_kernel("");
    for (int i = 0; i < 3; ++i) s.run(0, nullptr, true);
    CHECK_CUDA(cudaDeviceSynchronize());
    return 0;
  }
  cudaDeviceProp device;
  CHECK_CUDA(cudaGetDeviceProperties(&device, 0));
  std::printf("%s, %d multiprocessors\n", device.name, device.multiProcessorCount);
  if (argc == 2 && std::string(argv[1]) == "chain") {
    compare_chains();
    return 0;
  }
  for (const auto& [heads, requests, context] : {std::array{16, 32, 8000},
                                                 {16, 1, 1000},
                                                 {16, 1, 8000},
                                                 {16, 128, 200},
                                                 {16, 8, 32000},
                                                 {128, 64, 8000},
                                                 {128, 1, 8000},
                                                 {128, 128, 1000}}) {
    compare(decode(heads, requests, context));
  }
  for (int tokens : {1024, 4096}) compare({"prompt", {{tokens, tokens}}, 16});
  compare({"drafts", std::vector<Span>(32, Span{4, 8000}), 16});
  LatentCase mixed = decode(16, 31, 8000);
  mixed.name = "mixed";
  mixed.spans.push_back({512, 512});
  compare(mixed);
  return 0;
}
