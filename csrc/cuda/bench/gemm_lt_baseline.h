// cuBLASLt as the yardstick of bench_gemm.cu: y[M,N] = x[M,K] w[N,K]^T, bf16, fp32 accumulation.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

// Picks (by timing, among the heuristic's first eight) and caches an algorithm per shape; then
// runs. Returns false when built without cuBLASLt or when a call fails.
bool lt_gemm(const void* x, const void* w, void* y, int64_t m, int64_t n, int64_t k,
             cudaStream_t stream);
