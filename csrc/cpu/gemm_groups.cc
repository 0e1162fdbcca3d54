#include "gemm_groups.h"

#include <algorithm>

namespace regatta::cpu {
namespace {

// Reading a panel from memory takes about as long as multiplying so many rows by it.
constexpr int64_t kRowsOfReading = 8;

int64_t num_segments(const GemmGroup& group) {
  const RowBlocks blocks(*group.rows);
  return (blocks.count + blocks.cached - 1) / blocks.cached;
}

GemmSegment segment_of(const GemmGroup& group, int64_t first_block) {
  const PackedRows& rows = *group.rows;
  const RowBlocks blocks(rows);
  GemmSegment segment = {};
  segment.first_block = first_block;
  segment.num_blocks = std::min(blocks.cached, blocks.count - first_block);
  segment.two_streams = !group.halves && rows.num_rows <= group.gemm->kernels->max_rows_of_two;
  const int64_t block_rows = std::min(rows.num_rows, blocks.tiles * rows.tile_rows);
  segment.num_units = group.num_panels * segment.num_blocks;
  segment.unit_cost = rows.num_blocks() * (kRowsOfReading + block_rows);
  if (group.halves) segment.unit_cost *= 2;
  if (segment.two_streams) {
    segment.num_units = (group.num_panels + 1) / 2;
    segment.unit_cost *= 2;
  }
  return segment;
}

}  // namespace

GroupPlan plan_groups(const GemmGroup* groups, int64_t num_groups, Scratch& scratch) {
  int64_t count = 0;
  for (int64_t g = 0; g < num_groups; ++g) count += num_segments(groups[g]);
  GemmSegment* segments = scratch.take<GemmSegment>(count);
  GroupPlan plan = {groups, segments, count, 0};
  for (int64_t g = 0; g < num_groups; ++g) {
    const RowBlocks blocks(*groups[g].rows);
    for (int64_t first = 0; first < blocks.count; first += blocks.cached, ++segments) {
      *segments = segment_of(groups[g], first);
      segments->group = g;
      segments->begin = plan.cost;
      plan.cost += segments->num_units * segments->unit_cost;
    }
  }
  return plan;
}

}  // namespace regatta::cpu
