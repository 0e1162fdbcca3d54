// What: copies between tensors of any strides (a transposed or sliced view made contiguous, or a
//   tensor written into such a view).
// Layout: row-major shape of up to 9 dims; strides in elements, of either side.
// Architectures: all.
// Algorithm: one thread per element, its coordinates by division, the last dim fastest.
// Bound: it is for weights and odd operators, not for the decode path; the side with unit stride
//   in its last dim is coalesced, and divisions cost about as much as the memory.
#include <cuda_runtime.h>

#include "strided_copy.h"

namespace regatta::device {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void strided_copy_kernel(const __grid_constant__ StridedCopy copy, int64_t count) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    int64_t rest = i, from = 0, to = 0;
    for (int dim = copy.rank - 1; dim >= 0; --dim) {
      const int64_t next = rest / copy.shape[dim];
      const int64_t coordinate = rest - next * copy.shape[dim];
      from += coordinate * copy.from_strides[dim];
      to += coordinate * copy.to_strides[dim];
      rest = next;
    }
    static_cast<T*>(copy.to)[to] = static_cast<const T*>(copy.from)[from];
  }
}

template <class T>
const char* run(const StridedCopy& copy, int64_t count, cudaStream_t stream) {
  constexpr int64_t kMaxBlocks = 1 << 16;
  const int64_t blocks = (count + kThreads - 1) / kThreads;
  strided_copy_kernel<T>
      <<<static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks), kThreads, 0, stream>>>(
          copy, count);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace

const char* strided_copy(const StridedCopy& copy, CUstream_st* stream) {
  int64_t count = 1;
  for (int dim = 0; dim < copy.rank; ++dim) count *= copy.shape[dim];
  if (count == 0) return nullptr;
  switch (copy.element_size) {
    case 1:
      return run<uint8_t>(copy, count, stream);
    case 2:
      return run<uint16_t>(copy, count, stream);
    case 4:
      return run<uint32_t>(copy, count, stream);
    case 8:
      return run<uint2>(copy, count, stream);
    case 16:
      return run<uint4>(copy, count, stream);
    default:
      return "element size is not 1, 2, 4, 8 or 16 bytes";
  }
}

}  // namespace regatta::device
