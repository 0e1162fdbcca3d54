// NCCL, where GPUs do not reach each other's memory, or links are slow. The library is opened at
// run time (the PyPI package nvidia-nccl-cu13): nothing here is linked with it. Host code.
#pragma once

#include "regatta/types.h"

struct CUstream_st;

namespace regatta::cuda {

// Whether this process is a rank of one of its communicators.
bool has_nccl();

// The sum of all ranks' `in` [count]; out may be in. The order in which parts are added is NCCL's.
Status nccl_sum(const void* in, void* out, int64_t count, DType dtype, CUstream_st* stream);

// parts [ranks, count]: all ranks' `part` [count], in their order.
Status nccl_gather(const float* part, float* parts, int64_t count, CUstream_st* stream);

}  // namespace regatta::cuda
