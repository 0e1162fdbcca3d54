// Puts drafts that stand by TopP + window verification in the places of the tokens drawn there.
//
// Architectures: all. Definition and the work on a row: regatta/verify_window.h.
//  1. One block per row with a draft: the draft's rank and the largest logit, one pass over the
//     row. A draft that is the likeliest token, or no candidate, is done. Else the weight in front
//     of it against that of all tokens, one more pass; with top_k, whose border a radix selection
//     finds, six.
//  2. One thread per span goes through its drafts.
// Bound: latency of the passes, each of which one multiprocessor reads from L2.
#include "regatta/verify_window.h"
#include "row.cuh"

namespace regatta::cuda {
namespace {

constexpr int kSpanThreads = 128;

// See verify_row.
struct Block {
  double* scratch;  // [kWarps], shared

  __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ int size() const { return kThreads; }
  __device__ void sync() const { __syncthreads(); }
  __device__ int add(int32_t* value, int32_t amount) const { return atomicAdd(value, amount); }

  // Equal bins of a warp are added at once: logits share their upper bits.
  __device__ void count(int32_t* bins, int bin) const {
    const unsigned alike = __match_any_sync(~0u, bin);
    const bool leads = static_cast<int>(threadIdx.x % kWarp) == __ffs(static_cast<int>(alike)) - 1;
    if (bin >= 0 && leads) atomicAdd(bins + bin, __popc(alike));
  }

  __device__ float max(float value) const {
    return reduce(value, [](float a, float b) { return fmaxf(a, b); });
  }
  __device__ int sum(int value) const {
    return reduce(value, [](int a, int b) { return a + b; });
  }
  __device__ double sum(double value) const {
    return reduce(value, [](double a, double b) { return a + b; });
  }

  template <class T, class F>
  __device__ T reduce(T value, F&& combined) const {
    T* const of_warps = reinterpret_cast<T*>(scratch);
#pragma unroll
    for (int o = kWarp / 2; o > 0; o /= 2) value = combined(value, __shfl_xor_sync(~0u, value, o));
    __syncthreads();  // whoever reads scratch from before is done
    if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = value;
    __syncthreads();
    value = of_warps[threadIdx.x % kWarps];
#pragma unroll
    for (int o = kWarp / 2; o > 0; o /= 2) value = combined(value, __shfl_xor_sync(~0u, value, o));
    return value;
  }
};

__global__ void __launch_bounds__(kThreads) verify_rows_kernel(const VerifyWindowParams p) {
  __shared__ WindowScratch scratch;
  __shared__ double of_warps[kWarps];
  pdl_trigger();
  pdl_wait();
  const int64_t row = blockIdx.x;
  if (p.num_drafts[row] == 0) return;
  const int32_t verdict = verify_row(Block{of_warps}, scratch, p, row);
  if (threadIdx.x == 0) p.verdicts[row] = verdict;
}

__global__ void __launch_bounds__(kSpanThreads) verify_spans_kernel(const VerifyWindowParams p) {
  pdl_trigger();
  pdl_wait();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kSpanThreads + threadIdx.x;
  if (row < p.num_rows) verify_span(p, row);
}

}  // namespace

Status verify_window(const VerifyWindowParams& params, const Launch& launch_on) {
  if (params.num_rows == 0) return {};
  REGATTA_RETURN_IF_ERROR(check_vocab_size("verify_window", params.vocab_size));
  REGATTA_RETURN_IF_ERROR(
      launch(verify_rows_kernel, {launch_on, params.num_rows, kThreads}, "verify_window", params));
  return launch(verify_spans_kernel,
                {launch_on, ceil_div(params.num_rows, kSpanThreads), kSpanThreads}, "verify_window",
                params);
}

}  // namespace regatta::cuda
