// Gates of attention's outputs: taken out of the first product, and multiplied in behind attention.
//
// Layout: see OutGateParams. Architectures: sm_75 and later. A thread has a value, neighbours in a
// row. Bound: memory (or the launch).
#include "cuda/attention/out_gate.h"
#include "cuda/common.cuh"

namespace regatta::cuda {
namespace {

constexpr int kThreads = 256;

// Where a row of heads with gates has the query's value that a row without has at `column`.
__device__ __forceinline__ int64_t with_gates(int64_t column, int64_t queries, int64_t head_dim) {
  return column < queries ? column / head_dim * 2 * head_dim + column % head_dim : column + queries;
}

template <class T>
__global__ __launch_bounds__(kThreads) void drop_gates_kernel(OutGateParams p) {
  pdl_trigger();
  pdl_wait();
  const int64_t queries = p.num_heads * p.head_dim, width = queries + p.rest;
  const int64_t column = int64_t{blockIdx.y} * kThreads + threadIdx.x, row = blockIdx.x;
  if (column >= width) return;
  static_cast<T*>(p.qkv)[row * width + column] = static_cast<const T*>(
      p.made)[row * (width + queries) + with_gates(column, queries, p.head_dim)];
}

template <class T>
__global__ __launch_bounds__(kThreads) void gate_outputs_kernel(OutGateParams p) {
  pdl_trigger();
  pdl_wait();
  const int64_t queries = p.num_heads * p.head_dim;
  const int64_t column = int64_t{blockIdx.y} * kThreads + threadIdx.x, row = blockIdx.x;
  const int64_t from = p.rows == nullptr ? row : p.rows[row];
  if (column >= queries || from < 0 || from >= p.num_tokens) return;
  const float gate = Traits<T>::to_float(
      static_cast<const T*>(p.made)[from * (2 * queries + p.rest) +
                                    with_gates(column, queries, p.head_dim) + p.head_dim]);
  T* const at = static_cast<T*>(p.mixed) + row * queries + column;
  *at = Traits<T>::from_float(Traits<T>::to_float(*at) / (1.f + __expf(-gate)));
}

}  // namespace

Status drop_gates(const OutGateParams& p, const Launch& launch_on) {
  const int64_t width = p.num_heads * p.head_dim + p.rest;
  const LaunchConfig config(launch_on, grid_of(p.num_tokens, ceil_div(width, kThreads)), kThreads);
  return dispatch_dtype(p.dtype, "drop_gates", [&](auto* t) {
    return launch(drop_gates_kernel<std::remove_pointer_t<decltype(t)>>, config, "drop_gates", p);
  });
}

Status gate_outputs(const OutGateParams& p, const Launch& launch_on) {
  if (p.num_rows == 0) return {};
  const int64_t width = p.num_heads * p.head_dim;
  const LaunchConfig config(launch_on, grid_of(p.num_rows, ceil_div(width, kThreads)), kThreads);
  return dispatch_dtype(p.dtype, "gate_outputs", [&](auto* t) {
    return launch(gate_outputs_kernel<std::remove_pointer_t<decltype(t)>>, config, "gate_outputs",
                  p);
  });
}

}  // namespace regatta::cuda
