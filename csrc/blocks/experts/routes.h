// Which experts a row goes to, and which rows an expert gets (predict/nn/blocks.py's Router).
// Independent of the ISA.
#pragma once

#include <cstdint>

#include "blocks/experts/block.h"
#include "cpu/thread_pool.h"

namespace regatta::cpu {

// The top_k experts of a row and their weights, the best first and of equal ones the lower.
// scores: [num_experts]; correction: as many, or null. With a NaN among the scores experts 0, 1,
// ... with weights of NaN: the row is lost, and with it nothing else.
void choose_experts(const Router& router, const float* scores, const float* correction,
                    int32_t* ids, float* weights);

// Rows in the order of the experts that they go to; those of one expert in their own order.
struct RowsByExpert {
  int64_t num_used = 0;  // experts that have rows
  int64_t num_places = 0;
  const int32_t* used = nullptr;    // [num_used] ascending
  const int64_t* begins = nullptr;  // [num_used + 1] of their places
  const int32_t* rows = nullptr;    // [places] which row stands there
  const int32_t* owners = nullptr;  // [places] whose place it is: an index of `used`
  // [num_rows, num_chosen] where a row stands for each choice, -1: nowhere
  const int32_t* places = nullptr;
};

// ids: [num_rows, num_chosen], below num_experts; -1: of no expert here. Lives in `scratch`.
RowsByExpert rows_by_expert(const int32_t* ids, int64_t num_rows, int64_t num_chosen,
                            int64_t num_experts, Scratch& scratch);

}  // namespace regatta::cpu
