// What the checks and benchmarks share: buffers, random numbers, a product's reference, times of
// CUDA graphs, the products of a Llama-3-8B step.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "common.cuh"
#include "regatta/gemm.h"

#define CHECK_CUDA(x)                                                               \
  do {                                                                              \
    const cudaError_t error_ = (x);                                                 \
    if (error_ != cudaSuccess) {                                                    \
      printf("%s:%d %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(error_)); \
      exit(1);                                                                      \
    }                                                                               \
  } while (0)
#define CHECK_STATUS(x)                                                    \
  do {                                                                     \
    const regatta::Status status_ = (x);                                   \
    if (!status_.ok()) {                                                   \
      printf("%s:%d %s\n", __FILE__, __LINE__, status_.message().c_str()); \
      exit(1);                                                             \
    }                                                                      \
  } while (0)

namespace regatta::bench {

// Device memory that begins as 0xff: NaN in every dtype.
template <class T>
struct Buffer {
  T* data = nullptr;
  int64_t size = 0;
  explicit Buffer(int64_t n) : size(n) {
    CHECK_CUDA(cudaMalloc(&data, std::max<int64_t>(n, 1) * sizeof(T)));
    CHECK_CUDA(cudaMemset(data, 0xff, std::max<int64_t>(n, 1) * sizeof(T)));
  }
  explicit Buffer(const std::vector<T>& v) : Buffer(static_cast<int64_t>(v.size())) {
    CHECK_CUDA(cudaMemcpy(data, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~Buffer() { cudaFree(data); }
  Buffer(const Buffer&) = delete;
  std::vector<T> host() const {
    std::vector<T> v(size);
    CHECK_CUDA(cudaMemcpy(v.data(), data, size * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
  }
};

struct Random {
  std::mt19937 engine;
  explicit Random(uint32_t seed) : engine(seed) {}
  float uniform() { return static_cast<float>(engine() >> 8) * (2.f / 16777216.f) - 1.f; }
  int below(int n) { return static_cast<int>(engine() % n); }
  std::vector<float> floats(int64_t n, float scale) {
    std::vector<float> v(n);
    for (float& x : v) x = uniform() * scale;
    return v;
  }
};

template <class T>
std::vector<T> rounded(std::vector<float>& v) {  // and v as it was rounded
  std::vector<T> r(v.size());
  for (size_t i = 0; i < v.size(); ++i) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      r[i] = __float2bfloat16_rn(v[i]);
      v[i] = __bfloat162float(r[i]);
    } else {
      r[i] = __float2half_rn(v[i]);
      v[i] = __half2float(r[i]);
    }
  }
  return r;
}

// ------------------------------------------------------------------------------------- reference

// One thread per output, from the definition in gemm.h, over dequantized operands.
static __global__ void reference_kernel(const float* x, const float* w, const float* bias,
                                        const float* residual, float* out, int64_t m_count,
                                        int64_t n_all, int64_t k_count, bool gated) {
  const int64_t width = gated ? n_all / 2 : n_all;
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i >= m_count * width) return;
  const int64_t m = i / width, n = i % width;
  const auto dot = [&](int64_t row) {
    double sum = 0.;
    for (int64_t k = 0; k < k_count; ++k) {
      sum += static_cast<double>(x[m * k_count + k]) * w[row * k_count + k];
    }
    return static_cast<float>(sum);
  };
  float y = dot(n) + (bias != nullptr ? bias[n] : 0.f);
  if (gated) {
    const float up = dot(width + n) + (bias != nullptr ? bias[width + n] : 0.f);
    y = y / (1.f + expf(-y)) * up;
  }
  if (residual != nullptr) y += residual[i];
  out[i] = y;
}

struct Case {
  int64_t m, n, k;
  bool gated, bias, residual, norm, sumsq_out, float_out, scaled_out;
};

// A weight [N, K] as pack_weight() leaves it. zero: of groups, or null.
struct Packed {
  int64_t group_size;
  Buffer<uint8_t> buffer;

  Packed(GemmOperands operands, DType dtype, const Case& c, int64_t groups,
         const std::vector<int8_t>& codes, const std::vector<float>& scale,
         const std::vector<float>* zero)
      : group_size(cuda::packed_group_size(operands, c.k, groups)),
        buffer(cuda::packed_weight_bytes(c.n, c.k, operands, group_size)) {
    const Buffer<int8_t> code_buffer(codes);
    const Buffer<float> scale_buffer(scale);
    const Buffer<float> zero_buffer(zero != nullptr ? *zero : std::vector<float>());
    PackWeightParams pack;
    pack.codes = code_buffer.data;
    pack.scale = scale_buffer.data;
    pack.zero = zero != nullptr ? zero_buffer.data : nullptr;
    pack.packed = buffer.data;
    pack.out_features = c.n;
    pack.in_features = c.k;
    pack.num_groups = groups;
    pack.operands = operands;
    pack.dtype = dtype;
    CHECK_STATUS(cuda::pack_weight(pack, nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
  }
};

using Runner = std::function<Status(const GemmParams&)>;

constexpr int64_t kGuard = 64;  // elements past every output that must stay as they were

// Compares runner's output with the reference of xf [M, K] and wf [N, K]; p has the operands.
template <class T>
bool check_product(const Case& c, GemmParams p, const std::vector<float>& xf,
                   const std::vector<float>& wf, const Runner& runner, const std::string& label,
                   double relative, double absolute) {
  const int64_t width = c.gated ? c.n / 2 : c.n;
  Random random(static_cast<uint32_t>(c.m * 131 + c.n * 17 + c.k));
  std::vector<float> biasf = random.floats(c.n, 1.f), residualf = random.floats(c.m * width, 1.f);
  const Buffer<T> bias(rounded<T>(biasf)), residual(rounded<T>(residualf));
  const Buffer<float> x(xf), w(wf), bias_values(biasf), residual_values(residualf);
  const Buffer<float> expected(c.m * width);
  const int64_t parts = cuda::ceil_div(width, gemm_sumsq_columns(c.m));
  const Buffer<uint8_t> out((c.m * width + kGuard) * 4), again((c.m * width + kGuard) * 4);
  const Buffer<float> sumsq(c.m * parts);
  std::vector<float> norm_weightf = random.floats(width, 1.5f);
  const Buffer<T> norm_weight(rounded<T>(norm_weightf)), scaled(c.m * width + kGuard);
  reference_kernel<<<cuda::ceil_div(c.m * width, 128), 128>>>(
      x.data, w.data, c.bias ? bias_values.data : nullptr,
      c.residual ? residual_values.data : nullptr, expected.data, c.m, c.n, c.k, c.gated);
  p.num_rows = c.m;
  p.in_features = c.k;
  p.out_features = c.n;
  p.gated = c.gated;
  p.dtype = cuda::Traits<T>::dtype;
  p.out_dtype = c.float_out ? DType::kFloat32 : p.dtype;
  p.bias = c.bias ? bias.data : nullptr;
  p.residual = c.residual ? residual.data : nullptr;
  p.sumsq_out = c.sumsq_out ? sumsq.data : nullptr;
  p.next_norm_weight = norm_weight.data;
  p.scaled_out = c.scaled_out ? scaled.data : nullptr;
  for (const Buffer<uint8_t>* to : {&again, &out}) {
    p.out = to->data;
    const Status status = runner(p);
    if (!status.ok()) {
      printf("FAIL %s: %s\n", label.c_str(), status.message().c_str());
      return false;
    }
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  const auto y = out.host(), y2 = again.host();
  const auto ref = expected.host();
  int64_t bad = y != y2;
  if (bad) printf("FAIL %s: two runs differ\n", label.c_str());
  double worst = 0.;
  const auto value = [&](int64_t i) {
    if (c.float_out) return reinterpret_cast<const float*>(y.data())[i];
    return static_cast<float>(reinterpret_cast<const T*>(y.data())[i]);
  };
  double squares = 0.;
  for (const float r : ref) squares += static_cast<double>(r) * r;
  const double size = std::sqrt(squares / ref.size());  // `absolute` is a share of it
  for (int64_t i = 0; i < c.m * width; ++i) {
    const double error =
        std::fabs(value(i) - ref[i]) / (relative * std::fabs(ref[i]) + absolute * size);
    if (!(error <= 1.)) ++bad;
    if (!(error <= worst)) worst = error;
  }
  const int64_t end = c.m * width * (c.float_out ? 4 : 2);
  for (int64_t i = end; i < end + kGuard; ++i) bad += y[i] != 0xff;
  if (c.sumsq_out) {
    const auto s = sumsq.host();
    const int64_t columns = gemm_sumsq_columns(c.m);
    for (int64_t i = 0; i < c.m * parts; ++i) {
      double sum = 0.;
      for (int64_t n = i % parts * columns; n < std::min(width, (i % parts + 1) * columns); ++n) {
        sum += std::pow(value(i / parts * width + n), 2.);
      }
      if (!(std::fabs(s[i] - sum) <= 1e-4 * sum + 1e-6)) ++bad;
    }
  }
  if (c.scaled_out) {
    const auto s = scaled.host();
    std::vector<float> products(s.size(), std::nanf(""));
    for (int64_t i = 0; i < c.m * width; ++i) products[i] = value(i) * norm_weightf[i % width];
    const auto product = rounded<T>(products);
    bad += std::memcmp(s.data(), product.data(), c.m * width * sizeof(T)) != 0;
    for (int64_t i = c.m * width; i < c.m * width + kGuard; ++i) {
      bad += reinterpret_cast<const uint16_t*>(s.data())[i] != 0xffff;
    }
  }
  if (bad != 0) {
    printf(
        "FAIL %s m %ld n %ld k %ld gated %d bias %d residual %d sumsq %d scaled %d fp32 %d: %ld "
        "bad, "
        "worst %.2f of the tolerance\n",
        label.c_str(), c.m, c.n, c.k, c.gated, c.bias, c.residual, c.sumsq_out, c.scaled_out,
        c.float_out, bad, worst);
  }
  return bad == 0;
}

// ---------------------------------------------------------------------------------------- timing

using Body = std::function<void(cudaStream_t)>;

// What `body` puts on a stream, as a graph.
class TimedGraph {
 public:
  explicit TimedGraph(const Body& body) {
    CHECK_CUDA(cudaDeviceSynchronize());  // the stream does not wait for the default one
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    cudaGraph_t graph;
    CHECK_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed));
    body(stream_);
    CHECK_CUDA(cudaStreamEndCapture(stream_, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&exec_, graph, 0));
    cudaGraphDestroy(graph);
    CHECK_CUDA(cudaEventCreate(&begin_));
    CHECK_CUDA(cudaEventCreate(&end_));
  }
  TimedGraph(const TimedGraph&) = delete;
  TimedGraph& operator=(const TimedGraph&) = delete;
  ~TimedGraph() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
    cudaGraphExecDestroy(exec_);
    cudaStreamDestroy(stream_);
  }

  // Milliseconds of one replay.
  double replay() {
    CHECK_CUDA(cudaEventRecord(begin_, stream_));
    CHECK_CUDA(cudaGraphLaunch(exec_, stream_));
    CHECK_CUDA(cudaEventRecord(end_, stream_));
    CHECK_CUDA(cudaEventSynchronize(end_));
    float ms;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin_, end_));
    return ms;
  }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t exec_;
  cudaEvent_t begin_, end_;
};

inline double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Milliseconds of a replay: the median of `replays` behind a few.
inline double graph_ms(const Body& body, int replays, int warm_ups = 2) {
  TimedGraph graph(body);
  std::vector<double> times;
  for (int r = 0; r < warm_ups; ++r) graph.replay();
  for (int r = 0; r < replays; ++r) times.push_back(graph.replay());
  return median_of(times);
}

// The same of several, which take turns of `replays`, forwards and backwards, beginning with
// another one: clocks move with what ran before. A turn's first half is not counted.
inline std::vector<double> graphs_ms(const std::vector<Body>& bodies, int rounds, int replays) {
  std::vector<std::unique_ptr<TimedGraph>> graphs;
  for (const Body& body : bodies) graphs.push_back(std::make_unique<TimedGraph>(body));
  std::vector<std::vector<double>> times(bodies.size());
  for (int round = 0; round < rounds; ++round) {
    for (size_t turn = 0; turn < graphs.size(); ++turn) {
      const size_t from = (turn + round / 2) % graphs.size();
      const size_t i = round % 2 ? graphs.size() - 1 - from : from;
      for (int r = 0; r < replays; ++r) {
        const double ms = graphs[i]->replay();
        if (r >= replays / 2) times[i].push_back(ms);
      }
    }
  }
  std::vector<double> medians;
  for (const auto& of : times) medians.push_back(median_of(of));
  return medians;
}

__device__ inline uint8_t random_byte(int64_t i, uint32_t seed) {
  uint32_t h = static_cast<uint32_t>(i) * 2654435761u ^ seed;
  h ^= h >> 15;
  h *= 2246822519u;
  h ^= h >> 13;
  return static_cast<uint8_t>(h >> 9);
}

static __global__ void set_kernel(float* p, int64_t n, float value) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < n;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    p[i] = value;
  }
}

// The products of a Llama-3-8B step: four of each layer, and the head.
constexpr int kLayers = 32;
constexpr int64_t kHidden = 4096, kInner = 14336, kQkv = 6144, kVocab = 128256;
enum Kind { kQkvProjection, kOutProjection, kGateUp, kDown, kHead, kKinds };
constexpr const char* kKindNames[] = {"qkv", "out", "gate_up", "down", "head"};
constexpr int64_t kN[] = {kQkv, kHidden, 2 * kInner, kHidden, kVocab};
constexpr int64_t kK[] = {kHidden, kHidden, kHidden, kInner, kHidden};

}  // namespace regatta::bench
