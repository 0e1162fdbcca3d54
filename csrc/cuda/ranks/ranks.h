// This process's GPU as one of the ranks of a model.
#pragma once

#include "cuda/ranks/exchange.cuh"
#include "cuda/ranks/select.h"

namespace regatta::cuda {

// Null where a model has one rank, or NCCL alone takes parts from one to the other. Kernels that
// take it run in the same order, with the same sizes and grids, on all ranks.
const Exchange* current_exchange();

// Where NCCL alone takes parts from one to the other: room for all ranks' parts, and how many they
// are. Null and 1 elsewhere.
struct NcclRoom {
  float* words = nullptr;
  int64_t num_words = 0;
  int size = 1;
};
NcclRoom nccl_room();

// A sum of parts of so many bytes, as the tables know it.
SumProblem sum_problem(int64_t bytes);

}  // namespace regatta::cuda
