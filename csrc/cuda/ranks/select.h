// How ranks on GPUs sum: a function of bytes, ranks and the GPU alone.
//
// No CUDA and no device calls: any C++ compiler takes this file and select.cu, and
// tests/csrc/test_select_kernels.py asks them on a CPU.
#pragma once

#include <cstdint>

namespace regatta::cuda {

// The bits of a sum are the same by both, so that the switch between them changes no text.
enum class AllReduce : uint8_t {
  kOneShot,  // each rank gets all parts: one hop
  kTwoShot,  // each rank sums a slice and gives it to all: two hops, and fewer bytes
};

// bytes: of a part. architecture: compute capability * 10.
AllReduce select_all_reduce(int64_t bytes, int num_ranks, int architecture);

// Whether the norm's launch sums its rows over ranks itself, a block a row.
bool sums_in_norm(int64_t num_rows, int64_t bytes);

}  // namespace regatta::cuda
