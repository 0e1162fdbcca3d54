// The kernel of tests/gpu/ops.
#include "axpb.h"

#include "runtime.h"

void launch_axpb(const float* x, float* y, float a, float b, int64_t n, CUstream_st* stream) {
  fake_cuda_queue(stream, [=] {
    for (int64_t i = 0; i < n; ++i) y[i] = a * x[i] + b;
  });
}
