// Checks the GEMM kernels against an fp32 reference over odd shapes, and times all products of one
// Llama-3-8B decode step (15.01 GB of bf16 weights) as one CUDA graph, beside cuBLASLt.
//
//   nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -Icsrc/cuda -Icsrc/include \
//        csrc/cuda/bench/bench_gemm.cu csrc/cuda/bench/gemm_lt_baseline.cu csrc/cuda/gemm*.cu \
//        -lcublasLt -o bench_gemm
//   ./bench_gemm check | chain | tune [M ...] | large
#include <cstring>

#include "bench.cuh"
#include "gemm_lt_baseline.h"

using namespace regatta;
using namespace regatta::bench;
using namespace regatta::cuda;

namespace {

// ---------------------------------------------------------------------------------- references

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

template <class T>
__device__ float dot(const T* x, const T* w, int64_t k) {
  float sum = 0.f;
  for (int64_t i = 0; i < k; ++i)
    sum = fmaf(Traits<T>::to_float(x[i]), Traits<T>::to_float(w[i]), sum);
  return sum;
}

// One thread per output, straight from the definition in gemm.h.
template <class T>
__global__ void reference_kernel(GemmParams p, float* out) {
  const int64_t width = p.gated ? p.out_features / 2 : p.out_features;
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i >= p.num_rows * width) return;
  const int64_t m = i / width, n = i % width, k = p.in_features;
  const T* x = static_cast<const T*>(p.x) + m * k;
  const T* w = static_cast<const T*>(p.weight);
  const T* bias = static_cast<const T*>(p.bias);
  float scale = 1.f;
  if (p.sumsq != nullptr) {
    float sum = 0.f;
    for (int64_t j = 0; j < p.num_sumsq; ++j) sum += p.sumsq[m * p.num_sumsq + j];
    scale = rsqrtf(sum / static_cast<float>(k) + p.epsilon);
  }
  float y = dot(x, w + n * k, k) * scale;
  if (bias != nullptr) y += Traits<T>::to_float(bias[n]);
  if (p.gated) {
    float up = dot(x, w + (width + n) * k, k) * scale;
    if (bias != nullptr) up += Traits<T>::to_float(bias[width + n]);
    y = y / (1.f + expf(-y)) * up;
  }
  if (p.residual != nullptr) y += Traits<T>::to_float(static_cast<const T*>(p.residual)[i]);
  out[i] = y;
}

constexpr int64_t kInColumns = 48;  // any number will do for the input's partial sums

template <class T>
__global__ void sumsq_kernel(const T* x, float* out, int64_t rows, int64_t width, int64_t parts) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i >= rows * parts) return;
  float sum = 0.f;
  for (int64_t j = i % parts * kInColumns; j < width && j < (i % parts + 1) * kInColumns; ++j) {
    const float v = Traits<T>::to_float(x[i / parts * width + j]);
    sum += v * v;
  }
  out[i] = sum;
}

template <class T>
void fill(const Buffer<T>& buffer, uint32_t seed, float scale, int64_t n) {
  if (n > 0) fill_kernel<T><<<1024, 256>>>(buffer.data, n, seed, scale);
  CHECK_CUDA(cudaGetLastError());
}

template <class T, class Out>
bool check_case(const Case& c, const Runner& runner, const char* label, double absolute = 1e-3) {
  const int64_t width = c.gated ? c.n / 2 : c.n;
  const int64_t columns = gemm_sumsq_columns(c.m);
  const int64_t parts = ceil_div(width, columns);
  const int64_t in_parts = ceil_div(c.k, kInColumns);
  Buffer<T> x(c.m * c.k + kGuard), w(c.n * c.k + kGuard), bias(c.n), residual(c.m * width);
  Buffer<Out> out(c.m * width + kGuard), again(c.m * width + kGuard);
  Buffer<float> sumsq(c.m * in_parts), sumsq_out(c.m * parts + kGuard), expected(c.m * width);
  const uint32_t seed = static_cast<uint32_t>(c.m * 31 + c.n * 7 + c.k);
  fill(x, seed, 1.7f, c.m * c.k);
  fill(w, seed + 1, 1.7f / std::sqrt(static_cast<float>(c.k)), c.n * c.k);
  fill(bias, seed + 2, 1.f, c.n);
  fill(residual, seed + 3, 1.f, c.m * width);
  GemmParams p;
  p.x = x.data;
  p.weight = w.data;
  p.bias = c.bias ? bias.data : nullptr;
  p.residual = c.residual ? residual.data : nullptr;
  p.num_rows = c.m;
  p.in_features = c.k;
  p.out_features = c.n;
  p.gated = c.gated;
  p.dtype = Traits<T>::dtype;
  p.out_dtype = Traits<Out>::dtype;
  p.epsilon = 1e-5f;
  if (c.norm) {
    sumsq_kernel<T><<<ceil_div(c.m * in_parts, 128), 128>>>(x.data, sumsq.data, c.m, c.k, in_parts);
    p.sumsq = sumsq.data;
    p.num_sumsq = in_parts;
  }
  p.sumsq_out = c.sumsq_out ? sumsq_out.data : nullptr;
  reference_kernel<T><<<ceil_div(c.m * width, 128), 128>>>(p, expected.data);
  CHECK_CUDA(cudaDeviceSynchronize());
  p.out = again.data;
  CHECK_STATUS(runner(p));
  p.out = out.data;
  CHECK_STATUS(runner(p));
  CHECK_CUDA(cudaDeviceSynchronize());

  const auto y = out.host();
  const auto y2 = again.host();
  const auto ref = expected.host();
  const double relative = sizeof(Out) == 4                      ? 1e-4
                          : Traits<T>::dtype == DType::kFloat16 ? 1e-3
                                                                : 8e-3;
  double worst = 0.;
  int64_t bad = 0;
  auto value = [](Out v) {
    if constexpr (sizeof(Out) == 4) {
      return static_cast<double>(v);
    } else {
      return static_cast<double>(static_cast<float>(v));
    }
  };
  for (int64_t i = 0; i < c.m * width; ++i) {
    const double error =
        std::fabs(value(y[i]) - ref[i]) / (relative * std::fabs(ref[i]) + absolute);
    if (!(error <= 1.)) ++bad;
    if (!(error <= worst)) worst = error;
  }
  if (std::memcmp(y.data(), y2.data(), y.size() * sizeof(Out)) != 0) {
    printf("FAIL %s: two runs differ\n", label);
    ++bad;
  }
  const auto untouched = [](const void* p, size_t n) {
    for (size_t i = 0; i < n; ++i) {
      if (static_cast<const unsigned char*>(p)[i] != 0xff) return false;
    }
    return true;
  };
  if (!untouched(y.data() + c.m * width, kGuard * sizeof(Out))) {
    printf("FAIL %s: wrote past the end\n", label);
    ++bad;
  }
  if (c.sumsq_out) {
    const auto s = sumsq_out.host();
    for (int64_t m = 0; m < c.m; ++m) {
      for (int64_t j = 0; j < parts; ++j) {
        double sum = 0.;
        for (int64_t n = j * columns; n < std::min(width, (j + 1) * columns); ++n) {
          sum += value(y[m * width + n]) * value(y[m * width + n]);
        }
        if (!(std::fabs(s[m * parts + j] - sum) <= 1e-4 * sum + 1e-6)) ++bad;
      }
    }
    if (!untouched(s.data() + c.m * parts, kGuard * 4)) ++bad;
  }
  if (bad != 0) {
    printf(
        "FAIL %s m %ld n %ld k %ld gated %d bias %d residual %d norm %d sumsq %d fp32 %d: "
        "%ld bad, worst %.2f of the tolerance\n",
        label, c.m, c.n, c.k, c.gated, c.bias, c.residual, c.norm, c.sumsq_out, c.float_out, bad,
        worst);
  }
  return bad == 0;
}

template <class T>
int check_dtype(const char* name, const GemmResources& resources) {
  constexpr int64_t kRows[] = {1, 2, 3, 7, 8, 9, 16, 17, 31, 33, 64, 65, 100, 127, 128, 257, 600};
  constexpr int64_t kShapes[][2] = {{64, 64},    {200, 136}, {72, 8},      {1008, 520},
                                    {257, 1032}, {8, 4104},  {6144, 1024}, {4096, 4096}};
  std::mt19937 random(7);
  int failures = 0, cases = 0;
  for (const int64_t m : kRows) {
    for (const auto& shape : kShapes) {
      for (int variant = 0; variant < 3; ++variant) {
        Case c = {m, shape[0], shape[1], false, false, false, false, false, false};
        c.gated = variant == 1 && c.n % 16 == 0;
        c.bias = random() % 2;
        c.residual = !c.gated && random() % 2;
        c.norm = random() % 2;
        c.sumsq_out = !c.gated && random() % 2;
        c.float_out = variant == 2;
        GemmTile tile;
        // sm90 automatic, sm90 with any tile, stream, generic, blas, gemm's choice, tiles
        const int kernel = random() % 7;
        tile.tokens = 8 << random() % 5;
        tile.features = 64 << random() % 3;
        tile.stages = 2 + static_cast<int>(random() % 2);
        tile.split = 1 << random() % 4;
        tile.trigger = static_cast<int>(random() % 6) - 1;
        const int columns = 128 + 64 * static_cast<int>(random() % 3);
        const int stream_variant = static_cast<int>(random() % 5);
        if (kernel == 2 && m > 8) c.sumsq_out = false;
        char label[160];
        snprintf(label, sizeof(label), "%s kernel %d tile %dx%d stages %d split %d variant %d",
                 name, kernel, tile.tokens, tile.features, tile.stages, tile.split, stream_variant);
        const Runner runner = [&](const GemmParams& p) {
          return kernel == 0   ? gemm_sm90(p, nullptr)
                 : kernel == 1 ? gemm_sm90(p, tile, nullptr)
                 : kernel == 2 ? gemm_stream_sm80(p, stream_variant % 2 == 0, nullptr)
                 : kernel == 3 ? gemm_generic(p, nullptr)
                 : kernel == 4 && gemm_blas_refuses(p) == nullptr ? gemm_blas(p, resources, nullptr)
                 : kernel == 6 && gemm_tiles_sm90_refuses(p) == nullptr
                     ? gemm_tiles_sm90(p, columns, nullptr)
                     : gemm(p, resources, nullptr, nullptr);
        };
        // cuBLASLt's path rounds the scaled x, and gate and up, once more.
        const double absolute = kernel < 4 || kernel == 6             ? 1e-3
                                : Traits<T>::dtype == DType::kFloat16 ? 4e-3
                                                                      : 3e-2;
        failures += !(c.float_out ? check_case<T, float>(c, runner, label, absolute)
                                  : check_case<T, T>(c, runner, label, absolute));
        ++cases;
      }
    }
  }
  printf("%s: %d cases, %d failures\n", name, cases, failures);
  return failures;
}

int check_float() {
  int failures = 0;
  for (const Case& c : {Case{1, 65, 7, false, true, true, true, true, true},
                        Case{33, 257, 129, false, true, true, true, true, true},
                        Case{9, 130, 515, true, true, false, true, false, true}}) {
    const Runner runner = [](const GemmParams& p) { return gemm(p, {}, nullptr, nullptr); };
    failures += !check_case<float, float>(c, runner, "float32");
  }
  printf("float32: %d failures\n", failures);
  return failures;
}

// --------------------------------------------------------------------------------------- timing

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

  // The bare products, without norm, residual and activation.
  double lt_chain_ms(int64_t rows, int replays) const {
    bool ok = true;
    for (int kind = 0; kind < kKinds; ++kind) {
      ok = ok && lt_gemm(params(kind, kind, rows).x, weights[kind == kHead ? kLayers * 4 : kind],
                         kind == kHead ? static_cast<void*>(logits) : inner, rows, kN[kind],
                         kK[kind], nullptr);
    }
    CHECK_CUDA(cudaDeviceSynchronize());
    if (!ok) return 0.;
    return graph_ms(
        [&](cudaStream_t stream) {
          for (int i = 0; i < kLayers * 4 + 1; ++i) {
            const int kind = i == kLayers * 4 ? kHead : i % 4;
            const GemmParams p = params(kind, i, rows);
            lt_gemm(kind == kDown ? inner : hidden, p.weight,
                    kind == kHead     ? static_cast<void*>(logits)
                    : kind == kGateUp ? inner
                                      : qkv,
                    rows, kN[kind], kK[kind], stream);
          }
        },
        replays);
  }
};

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

cudaStream_t g_stream = nullptr;
int64_t g_rows = 1;

int main_chain(double peak) {
  const Model model(128);
  GemmResources resources;
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
              CHECK_STATUS(gemm(p, resources, nullptr, stream));
            }
          },
          15);
    }
    const double lt = model.lt_chain_ms(rows, 15);
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
  GemmResources resources;
  resources.scratch_bytes = int64_t{256} << 20;
  CHECK_CUDA(cudaMalloc(&resources.scratch, resources.scratch_bytes));
  const bool blas = create_blas(&resources.blas).ok();
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
  for (const int64_t rows : all_rows) {
    GemmTile tiles[kKinds];
    for (int kind = 0; kind < kKinds; ++kind)
      tiles[kind] = choose_gemm_tile(model.params(kind, 0, rows));
    double best = model.chain_ms(rows, tiles, true, 7);
    printf("M %ld: start %.3f ms, no PDL %.3f, cuBLASLt %.3f\n", rows, best,
           model.chain_ms(rows, tiles, false, 7), model.lt_chain_ms(rows, 7));
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
  GemmResources resources;
  resources.scratch_bytes = int64_t{1} << 30;
  CHECK_CUDA(cudaMalloc(&resources.scratch, resources.scratch_bytes));
  const bool blas = create_blas(&resources.blas).ok();
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
  const char* mode = argc > 1 ? argv[1] : "check";
  setvbuf(stdout, nullptr, _IOLBF, 4096);
  cudaDeviceProp properties;
  CHECK_CUDA(cudaGetDeviceProperties(&properties, 0));
  printf("%s, %d SMs\n", properties.name, properties.multiProcessorCount);
  if (std::strcmp(mode, "check") == 0) {
    GemmResources resources;
    resources.scratch_bytes = int64_t{256} << 20;
    CHECK_CUDA(cudaMalloc(&resources.scratch, resources.scratch_bytes));
    CHECK_STATUS(create_blas(&resources.blas));
    const int failures = check_dtype<__nv_bfloat16>("bfloat16", resources) +
                         check_dtype<__half>("float16", resources) + check_float();
    return failures != 0;
  }
  if (std::strcmp(mode, "tune") == 0) {
    std::vector<int64_t> rows;
    for (int i = 2; i < argc; ++i) rows.push_back(std::atoll(argv[i]));
    return main_tune(rows.empty() ? std::vector<int64_t>{1, 8, 32, 128} : rows);
  }
  if (std::strcmp(mode, "kinds") == 0) return main_kinds();
  if (std::strcmp(mode, "large") == 0) return main_large();
  const double peak = read_bandwidth();
  printf("pure read %.2f TB/s\n", peak);
  return main_chain(peak);
}
