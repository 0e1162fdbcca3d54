// Times all products of one Llama-3-8B decode step (15.01 GB of bf16 weights) as one CUDA graph,
// beside cuBLASLt, and those of prompts.
//
//   dense chain | kinds | large | tune [M ...]
#include "cuda/gemm/large/gemm_blas.cuh"
#include "timing.cuh"

using namespace regatta;
using namespace regatta::bench;
using namespace regatta::cuda;

namespace {

__device__ float uniform(uint64_t i, uint32_t seed) {  // -1 .. 1
  uint32_t h = static_cast<uint32_t>(i) * 2654435761u ^ static_cast<uint32_t>(i >> 32) ^ seed;
  h ^= h >> 15;
  h *= 2246822519u;
  h ^= h >> 13;
  h *= 3266489917u;
  h ^= h >> 16;
  return static_cast<float>(h >> 8) * (2.f / 16777216.f) - 1.f;
}

template <class T>
__global__ void fill_kernel(T* p, int64_t n, uint32_t seed, float scale) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < n;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    p[i] = Traits<T>::from_float(uniform(i, seed) * scale);
  }
}

__global__ void read_kernel(const uint4* p, int64_t n, uint32_t* out) {
  uint32_t all = 0;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < n;
       i += stride * 4) {
    uint4 v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = i + j * stride < n ? __ldcs(p + i + j * stride) : uint4{};
#pragma unroll
    for (int j = 0; j < 4; ++j) all ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (all == 0x12345) *out = all;
}

struct Model {
  std::vector<__nv_bfloat16*> weights;  // [kLayers * 4 + 1]
  __nv_bfloat16 *hidden, *qkv, *inner;
  float *sumsq, *logits;
  double bytes = 0.;

  explicit Model(int64_t max_rows) {
    for (int i = 0; i < kLayers * 4 + 1; ++i) {
      const int kind = i == kLayers * 4 ? kHead : i % 4;
      const int64_t n = kN[kind] * kK[kind];
      __nv_bfloat16* w;
      CHECK_CUDA(cudaMalloc(&w, n * 2));
      fill_kernel<<<2048, 256>>>(w, n, i, 1.7f / std::sqrt(static_cast<float>(kK[kind])));
      weights.push_back(w);
      bytes += static_cast<double>(n) * 2;
    }
    CHECK_CUDA(cudaMalloc(&hidden, max_rows * kHidden * 2));
    CHECK_CUDA(cudaMalloc(&qkv, max_rows * kQkv * 2));
    CHECK_CUDA(cudaMalloc(&inner, max_rows * 2 * kInner * 2));
    CHECK_CUDA(cudaMalloc(&sumsq, max_rows * (kHidden / 16) * 4));
    CHECK_CUDA(cudaMalloc(&logits, max_rows * kVocab * 4));
    fill_kernel<<<1024, 256>>>(hidden, max_rows * kHidden, 99, 1.7f);
    fill_kernel<<<1024, 256>>>(sumsq, max_rows * (kHidden / 16), 98, 1.f);
    CHECK_CUDA(cudaDeviceSynchronize());
  }

  GemmParams params(int kind, int index, int64_t rows) const {
    GemmParams p;
    p.weight = weights[index];
    p.num_rows = rows;
    p.in_features = kK[kind];
    p.out_features = kN[kind];
    p.epsilon = 1e-5f;
    p.x = kind == kOutProjection ? qkv : kind == kDown ? inner : hidden;
    p.out = kind == kQkvProjection ? qkv : kind == kGateUp ? inner : hidden;
    if (kind == kHead) p.out = logits, p.out_dtype = DType::kFloat32;
    if (kind == kOutProjection || kind == kDown) {
      p.residual = hidden;
      p.sumsq_out = sumsq;
    } else {
      p.sumsq = sumsq;
      p.num_sumsq = kHidden / gemm_sumsq_columns(rows);
    }
    p.gated = kind == kGateUp;
    return p;
  }

  double chain_ms(int64_t rows, const GemmTile* tiles, bool dependent, int replays) const {
    return graph_ms(
        [&](cudaStream_t stream) {
          for (int i = 0; i < kLayers * 4 + 1; ++i) {
            const int kind = i == kLayers * 4 ? kHead : i % 4;
            GemmParams p = params(kind, i, rows);
            p.dependent_launch = dependent;
            CHECK_STATUS(gemm_sm90(p, tiles[kind], stream));
          }
        },
        replays);
  }

  // cuBLASLt's bare products, without norm, residual and activation; 0 without cuBLASLt.
  double lt_chain_ms(int64_t rows, const GemmResources& resources, int replays) const {
#ifdef REGATTA_CUBLASLT
    const auto product = [&](int index, cudaStream_t stream) {
      const int kind = index == kLayers * 4 ? kHead : index % 4;
      GemmParams p;
      p.x = kind == kDown ? inner : hidden;
      p.weight = weights[index];
      p.num_rows = rows;
      p.in_features = kK[kind];
      p.out_features = kN[kind];
      void* out = kind == kHead ? static_cast<void*>(logits) : kind == kGateUp ? inner : qkv;
      return blas_product(static_cast<Blas*>(resources.blas), blas_key(p, rows), p, p.x, out,
                          p.dtype, out, /*keep=*/true, resources.scratch, stream);
    };
    if (resources.blas == nullptr) return 0.;
    for (const int index : {0, 1, 2, 3, kLayers * 4}) {  // algorithms are chosen here
      if (!product(index, nullptr).ok()) return 0.;
    }
    CHECK_CUDA(cudaDeviceSynchronize());
    return graph_ms(
        [&](cudaStream_t stream) {
          for (int i = 0; i < kLayers * 4 + 1; ++i) CHECK_STATUS(product(i, stream));
        },
        replays);
#else
    return 0.;
#endif
  }
};

// With cuBLASLt where it is found.
GemmResources make_resources(int64_t scratch_bytes) {
  GemmResources resources;
  resources.scratch_bytes = scratch_bytes;
  CHECK_CUDA(cudaMalloc(&resources.scratch, resources.scratch_bytes));
  const Status status = create_blas(&resources.blas);
  if (!status.ok()) printf("without cuBLASLt: %s\n", status.message().c_str());
  return resources;
}

double read_bandwidth() {
  constexpr int64_t kBytes = int64_t{8} << 30;
  char* p;
  uint32_t* out;
  CHECK_CUDA(cudaMalloc(&p, kBytes));
  CHECK_CUDA(cudaMemset(p, 1, kBytes));
  CHECK_CUDA(cudaMalloc(&out, 4));
  double best = 0.;
  for (const int grid : {132 * 4, 132 * 8, 132 * 16}) {
    const double ms = graph_ms(
        [&](cudaStream_t stream) {
          read_kernel<<<grid, 512, 0, stream>>>(reinterpret_cast<uint4*>(p), kBytes / 16, out);
        },
        5);
    best = std::max(best, kBytes / ms / 1e9);
  }
  cudaFree(p);
  cudaFree(out);
  return best;
}

using Runner = std::function<Status(const GemmParams&)>;

cudaStream_t g_stream = nullptr;
int64_t g_rows = 1;

int main_chain(double peak) {
  const Model model(128);
  const GemmResources resources = make_resources(int64_t{256} << 20);
  printf("%.2f GB of weights\n  M | ours ms  TB/s  share | no PDL ms | cuBLASLt, bare, ms  TB/s\n",
         model.bytes / 1e9);
  for (const int64_t rows : {1, 2, 4, 8, 16, 32, 64, 96, 128}) {
    double ms[2];
    for (const bool dependent : {true, false}) {
      ms[dependent] = graph_ms(
          [&](cudaStream_t stream) {
            for (int i = 0; i < kLayers * 4 + 1; ++i) {
              GemmParams p = model.params(i == kLayers * 4 ? kHead : i % 4, i, rows);
              p.dependent_launch = dependent;
              CHECK_STATUS(gemm(p, {}, nullptr, stream));
            }
          },
          15);
    }
    const double lt = model.lt_chain_ms(rows, resources, 15);
    const double rate = model.bytes / ms[1] / 1e9;
    printf("%3ld | %.3f  %.2f  %.0f %% | %.3f | %.3f  %.2f\n", rows, ms[1], rate, 100 * rate / peak,
           ms[0], lt, lt > 0. ? model.bytes / lt / 1e9 : 0.);
  }
  return 0;
}

// One kind of product alone, over all layers, in microseconds each.
double kind_us(const Model& model, int kind, const Runner& runner) {
  const int count = kind == kHead ? 4 : kLayers;
  return 1e3 / count *
         graph_ms(
             [&](cudaStream_t stream) {
               g_stream = stream;
               for (int i = 0; i < count; ++i) {
                 GemmParams p =
                     model.params(kind, kind == kHead ? kLayers * 4 : i * 4 + kind, g_rows);
                 CHECK_STATUS(runner(p));
               }
             },
             7);
}

int main_kinds() {
  const Model model(128);
  const GemmResources resources = make_resources(int64_t{256} << 20);
  const bool blas = resources.blas != nullptr;
  printf("us per product: qkv out gate_up down head | chain ms\n");
  for (const int64_t rows : {1, 8, 16, 32, 64, 128}) {
    g_rows = rows;
    for (const char* name : {"gemv", "sm90", "blas"}) {
      if ((name[0] == 'g') != (rows == 1)) continue;
      if (name[0] == 'b' && !blas) continue;
      const Runner runner = [&](const GemmParams& p) {
        return name[0] == 'g'   ? gemm_stream_sm80(p, false, g_stream)
               : name[0] == 's' ? gemm_sm90(p, g_stream)
                                : gemm_blas(p, resources, g_stream);
      };
      double us[kKinds], sum = 0;
      for (int kind = 0; kind < kKinds; ++kind) {
        g_stream = nullptr;
        CHECK_STATUS(runner(model.params(kind, kind == kHead ? kLayers * 4 : kind, rows)));
        us[kind] = kind_us(model, kind, runner);
        sum += us[kind] * (kind == kHead ? 1 : 32);
      }
      printf("%3ld %-7s %6.2f %6.2f %6.2f %6.2f %6.2f | sum %.3f\n", rows, name, us[0], us[1],
             us[2], us[3], us[4], sum / 1e3);
    }
  }
  return 0;
}

int main_tune(const std::vector<int64_t>& all_rows) {
  const Model model(128);
  const GemmResources resources = make_resources(int64_t{256} << 20);
  for (const int64_t rows : all_rows) {
    GemmTile tiles[kKinds];
    for (int kind = 0; kind < kKinds; ++kind)
      tiles[kind] = choose_gemm_tile(model.params(kind, 0, rows));
    double best = model.chain_ms(rows, tiles, true, 7);
    printf("M %ld: start %.3f ms, no PDL %.3f, cuBLASLt %.3f\n", rows, best,
           model.chain_ms(rows, tiles, false, 7), model.lt_chain_ms(rows, resources, 7));
    for (int pass = 0; pass < 2; ++pass) {
      for (const int kind : {kGateUp, kDown, kQkvProjection, kOutProjection, kHead}) {
        GemmTile winner = tiles[kind];
        const int base = winner.tokens;
        for (const int features : {64, 128, 256}) {
          for (const int budget : {52, 70, 107, 216}) {
            for (const int split : {1, 2, 4, 8}) {
              for (const int trigger : {-1, 4}) {
                const int stage = (features + base) * 128;
                const GemmTile t = {base, features, std::min(16, budget * 1024 / stage), split,
                                    trigger};
                if (t.stages < 3 || base * (features + 4) * 4 > 200 * 1024) continue;
                if (kN[kind] / features * split > 2200) continue;
                tiles[kind] = t;
                const double ms = model.chain_ms(rows, tiles, true, 3);
                if (ms < best * 0.999) best = ms, winner = t;
              }
            }
          }
        }
        tiles[kind] = winner;
        printf("M %ld pass %d %s -> %.3f ms %.2f TB/s {%d, %d, %d, %d, %d}\n", rows, pass,
               kKindNames[kind], best, model.bytes / best / 1e9, winner.tokens, winner.features,
               winner.stages, winner.split, winner.trigger);
      }
    }
    printf("M %ld final %.3f ms\n", rows, model.chain_ms(rows, tiles, true, 20));
  }
  return 0;
}

int main_large() {
  const Model model(8192);
  const GemmResources resources = make_resources(int64_t{1} << 30);
  const bool blas = resources.blas != nullptr;
  printf("us (TFLOP/s), with epilogues, four layers in turn\n");
  for (const int64_t rows : {256, 512, 1024, 2048, 8000}) {
    double best_sum = 0, blas_sum = 0, chosen_sum = 0;
    for (int kind = 0; kind < 4; ++kind) {
      printf("%5ld %-8s", rows, kKindNames[kind]);
      const double flops = 2. * rows * kN[kind] * kK[kind];
      double best = 1e30;
      for (const int columns : {-1, 128, 192, 256, 0}) {
        if (columns < 0 && !blas) continue;
        const auto runner = [&](const GemmParams& p, cudaStream_t stream) {
          return columns < 0    ? gemm_blas(p, resources, stream)
                 : columns == 0 ? gemm_tiles_sm90(p, stream)
                                : gemm_tiles_sm90(p, columns, stream);
        };
        GemmParams first = model.params(kind, kind, rows);
        if (first.residual != nullptr) first.out = model.inner;  // so that cuBLASLt may time
        CHECK_STATUS(runner(first, nullptr));
        CHECK_CUDA(cudaDeviceSynchronize());
        const double us =
            250. * graph_ms(
                       [&](cudaStream_t stream) {
                         for (int r = 0; r < 4; ++r) {
                           CHECK_STATUS(runner(model.params(kind, r * 4 + kind, rows), stream));
                         }
                       },
                       7);
        if (columns < 0) blas_sum += us;
        if (columns == 0) chosen_sum += us;
        if (columns > 0) best = std::min(best, us);
        printf(" | %s %d %.1f (%.0f)", columns < 0 ? "blas" : "tiles", columns, us,
               flops / us / 1e6);
      }
      best_sum += best;
      printf("\n");
    }
    printf("%5ld all layers, ms: blas %.2f, tiles %.2f, tiles chosen %.2f\n", rows, blas_sum * .032,
           best_sum * .032, chosen_sum * .032);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "chain";
  setvbuf(stdout, nullptr, _IOLBF, 4096);
  cudaDeviceProp properties;
  CHECK_CUDA(cudaGetDeviceProperties(&properties, 0));
  printf("%s, %d SMs\n", properties.name, properties.multiProcessorCount);
  if (mode == "tune") {
    std::vector<int64_t> rows;
    for (int i = 2; i < argc; ++i) rows.push_back(std::atoll(argv[i]));
    return main_tune(rows.empty() ? std::vector<int64_t>{1, 8, 32, 128} : rows);
  }
  if (mode == "kinds") return main_kinds();
  if (mode == "large") return main_large();
  const double peak = read_bandwidth();
  printf("pure read %.2f TB/s\n", peak);
  return main_chain(peak);
}
