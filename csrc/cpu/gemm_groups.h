// Several products that share one loop of a team, each of rows of its own and a weight of its own.
// Independent of the ISA.
//
// A loop each would be a start and an end each, and a thread that waits: for one row of six experts
// there are few panels in any, for many rows one expert may have most. What is shared out is work:
// the pieces of for_guided() are cut by what panels cost, whichever product they belong to.
#pragma once

#include <cstdint>

#include "gemm.h"

namespace regatta::cpu {

struct GemmGroup {
  const Gemm* gemm = nullptr;
  const PackedRows* rows = nullptr;  // at least one
  int64_t first_panel = 0, num_panels = 0;
  int64_t halves = 0;  // each panel brings the one so much further on; 0: it is alone
};

// Panels of one group times blocks of its rows, in units that cost the same: the products of a
// panel with a block; of few rows, where panels are read two at a time, those of two panels.
struct GemmSegment {
  int64_t group;
  int64_t first_block, num_blocks;
  bool two_streams;
  int64_t num_units;
  int64_t unit_cost;
  int64_t begin;  // cost of all segments before it

  // The first unit that begins at `cost` or behind it.
  int64_t unit_at(int64_t cost) const {
    const int64_t unit = cost <= begin ? 0 : (cost - begin + unit_cost - 1) / unit_cost;
    return std::min(unit, num_units);
  }
};

struct GroupPlan {
  const GemmGroup* groups = nullptr;
  const GemmSegment* segments = nullptr;
  int64_t num_segments = 0;
  int64_t cost = 0;  // of all segments
};

// The plan lives in `scratch` and refers to `groups`.
GroupPlan plan_groups(const GemmGroup* groups, int64_t num_groups, Scratch& scratch);

// store(tile): as gemm()'s, row and column of the group `tile.owner`. No barrier inside.
void gemm_groups(Team& team, const GroupPlan& plan, TileFn store);

// The products of heads [first, first + num_heads), all alike, with rows of their own, packed and
// complete. store(tile): as gemm()'s, of the head `tile.owner`. No barrier inside.
using RowsOfFn = FunctionRef<const PackedRows&(int64_t head)>;
void head_products(Team& team, const Gemm* gemms, int64_t first, int64_t num_heads,
                   RowsOfFn rows_of, TileFn store);

}  // namespace regatta::cpu
