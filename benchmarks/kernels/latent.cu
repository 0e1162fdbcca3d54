// Times latent_attention() of 512 + 64 values (DeepSeek) in CUDA graphs, by each kernel.
//
//   latent [once HEADS REQUESTS CONTEXT]
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
