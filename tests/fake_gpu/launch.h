// What the kernels here share: how they are launched, and values as float32.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/dispatch.h"
#include "cuda/host.h"
#include "regatta/cuda_ops.h"
#include "runtime.h"

namespace regatta::cuda {

// A kernel that fails calls check(). The error shows in this call, or where somebody waits for the
// stream.
template <class Kernel>
Status queue(CUstream_st* stream, const char* name, Kernel kernel) {
  fake_cuda_queue(stream, kernel);
  return cuda_status(cudaGetLastError(), name);
}

inline bool check(const Status& status) {
  if (!status.ok()) fake_cuda_fail(status.message());
  return status.ok();
}

using Floats = std::vector<float>;

// `count` values from the `first` on.
inline Floats read(const void* from, DType dtype, int64_t count, int64_t first = 0) {
  Floats values(count);
  check(cpu::with_dtype(dtype, [&](auto like) {
    const auto* const typed = static_cast<const decltype(like)*>(from) + first;
    for (int64_t i = 0; i < count; ++i) values[i] = to_float(typed[i]);
    return Status();
  }));
  return values;
}

inline void write(const Floats& values, DType dtype, void* to) {
  check(cpu::with_dtype(dtype, [&](auto like) {
    for (size_t i = 0; i < values.size(); ++i) {
      from_float(values[i], static_cast<decltype(like)*>(to) + i);
    }
    return Status();
  }));
}

// Called in a kernel.
inline void gather(const GatherRowsParams& p) {
  const int64_t bytes = p.row_size * dtype_size(p.dtype);
  for (int64_t i = 0; i < p.num_rows; ++i) {
    const int64_t id = p.row_ids[i];
    char* const out = static_cast<char*>(p.out) + i * bytes;
    if (id < 0 || id >= p.num_source_rows) {
      std::memset(out, 0, bytes);
    } else {
      std::memcpy(out, static_cast<const char*>(p.source) + id * bytes, bytes);
    }
  }
}

}  // namespace regatta::cuda
