// What the benchmarks share: times of CUDA graphs, the products of a Llama-3-8B step.
#pragma once

#include "native/buffers.cuh"
#include "regatta/gemm.h"

namespace regatta::bench {

using namespace regatta::native;

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

// Scratch for products of up to `rows` rows and `columns` rows of weight, gated ones too, and
// cuBLASLt's handle, or null where there is none.
inline cuda::GemmResources blas_resources(GemmOperands operands, int64_t rows, int64_t columns) {
  cuda::GemmResources resources;
  GemmParams widest;
  widest.operands = operands;
  widest.num_rows = rows;
  widest.out_features = columns;
  widest.gated = true;
  resources.scratch_bytes = cuda::gemm_scratch_bytes(widest);
  CHECK_CUDA(cudaMalloc(&resources.scratch, resources.scratch_bytes));
  const Status status = cuda::create_blas(&resources.blas);
  if (!status.ok()) printf("without cuBLASLt: %s\n", status.message().c_str());
  return resources;
}

// The products of a Llama-3-8B step: four of each layer, and the head.
constexpr int kLayers = 32;
constexpr int64_t kHidden = 4096, kInner = 14336, kQkv = 6144, kVocab = 128256;
enum Kind { kQkvProjection, kOutProjection, kGateUp, kDown, kHead, kKinds };
constexpr const char* kKindNames[] = {"qkv", "out", "gate_up", "down", "head"};
constexpr int64_t kN[] = {kQkv, kHidden, 2 * kInner, kHidden, kVocab};
constexpr int64_t kK[] = {kHidden, kHidden, kHidden, kInner, kHidden};

}  // namespace regatta::bench
