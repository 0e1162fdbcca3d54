// Copies between tensors of any strides.
#pragma once

#include <cstdint>

struct CUstream_st;  // cudaStream_t without the CUDA headers

namespace regatta::device {

struct StridedCopy {
  static constexpr int kMaxRank = 9;  // Paddle's own
  const void* from = nullptr;
  void* to = nullptr;
  int rank = 0;
  int element_size = 0;                 // bytes: 1, 2, 4, 8 or 16
  int64_t shape[kMaxRank] = {};         // of both
  int64_t from_strides[kMaxRank] = {};  // in elements
  int64_t to_strides[kMaxRank] = {};
};

// to[i, j, ...] = from[i, j, ...]; null when queued, else why not.
const char* strided_copy(const StridedCopy& copy, CUstream_st* stream);

}  // namespace regatta::device
