// Products of activations with a weight as checkpoints store it, for CUDA devices. No framework.
//
// M rows (tokens), K in_features, N out_features, I = N / 2 when gated.
#pragma once

#include <cstdint>

#include "regatta/types.h"

struct CUstream_st;  // cudaStream_t without the CUDA headers

namespace regatta {

// Rows whose sums of squares one partial covers: GemmParams::sumsq_out has ceil(N / 64) per row.
constexpr int64_t kSumsqColumns = 64;

// out = epilogue(scale[m] * (x weight^T)[m, n] + bias[n]), all in float, rounded once at the end.
//   scale[m] = rsqrt(sum(sumsq[m, :]) / K + epsilon), or 1 without sumsq. That is an RMS norm of x
//   when the norm's weight has been multiplied into the columns of `weight` (fold_norm_weight).
//   epilogue: + residual[m, n]; or, gated, silu(column n) * column (I + n) for n < I.
struct GemmParams {
  const void* x = nullptr;         // [M, K]
  const void* weight = nullptr;    // [N, K]; gated: gate rows, then up rows
  const void* bias = nullptr;      // [N]
  const void* residual = nullptr;  // [M, N]; may be out
  const float* sumsq = nullptr;    // [M, num_sumsq]: partial sums of x^2
  void* out = nullptr;             // [M, N]; gated: [M, I]
  float* sumsq_out = nullptr;      // [M, ceil(N / 64)]: of out's columns 64i .. 64i+63, as rounded
  int64_t num_rows = 0;            // M
  int64_t in_features = 0;         // K
  int64_t out_features = 0;        // N
  int64_t num_sumsq = 0;
  float epsilon = 0.f;
  DType dtype = DType::kBFloat16;      // of x, weight, bias, residual
  DType out_dtype = DType::kBFloat16;  // dtype, or float32
  bool gated = false;
  // The launch may overlap the end of the kernel ahead of it on the stream (common.cuh, PDL).
  bool dependent_launch = true;
};

namespace cuda {

// Rows up to which the sm_90a kernel streams weights, in one block per multiprocessor.
constexpr int64_t kMaxChainRows = 128;
constexpr int kMaxChain = 4;

// What a launch of the sm_90a kernel is made of. A pure function of the problem chooses it.
struct GemmPlan {
  int tokens = 8;      // rows of x, rounded up: 8, 16, 32, 64, 128
  int features = 128;  // rows of weight per tile: 128 or 256
  int stages = 0;      // of 64 values of k in flight; 0: as many as fit
  // Per product: blocks that may share a tile's k. 1: whole tiles; 0: any number, so that all blocks
  // get the same number of stages.
  int split[kMaxChain] = {0, 0, 0, 0};
};
GemmPlan choose_gemm_plan(const GemmParams* gemms, int count);

// Bytes of the workspace that gemm_chain_sm90 needs, zeroed once by its owner. One workspace serves
// all launches of one stream.
int64_t gemm_workspace_bytes(int num_sms);

// Why this kernel cannot do it, or null. Does not look at the device.
const char* gemm_chain_sm90_refuses(const GemmParams* gemms, int count);

// Runs 1..kMaxChain products of the same number of rows, each after the one before it, in one
// launch: what one writes, the next may read. All multiprocessors must be free of kernels that wait
// for this one (stream order sees to that).
Status gemm_chain_sm90(const GemmParams* gemms, int count, void* workspace, CUstream_st* stream);
Status gemm_chain_sm90(const GemmParams* gemms, int count, const GemmPlan& plan, void* workspace,
                       CUstream_st* stream);

}  // namespace cuda
}  // namespace regatta
