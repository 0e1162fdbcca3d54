// How a kernel of ordinary C++ is launched.
#pragma once

#include <string>
#include <type_traits>

#include "cuda/host.h"
#include "regatta/types.h"
#include "runtime.h"

namespace regatta::cuda {

// kernel() returns a Status; an error shows in this call, or where somebody waits for the stream.
template <class Kernel>
Status queue(CUstream_st* stream, const char* name, Kernel kernel) {
  fake_cuda_queue(stream, [kernel] {
    const Status status = kernel();
    if (!status.ok()) fake_cuda_fail(status.message());
  });
  return cuda_status(cudaGetLastError(), name);
}

// Calls f with a null pointer of the element type.
template <class F>
Status dispatch(DType dtype, const char* name, F&& f) {
  if (dtype == DType::kFloat32) return f(static_cast<float*>(nullptr));
  if (dtype == DType::kBFloat16) return f(static_cast<bf16*>(nullptr));
  if (dtype == DType::kFloat16) return f(static_cast<fp16*>(nullptr));
  return Status::error(std::string(name) + ": the fake GPU has no " + dtype_name(dtype));
}

template <class Pointer>
using ElementOf = std::remove_pointer_t<Pointer>;

}  // namespace regatta::cuda
