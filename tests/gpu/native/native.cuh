// What programs that call kernels past the operators share: their command line, the count of cases,
// buffers, random numbers, and times of CUDA graphs.
#pragma once

#include <cuda_fp8.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cuda/common.cuh"

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

namespace regatta::native {

// ---------------------------------------------------------------------------------- command line

// Cases of the part that runs, and those that failed.
struct Tally {
  int cases = 0, failures = 0;
};
inline Tally tally;

// Counts a case; says what failed.
inline bool count_case(bool ok, const std::string& failure) {
  ++tally.cases, tally.failures += !ok;
  if (!ok) printf("FAILED %s\n", failure.c_str());
  return ok;
}

__attribute__((format(printf, 1, 2))) inline std::string format(const char* text, ...) {
  va_list words, again;
  va_start(words, text);
  va_copy(again, words);
  std::string made(vsnprintf(nullptr, 0, text, words), '\0');
  vsnprintf(made.data(), made.size() + 1, text, again);
  va_end(words), va_end(again);
  return made;
}

// Counts a case whose error must be less than the tolerance.
inline bool count_error(const std::string& name, double error, double tolerance) {
  return count_case(error < tolerance, format("%s: %.1e", name.c_str(), error));
}

// The words behind a part's name.
struct Words : std::vector<std::string> {
  using std::vector<std::string>::vector;
  bool has(const std::string& word) const { return std::find(begin(), end(), word) != end(); }
  // Those that are numbers; `usual` where there is none.
  std::vector<int64_t> numbers(const std::vector<int64_t>& usual) const {
    std::vector<int64_t> found;
    for (const std::string& word : *this) {
      if (std::isdigit(static_cast<unsigned char>(word[0]))) found.push_back(std::stoll(word));
    }
    return found.empty() ? usual : found;
  }
};

// The rows of a table whose names begin with one of the words; where there are none, the first
// `usual` ones.
template <class Row, size_t N>
std::vector<Row> rows_named(const Row (&table)[N], const Words& words, size_t usual = N) {
  std::vector<Row> found;
  for (const Row& row : table) {
    const auto begins = [&](const std::string& word) {
      return std::string(row.name).rfind(word, 0) == 0;
    };
    if (std::any_of(words.begin(), words.end(), begins)) found.push_back(row);
  }
  return found.empty() ? std::vector<Row>(table, table + usual) : found;
}

// A row of a program's table: `PROGRAM check PART ...` or `PROGRAM time PART ...`.
struct Part {
  const char *mode, *name;
  std::function<void(const Words&)> run;
};

// Runs the part that the command line names, or without a name all of a mode; returns the exit
// status. A check ends with "PART: N cases, M failures".
inline int run_parts(int argc, char** argv, const std::vector<Part>& parts) {
  setvbuf(stdout, nullptr, _IOLBF, 4096);
  const std::string mode = argc > 1 ? argv[1] : "", name = argc > 2 ? argv[2] : "";
  int found = 0, failures = 0;
  for (const Part& part : parts) {
    if (mode != part.mode || (!name.empty() && name != part.name)) continue;
    if (found++ == 0) {
      cudaDeviceProp device;
      CHECK_CUDA(cudaGetDeviceProperties(&device, 0));
      printf("%s, %d multiprocessors\n", device.name, device.multiProcessorCount);
    }
    tally = {};
    part.run(argc > 3 ? Words(argv + 3, argv + argc) : Words());
    if (tally.cases > 0) {
      printf("%s: %d cases, %d failures\n", part.name, tally.cases, tally.failures);
    }
    failures += tally.failures;
  }
  if (found > 0) return failures > 0;
  printf("there is no %s '%s'; there are:\n", mode.c_str(), name.c_str());
  for (const Part& part : parts) printf("  %s %s\n", part.mode, part.name);
  return 2;
}

// Compute capability * 10 of the GPU.
inline int architecture() {
  int major, minor;
  CHECK_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  CHECK_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
  return major * 10 + minor;
}

// --------------------------------------------------------------------------------------- buffers

// Device memory that begins as 0xff: NaN in every dtype.
template <class T>
struct Buffer {
  T* data = nullptr;
  int64_t size = 0;
  explicit Buffer(int64_t n) : size(n) {
    CHECK_CUDA(cudaMalloc(&data, std::max<int64_t>(n, 1) * sizeof(T)));
    spoil();
  }
  explicit Buffer(const std::vector<T>& v) : Buffer(static_cast<int64_t>(v.size())) { put(v); }
  ~Buffer() { cudaFree(data); }
  Buffer(const Buffer&) = delete;
  Buffer(Buffer&& other) noexcept : data(std::exchange(other.data, nullptr)), size(other.size) {}
  void put(const std::vector<T>& v) const {
    CHECK_CUDA(cudaMemcpy(data, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  void spoil() const { CHECK_CUDA(cudaMemset(data, 0xff, std::max<int64_t>(size, 1) * sizeof(T))); }
  std::vector<T> host() const {
    std::vector<T> v(size);
    CHECK_CUDA(cudaMemcpy(v.data(), data, size * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
  }
};

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

inline float host_float(__nv_bfloat16 x) { return __bfloat162float(x); }
inline float host_float(__half x) { return __half2float(x); }
inline float host_float(float x) { return x; }
inline float host_float(uint8_t e4m3) {
  __nv_fp8_e4m3 x;
  x.__x = e4m3;
  return static_cast<float>(x);
}

template <class T>
T host_from(float x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else {
    return x;
  }
}

template <class T>
std::vector<T> rounded(std::vector<float>& v) {  // and v as it was rounded
  std::vector<T> r(v.size());
  for (size_t i = 0; i < v.size(); ++i) {
    r[i] = host_from<T>(v[i]);
    v[i] = host_float(r[i]);
  }
  return r;
}

// A relative error; infinite where something is not finite.
struct Error {
  double difference = 0, norm = 0;
  void add(double got, double wanted) {
    difference += std::isfinite(got) ? (got - wanted) * (got - wanted) : INFINITY;
    norm += wanted * wanted;
  }
  double value() const { return std::sqrt(norm > 0 ? difference / norm : difference); }
};

// -------------------------------------------------------------------------------- random numbers

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
  std::vector<float> positive(int64_t n, float scale) {  // 0.5 to 2.5 of it
    std::vector<float> v(n);
    for (float& x : v) x = (1.5f + uniform()) * scale;
    return v;
  }
};

inline std::mt19937 rng(11);  // of twins and their cases

// A buffer with a twin on the host.
template <class T>
struct Twin {
  std::vector<T> host;
  Buffer<T> buffer;
  T* device;
  explicit Twin(size_t n) : host(n), buffer(n), device(buffer.data) {}
  void upload() { buffer.put(host); }
  void download() { host = buffer.host(); }
  Twin& random(float scale = 1.f) {
    std::normal_distribution<float> normal(0.f, scale);
    for (T& x : host) x = host_from<T>(normal(rng));
    upload();
    return *this;
  }
};

__device__ __host__ inline uint32_t mix(uint64_t x) {
  x ^= x >> 33, x *= 0xff51afd7ed558ccdull, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ull, x ^= x >> 33;
  return static_cast<uint32_t>(x);
}

template <class T>
__global__ void fill_random_kernel(T* p, int64_t n, uint64_t seed, float scale) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    const uint32_t a = mix(seed * 0x9e3779b97f4a7c15ull + i),
                   b = mix(~seed * 0x9e3779b97f4a7c15ull + i);
    const float x = (a & 0xffff) + (a >> 16) + (b & 0xffff) + (b >> 16);
    p[i] = cuda::Traits<T>::from_float((x / 65536.f - 2.f) * 1.7320508f * scale);
  }
}

// Roughly normal, of variance scale^2.
template <class T>
void fill_random(T* p, int64_t n, uint64_t seed, float scale = 1.f) {
  if (n > 0) fill_random_kernel<<<1024, 256>>>(p, n, seed, scale);
  CHECK_CUDA(cudaGetLastError());
}

// 16-bit values, and codes, of moderate size.
static __global__ void fill_bytes_kernel(uint8_t* p, int64_t n, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    const uint32_t random = mix(seed * 0x9e3779b97f4a7c15ull + i);
    p[i] = static_cast<uint8_t>(i % 2 == 1 ? (random & 0x83) | 0x38 : random & 0xbf);
  }
}

// ----------------------------------------------------------------------------------------- times

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

// Once, for a check: with programmatic dependent launches.
inline void run_graph(const Body& body) { TimedGraph(body).replay(); }

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

// Microseconds of one of `calls` calls in a graph, each with its number.
inline double call_us(int calls, int replays, const std::function<void(int, cudaStream_t)>& call) {
  const Body all = [&](cudaStream_t stream) {
    for (int i = 0; i < calls; ++i) call(i, stream);
  };
  return 1e3 / calls * graph_ms(all, replays);
}

}  // namespace regatta::native
