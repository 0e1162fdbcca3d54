// cuBLASLt as gemm_blas.cu and gemm_blas_codes_sm90.cu use it: its functions, a product's
// descriptors, and the choice of an algorithm.
#pragma once

#include "cuda/common.cuh"
#include "regatta/gemm.h"

namespace regatta::cuda {

constexpr int64_t kBlasWorkspaceBytes = int64_t{32} << 20;  // at the front of scratch

// out[m, i] = silu(both[m, i]) * both[m, width + i], rounded once.
Status fold_gate(const void* both, void* out, DType dtype, int64_t num_rows, int64_t width,
                 CUstream_st* stream);

}  // namespace regatta::cuda

#if __has_include(<cublasLt.h>)
#include <cublasLt.h>
#define REGATTA_CUBLASLT 1

#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

namespace regatta::cuda {

// cuBLASLt's functions, from the library when there is one: half a gigabyte that decoding never
// needs. In the folder REGATTA_CUBLASLT (predict/device/devices.py), or where the dynamic linker
// looks.
struct Lt {
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtDestroy) destroy = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;
  decltype(&cublasLtMatmulDescCreate) matmulDescCreate = nullptr;
  decltype(&cublasLtMatmulDescDestroy) matmulDescDestroy = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) matmulDescSetAttribute = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) matrixLayoutCreate = nullptr;
  decltype(&cublasLtMatrixLayoutDestroy) matrixLayoutDestroy = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) matmulPreferenceCreate = nullptr;
  decltype(&cublasLtMatmulPreferenceDestroy) matmulPreferenceDestroy = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) matmulPreferenceSetAttribute = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) matmulAlgoGetHeuristic = nullptr;
  decltype(&cublasLtGetStatusString) getStatusString = nullptr;
  std::string error;

  Lt();
};
const Lt& lt();

Status blas_status(cublasStatus_t status, const char* what);

// What a choice depends on: operands, scale_rows, rows, out_features, in_features, dtype,
// out_dtype, gated, bias, residual.
using BlasKey =
    std::tuple<GemmOperands, int64_t, int64_t, int64_t, int64_t, DType, DType, bool, bool, bool>;
BlasKey blas_key(const GemmParams& p, int64_t rows);

struct Blas {
  cublasLtHandle_t handle = nullptr;
  std::mutex mutex;  // of all below
  std::map<BlasKey, cublasLtMatmulAlgo_t> algorithms;
};

// What cuBLASLt is told about a product: out = x weight^T, + bias, + residual; not its gate.
struct Matmul {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t weight = nullptr, x = nullptr, out = nullptr;
  Matmul(const GemmParams& p, DType out_dtype);
  ~Matmul();
  Matmul(const Matmul&) = delete;
};

// Whether `stream` may be waited for, hence timed on.
bool can_time(cudaStream_t stream);

// Milliseconds of one run, of `kTimedRuns` behind a first; 1e30 when run() fails. Waits for them.
template <class Run>
float timed_ms(cudaStream_t stream, const Run& run) {
  constexpr int kTimedRuns = 2;
  if (!run()) return 1e30f;
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  cudaEventRecord(begin, stream);
  bool ok = true;
  for (int i = 0; i < kTimedRuns; ++i) ok = run() && ok;
  cudaEventRecord(end, stream);
  float ms = 1e30f;
  if (cudaEventSynchronize(end) != cudaSuccess || !ok ||
      cudaEventElapsedTime(&ms, begin, end) != cudaSuccess) {
    ms = 1e30f;
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return ms / kTimedRuns;
}

// out = x weight^T, + bias, + residual. Of `key` not seen yet, the fastest of the heuristic's first
// few algorithms, timed with outputs in `trial`, is kept; the heuristic's first where `trial` is
// null or the stream is recorded, kept too if `keep`. workspace: kBlasWorkspaceBytes.
Status blas_product(Blas* blas, const BlasKey& key, const GemmParams& p, const void* x, void* out,
                    DType out_dtype, void* trial, bool keep, void* workspace, cudaStream_t stream);

}  // namespace regatta::cuda
#endif
