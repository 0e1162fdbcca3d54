// Checks and times paged_attention: attention_check [check|bench|small]. No framework.
//
// check: odd shapes against a float64 CPU reference over sampled rows; unused cache slots and the
// output hold NaN beforehand. small: few of them, for compute-sanitizer. bench: times in CUDA
// graphs. Build: nvcc -O3 -std=c++17 -Xcompiler -fopenmp -I csrc/include -I csrc/cuda
//        -gencode=arch=compute_90a,code=sm_90a csrc/cuda/attention*.cu
//        csrc/cuda/bench/attention_check.cu
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "common.cuh"
#include "regatta/cuda_ops.h"

using namespace regatta;

#define CHECK(x)                                                                         \
  do {                                                                                   \
    cudaError_t error_ = (x);                                                            \
    if (error_ != cudaSuccess) {                                                         \
      std::printf("%s:%d %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(error_)); \
      std::exit(1);                                                                      \
    }                                                                                    \
  } while (0)

namespace {

__device__ __host__ inline uint32_t mix(uint64_t x) {
  x ^= x >> 33, x *= 0xff51afd7ed558ccdull, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ull, x ^= x >> 33;
  return static_cast<uint32_t>(x);
}

// Roughly normal, unit variance.
template <class T>
__global__ void fill_random(T* p, int64_t n, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    const uint32_t a = mix(seed * 0x9e3779b97f4a7c15ull + i),
                   b = mix(~seed * 0x9e3779b97f4a7c15ull + i);
    const float x = (a & 0xffff) + (a >> 16) + (b & 0xffff) + (b >> 16);
    p[i] = cuda::Traits<T>::from_float((x / 65536.f - 2.f) * 1.7320508f);
  }
}

// Unused slots of a cache become NaN.
template <class T>
__global__ void poison(T* cache, const uint8_t* used, int64_t num_rows, int heads, int block_size,
                       int dim) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < num_rows * dim;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t row = i / dim, block = row / (int64_t{heads} * block_size);
    if (!used[block * block_size + row % block_size]) cache[i] = cuda::Traits<T>::from_float(NAN);
  }
}

struct Span {
  int num_tokens, context_len;
};

struct Case {
  std::string name;
  std::vector<Span> spans;
  int heads, kv_heads, dim, block_size;
  int window = -1;
  int padding = 0;  // tokens behind the last span
};

template <class T>
struct Setup {
  Case c;
  DType dtype = cuda::Traits<T>::dtype;
  int layers;
  int64_t num_tokens = 0, num_blocks = 0, max_blocks = 0, cache_elements = 0;
  std::vector<int32_t> cu{0}, ctx, table;
  T *q, *k, *v, *out;
  int32_t *d_cu, *d_ctx, *d_table;
  void* workspace;
  int64_t workspace_bytes;
  cuda::AttentionLimits limits;

  Setup(const Case& which, int num_layers = 1) : c(which), layers(num_layers) {
    std::mt19937 rng(7);
    int64_t blocks = 3;
    for (const Span& s : c.spans) {
      cu.push_back(cu.back() + s.num_tokens);
      ctx.push_back(s.context_len);
      const int64_t n = cuda::ceil_div(s.context_len, c.block_size);
      max_blocks = std::max(max_blocks, n);
      blocks += n;
      limits.max_query_len = std::max<int64_t>(limits.max_query_len, s.num_tokens);
      limits.max_context_len = std::max<int64_t>(limits.max_context_len, s.context_len);
    }
    max_blocks = std::max<int64_t>(max_blocks, 1) + 1;
    num_blocks = blocks;
    num_tokens = cu.back() + c.padding;
    std::vector<int> ids(num_blocks);
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), rng);
    std::vector<uint8_t> used(num_blocks * c.block_size, 0);
    table.assign(c.spans.size() * max_blocks, -1);
    int next = 0;
    for (size_t b = 0; b < c.spans.size(); ++b) {
      for (int p = 0; p < c.spans[b].context_len; ++p) {
        int32_t& id = table[b * max_blocks + p / c.block_size];
        if (id < 0) id = ids[next++];
        used[int64_t{id} * c.block_size + p % c.block_size] = 1;
      }
    }
    cache_elements = num_blocks * c.kv_heads * c.block_size * c.dim;
    const int64_t q_elements = std::max<int64_t>(num_tokens, 1) * c.heads * c.dim;
    CHECK(cudaMalloc(&q, q_elements * sizeof(T)));
    CHECK(cudaMalloc(&out, q_elements * sizeof(T)));
    CHECK(cudaMalloc(&k, layers * cache_elements * sizeof(T)));
    CHECK(cudaMalloc(&v, layers * cache_elements * sizeof(T)));
    CHECK(cudaMalloc(&d_cu, cu.size() * 4));
    CHECK(cudaMalloc(&d_ctx, ctx.size() * 4));
    CHECK(cudaMalloc(&d_table, table.size() * 4));
    uint8_t* d_used;
    CHECK(cudaMalloc(&d_used, used.size()));
    CHECK(cudaMemcpy(d_used, used.data(), used.size(), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(d_cu, cu.data(), cu.size() * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(d_ctx, ctx.data(), ctx.size() * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(d_table, table.data(), table.size() * 4, cudaMemcpyHostToDevice));
    fill_random<<<1024, 256>>>(q, q_elements, 1);
    fill_random<<<1024, 256>>>(k, layers * cache_elements, 2);
    fill_random<<<1024, 256>>>(v, layers * cache_elements, 3);
    for (int layer = 0; layer < layers; ++layer) {
      const int64_t rows = num_blocks * c.kv_heads * c.block_size;
      poison<<<1024, 256>>>(k + layer * cache_elements, d_used, rows, c.kv_heads, c.block_size,
                            c.dim);
      poison<<<1024, 256>>>(v + layer * cache_elements, d_used, rows, c.kv_heads, c.block_size,
                            c.dim);
    }
    CHECK(cudaMemset(out, 0xff, q_elements * sizeof(T)));
    workspace_bytes = cuda::paged_attention_workspace_bytes(params(0), limits);
    CHECK(cudaMalloc(&workspace, std::max<int64_t>(workspace_bytes, 1)));
    CHECK(cudaMemset(workspace, 0, workspace_bytes));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaFree(d_used));
  }
  ~Setup() {
    for (void* p : {static_cast<void*>(q), static_cast<void*>(k), static_cast<void*>(v),
                    static_cast<void*>(out), static_cast<void*>(d_cu), static_cast<void*>(d_ctx),
                    static_cast<void*>(d_table), workspace}) {
      CHECK(cudaFree(p));
    }
  }
  PagedAttentionParams params(int layer) const {
    PagedAttentionParams p;
    p.dtype = dtype;
    p.q = q;
    p.cache.key = k + layer * cache_elements;
    p.cache.value = v + layer * cache_elements;
    p.cache.num_blocks = num_blocks;
    p.cache.block_size = c.block_size;
    p.batch.cu_seqlens_q = d_cu;
    p.batch.context_lens = d_ctx;
    p.batch.block_tables = d_table;
    p.batch.num_tokens = num_tokens;
    p.batch.num_seqs = static_cast<int64_t>(c.spans.size());
    p.batch.max_blocks = max_blocks;
    p.out = out;
    p.num_heads = c.heads;
    p.num_kv_heads = c.kv_heads;
    p.head_dim = c.dim;
    p.softmax_scale = 1.f / std::sqrt(static_cast<float>(c.dim));
    p.window = c.window;
    return p;
  }
  void run(int layer, cudaStream_t stream, bool pdl) const {
    const Status status =
        cuda::paged_attention(params(layer), limits, workspace, workspace_bytes, {stream, pdl});
    if (!status.ok()) {
      std::printf("%s: %s\n", c.name.c_str(), status.message().c_str());
      std::exit(1);
    }
  }
};

float host_float(__nv_bfloat16 x) { return __bfloat162float(x); }
float host_float(__half x) { return __half2float(x); }
float host_float(float x) { return x; }

// Relative error over sampled rows; infinite when an output is NaN or padding is not 0.
template <class T>
double error_of(const Setup<T>& s, int64_t budget) {
  const Case& c = s.c;
  const int64_t n = s.num_tokens * c.heads * c.dim;
  std::vector<T> q(n), out(n), k(s.cache_elements), v(s.cache_elements);
  CHECK(cudaMemcpy(q.data(), s.q, n * sizeof(T), cudaMemcpyDeviceToHost));
  CHECK(cudaMemcpy(out.data(), s.out, n * sizeof(T), cudaMemcpyDeviceToHost));
  CHECK(cudaMemcpy(k.data(), s.k, k.size() * sizeof(T), cudaMemcpyDeviceToHost));
  CHECK(cudaMemcpy(v.data(), s.v, v.size() * sizeof(T), cudaMemcpyDeviceToHost));
  for (int64_t i = 0; i < n; ++i) {
    if (!std::isfinite(host_float(out[i]))) return INFINITY;
    if (i >= int64_t{s.cu.back()} * c.heads * c.dim && host_float(out[i]) != 0.f) return INFINITY;
  }
  struct Job {
    int seq, token, head;
  };
  std::vector<Job> jobs;
  double work = 0;
  for (size_t b = 0; b < c.spans.size(); ++b) {
    for (int t = 0; t < c.spans[b].num_tokens; ++t) {
      for (int h = 0; h < c.heads; ++h) {
        jobs.push_back({static_cast<int>(b), t, h});
        work += double(c.spans[b].context_len) * c.dim;
      }
    }
  }
  std::mt19937 rng(3);
  std::shuffle(jobs.begin(), jobs.end(), rng);
  const double keep = std::min(1.0, budget / std::max(work, 1.0));
  jobs.resize(std::min<size_t>(jobs.size(), std::max<size_t>(64, jobs.size() * keep)));
  double difference = 0, norm = 0;
#pragma omp parallel for reduction(+ : difference, norm) schedule(dynamic, 4)
  for (size_t j = 0; j < jobs.size(); ++j) {
    const Span span = c.spans[jobs[j].seq];
    const int kv = jobs[j].head / (c.heads / c.kv_heads);
    const int64_t row = (int64_t{s.cu[jobs[j].seq]} + jobs[j].token) * c.heads + jobs[j].head;
    const int last = span.context_len - span.num_tokens + jobs[j].token;
    const int first = c.window < 0 ? 0 : std::max(0, last - c.window + 1);
    std::vector<double> logits(std::max(0, last + 1), 0.0);
    auto at = [&](int p) {
      const int64_t block = s.table[jobs[j].seq * s.max_blocks + p / c.block_size];
      return ((block * c.kv_heads + kv) * c.block_size + p % c.block_size) * c.dim;
    };
    double top = -INFINITY, sum = 0;
    for (int p = first; p <= last; ++p) {
      const T* key = &k[at(p)];
      double x = 0;
      for (int d = 0; d < c.dim; ++d)
        x += double(host_float(q[row * c.dim + d])) * host_float(key[d]);
      logits[p] = x / std::sqrt(double(c.dim));
      top = std::max(top, logits[p]);
    }
    std::vector<double> expected(c.dim, 0.0);
    for (int p = first; p <= last; ++p) {
      const double w = std::exp(logits[p] - top);
      sum += w;
      const T* value = &v[at(p)];
      for (int d = 0; d < c.dim; ++d) expected[d] += w * host_float(value[d]);
    }
    for (int d = 0; d < c.dim; ++d) {
      const double want = sum > 0 ? expected[d] / sum : 0.0;
      const double got = host_float(out[row * c.dim + d]);
      difference += (got - want) * (got - want);
      norm += want * want;
    }
  }
  return norm > 0 ? std::sqrt(difference / norm) : difference;
}

int failures = 0;

template <class T>
void check(const Case& c, const char* kernel, double tolerance) {
  setenv("REGATTA_KERNEL", (std::string("paged_attention=") + kernel).c_str(), 1);
  Setup<T> s(c);
  const int64_t bytes = s.num_tokens * c.heads * c.dim * sizeof(T);
  s.run(0, nullptr, false);
  CHECK(cudaDeviceSynchronize());
  const double error = error_of(s, 40'000'000);
  // Again, from a graph with programmatic dependent launches: same bits.
  std::vector<uint8_t> once(bytes), again(bytes);
  CHECK(cudaMemcpy(once.data(), s.out, bytes, cudaMemcpyDeviceToHost));
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK(cudaStreamCreate(&stream));
  CHECK(cudaMemsetAsync(s.out, 0xff, bytes, stream));
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  for (int i = 0; i < 3; ++i) s.run(0, stream, true);
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  CHECK(cudaGraphLaunch(exec, stream));
  CHECK(cudaStreamSynchronize(stream));
  CHECK(cudaMemcpy(again.data(), s.out, bytes, cudaMemcpyDeviceToHost));
  CHECK(cudaGraphExecDestroy(exec));
  CHECK(cudaGraphDestroy(graph));
  CHECK(cudaStreamDestroy(stream));
  const bool same = once == again;
  const bool ok = error < tolerance && same;
  failures += !ok;
  if (!ok) std::printf("FAILED ");
  std::printf("%-8s %-8s %-28s D %3d heads %2d/%2d block %3d window %5d: %.1e%s\n", kernel,
              dtype_name(s.dtype), c.name.c_str(), c.dim, c.heads, c.kv_heads, c.block_size,
              c.window, error, same ? "" : " (replay differs)");
  std::fflush(stdout);
}

void check_all(bool small) {
  const std::vector<Span> odd = {{0, 0},  {1, 1},   {1, 15},  {1, 16},  {1, 17}, {1, 63},  {1, 64},
                                 {1, 65}, {1, 127}, {1, 129}, {1, 300}, {0, 0},  {1, 1000}};
  const std::vector<Span> prompts = {{1, 1},   {5, 5},     {63, 63},   {64, 64},
                                     {65, 65}, {129, 129}, {200, 333}, {17, 500}};
  const std::vector<Span> mixed = {{1, 700}, {300, 300}, {1, 64}, {3, 90},
                                   {0, 0},   {77, 1200}, {1, 33}};
  const std::vector<Span> longer = {{1, 4096}, {1, 32768}, {1, 4097}, {130, 4096}};
  const std::vector<Span> very_long = {{1, 131072}, {4, 100001}};
  struct Heads {
    int heads, kv_heads;
  };
  std::vector<Case> cases;
  for (int dim : {64, 80, 96, 128, 256}) {
    int which = 0;
    for (Heads h : {Heads{4, 4}, Heads{8, 2}, Heads{14, 2}, Heads{16, 2}, Heads{20, 1}}) {
      const int block = 16 << which++ % 4;
      cases.push_back({"odd decode", odd, h.heads, h.kv_heads, dim, block, -1, 3});
      cases.push_back({"prompts", prompts, h.heads, h.kv_heads, dim, block});
      cases.push_back({"mixed", mixed, h.heads, h.kv_heads, dim, block, -1, 2});
      if (small) break;
      cases.push_back({"mixed, window", mixed, h.heads, h.kv_heads, dim, block, 100});
    }
    if (!small) cases.push_back({"4k and 32k", longer, 8, 2, dim, 64});
    if (!small) cases.push_back({"4k and 32k, window", longer, 8, 2, dim, 32, 1000});
  }
  if (!small) cases.push_back({"128k", very_long, 8, 2, 128, 64});
  for (const Case& c : cases) {
    const bool wgmma = c.dim == 64 || c.dim == 128 || c.dim == 256;
    for (const char* kernel : {"sm90", "sm80"}) {
      if (std::string(kernel) == "sm90" && !wgmma) continue;
      check<__nv_bfloat16>(c, kernel, 6e-3);
      if (!small || c.dim == 128) check<__half>(c, kernel, 1e-3);
    }
    if (c.heads == 8 && c.name != "128k") check<float>(c, "generic", 1e-5);
  }
  std::printf("%d failures\n", failures);
}

// Microseconds per launch: a graph of all layers with programmatic dependent launches, replayed.
template <class T>
double time_case(const Case& c, int layers, const char* kernel) {
  setenv("REGATTA_KERNEL", (std::string("paged_attention=") + kernel).c_str(), 1);
  Setup<T> s(c, layers);
  const int launches = std::max(layers, 4);
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK(cudaStreamCreate(&stream));
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  for (int i = 0; i < launches; ++i) s.run(i % layers, stream, true);
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < 13; ++i) {
    CHECK(cudaEventRecord(begin, stream));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaEventSynchronize(end));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 3) times.push_back(ms * 1000.f / launches);
  }
  CHECK(cudaGraphExecDestroy(exec));
  CHECK(cudaGraphDestroy(graph));
  CHECK(cudaStreamDestroy(stream));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void bench_prefill(const char* kernel, int heads, int kv_heads, int dim, int batch, int length,
                   int block) {
  Case c{"prefill", std::vector<Span>(batch, Span{length, length}), heads, kv_heads, dim, block};
  const double us = time_case<__nv_bfloat16>(c, 1, kernel);
  const double flops = 2.0 * batch * heads * dim * double(length) * length;  // half of 4 D n^2
  std::printf(
      "prefill %s  heads %2d/%2d D %3d block %3d  %2d x %5d: %9.1f us %6.1f TFLOP/s (%.0f %% of "
      "601)\n",
      kernel, heads, kv_heads, dim, block, batch, length, us, flops / us / 1e6,
      flops / us / 1e6 / 6.01);
  std::fflush(stdout);
}

void bench_decode(int heads, int kv_heads, int dim, int batch, int length, int block) {
  Case c{"decode", std::vector<Span>(batch, Span{1, length}), heads, kv_heads, dim, block};
  const double bytes = 4.0 * batch * kv_heads * dim * length;
  const int layers = std::clamp(static_cast<int>(400e6 / bytes), 1, 32);
  const bool wgmma = dim == 64 || dim == 128 || dim == 256;
  const double us = time_case<__nv_bfloat16>(c, layers, wgmma ? "sm90" : "sm80");
  std::printf(
      "decode  heads %2d/%2d D %3d block %3d  batch %3d x %6d: %8.2f us %5.2f TB/s (%.0f %% of "
      "4.67)\n",
      heads, kv_heads, dim, block, batch, length, us, bytes / us / 1e6, bytes / us / 4.67e4);
  std::fflush(stdout);
}

void bench_all() {
  for (const char* kernel : {"sm90", "sm80"}) {
    for (int length : {1024, 4096, 8192}) bench_prefill(kernel, 32, 8, 128, 1, length, 64);
    bench_prefill(kernel, 32, 32, 128, 1, 8192, 64);
    bench_prefill(kernel, 32, 8, 128, 16, 512, 64);
    bench_prefill(kernel, 32, 8, 64, 1, 8192, 64);
    bench_prefill(kernel, 16, 8, 256, 1, 8192, 64);
    bench_prefill(kernel, 32, 8, 128, 1, 8192, 16);
  }
  bench_prefill("sm80", 32, 8, 96, 1, 8192, 64);
  for (int batch : {1, 8, 32, 64, 128}) {
    for (int length : {128, 1024, 4096}) bench_decode(32, 8, 128, batch, length, 64);
  }
  bench_decode(32, 8, 128, 1, 32768, 64);
  bench_decode(32, 8, 128, 1, 131072, 64);
  bench_decode(32, 8, 128, 64, 4096, 16);
  bench_decode(32, 8, 64, 64, 4096, 64);
  bench_decode(32, 8, 96, 64, 4096, 64);
  bench_decode(16, 8, 256, 64, 4096, 64);
  bench_decode(32, 32, 128, 16, 4096, 64);
  bench_decode(14, 2, 64, 64, 1024, 64);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "check";
  cudaDeviceProp device;
  CHECK(cudaGetDeviceProperties(&device, 0));
  std::printf("%s, %d multiprocessors\n", device.name, device.multiProcessorCount);
  if (mode == "bench") {
    bench_all();
  } else if (mode == "decode") {  // for a profiler
    bench_decode(32, 8, 128, 64, 4096, 64);
  } else {
    check_all(mode == "small");
  }
  return failures != 0;
}
