// How ranks on GPUs sum: a function of bytes, ranks, the GPU and its links alone.
//
// No CUDA and no device calls: any C++ compiler takes this file and select.cu, and
// tests/csrc/test_select_kernels.py asks them on a CPU.
#pragma once

#include <cstdint>

namespace regatta::cuda {

// The bits of a sum are the same by the first two, so that the switch between them changes no text.
enum class AllReduce : uint8_t {
  kOneShot,  // each rank gets all parts: one hop
  kTwoShot,  // each rank sums a slice and gives it to all: two hops, and fewer bytes
  kNccl,     // NCCL's, which adds in an order of its own
};

// How the GPUs of ranks reach each other's memory, the slowest two of them.
enum class Links : uint8_t { kNone, kPcie, kNvlink };

struct SumProblem {
  int64_t bytes = 8192;  // of a part
  int num_ranks = 2;
  int architecture = 90;  // compute capability * 10
  Links links = Links::kNvlink;
  bool has_nccl = false;  // never where sums may not depend on what is beside them
};

AllReduce select_all_reduce(const SumProblem& problem);

// Whether there are sizes that NCCL is the choice for.
bool wants_nccl(int num_ranks, Links links);

// Whether the norm's launch sums its rows over ranks itself, a block a row.
bool sums_in_norm(int64_t num_rows, const SumProblem& problem);

}  // namespace regatta::cuda
