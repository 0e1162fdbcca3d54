// What a kernel of ordinary C++ needs of the runtime beside it (runtime.cc).
#pragma once

#include <functional>
#include <string>

struct CUstream_st;  // cudaStream_t without the CUDA headers

#define FAKE_CUDA_EXPORT __attribute__((visibility("default")))

// Queues `work` as a kernel is queued: it runs when the stream gets there or, recorded, with each
// launch of the graph.
FAKE_CUDA_EXPORT void fake_cuda_queue(CUstream_st* stream, std::function<void()> work);

// Called by work that failed: the next call of the runtime returns cudaErrorLaunchFailure, and
// cudaGetErrorString() then is `message`.
FAKE_CUDA_EXPORT void fake_cuda_fail(const std::string& message);
