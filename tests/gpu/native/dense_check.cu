// Checks the kernels of dense products, tiles at random, against a float32 reference over odd
// shapes: two runs have the same bits, and nothing behind an output is written. For Hopper.
//
//   dense_check bfloat16|float16|float32
// cuBLASLt is found in the folder REGATTA_CUBLASLT, or where the dynamic linker looks.
#include <cstring>

#include "cuda/gemm/select.h"
#include "product.cuh"

using namespace regatta;
using namespace regatta::native;
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
                 : kernel == 4 && resources.blas != nullptr && gemm_blas_refuses(p) == nullptr
                     ? gemm_blas(p, resources, nullptr)
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
  int failures = 0, cases = 0;
  for (const Case& c : {Case{1, 65, 7, false, true, true, true, true, true},
                        Case{33, 257, 129, false, true, true, true, true, true},
                        Case{9, 130, 515, true, true, false, true, false, true}}) {
    const Runner runner = [](const GemmParams& p) { return gemm(p, {}, nullptr, nullptr); };
    failures += !check_case<float, float>(c, runner, "float32");
    ++cases;
  }
  printf("float32: %d cases, %d failures\n", cases, failures);
  return failures;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string dtype = argc > 1 ? argv[1] : "";
  if (dtype == "float32") return check_float() != 0;
  if (dtype != "bfloat16" && dtype != "float16") {
    printf("dense_check bfloat16|float16|float32, got '%s'\n", dtype.c_str());
    return 2;
  }
  GemmResources resources;
  resources.scratch_bytes = int64_t{256} << 20;
  CHECK_CUDA(cudaMalloc(&resources.scratch, resources.scratch_bytes));
  const Status status = create_blas(&resources.blas);
  if (!status.ok()) printf("without cuBLASLt: %s\n", status.message().c_str());
  return (dtype == "bfloat16" ? check_dtype<__nv_bfloat16>("bfloat16", resources)
                              : check_dtype<__half>("float16", resources)) != 0;
}
