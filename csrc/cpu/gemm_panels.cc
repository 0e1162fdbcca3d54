// How products are shared out over a team: which thread takes which panels, of which rows, in which
// order. What a job of it costs is in the schemes' kernels and in what the caller does to a tile.
#include <algorithm>

#include "gemm.h"
#include "gemm_groups.h"

namespace regatta::cpu {
namespace {

// Products of some rows with some panels of a weight, job after job on one thread, each tile of
// them stored. Each panel brings the one `halves` further on, unless that is 0.
class PanelJobs {
 public:
  // Takes scratch that lives as long as the caller's scope.
  PanelJobs(const Gemm& gemm, const PackedRows& rows, int64_t halves, int64_t owner,
            Scratch& scratch, TileFn store)
      : run_(rows.kernels->run), blocks_(rows), halves_(halves), owner_(owner), store_(store) {
    job_.rows = &rows;
    job_.weight = &gemm.weight;
    job_.scratch = &scratch;
    job_.out = scratch.take<float>(2 * blocks_.tiles * rows.tile_rows * kPanel);
  }

  // Few rows, panels [begin, end): walked from the start and from the middle at once, two streams
  // that both go on into the next panel, so that what is prefetched beyond the end of one is not
  // lost.
  //
  //   | p0 p1 p2 p3 | p4 p5 p6 p7 |     jobs (p0, p4) (p1, p5) (p2, p6) (p3, p7)
  void two_streams(int64_t begin, int64_t end) {
    const int64_t distance = (end - begin + 1) / 2;
    for (int64_t panel = begin; panel < begin + distance; ++panel) {
      run(0, panel, panel + distance < end ? panel + distance : -1);
    }
  }

  // Units [begin, end), of which each panel has `num_blocks`: its products with the blocks of rows
  // from `first_block` on, one after the other.
  void blocks(int64_t begin, int64_t end, int64_t first_block, int64_t num_blocks) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t panel = unit / num_blocks;
      run(first_block + unit % num_blocks, panel, halves_ ? panel + halves_ : -1);
    }
  }

 private:
  void run(int64_t block, int64_t panel, int64_t other) {
    job_.tile_begin = block * blocks_.tiles;
    job_.tile_end = std::min(job_.tile_begin + blocks_.tiles, job_.rows->num_tiles());
    job_.panels[0] = panel;
    job_.panels[1] = other;
    job_.num_panels = other < 0 ? 1 : 2;
    run_(job_);
    const int64_t num_rows = job_.num_rows(), out_features = job_.weight->out_features;
    for (int i = 0; i < (halves_ ? 1 : job_.num_panels); ++i) {
      const int64_t column = job_.panels[i] * kPanel;
      float* products = job_.out + i * num_rows * kPanel;
      store_({job_.first_row(), num_rows, column, std::min(kPanel, out_features - column), products,
              halves_ ? products + num_rows * kPanel : nullptr, owner_});
    }
  }

  void (*run_)(const PanelJob& job);
  PanelJob job_;
  RowBlocks blocks_;
  int64_t halves_, owner_;
  TileFn store_;
};

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

// Few rows: two streams in a thread's run of panels. Runs are of pairs: a panel by itself takes
// longer (3 % of a 0.5B model's weights). Many rows: one block of rows after the other passes over
// a panel, then over the next; first for as many rows as surely stay in L3, then for the others.
void gemm(Team& team, const Gemm& gemm, const PackedRows& rows, TileFn store, bool in_halves) {
  const int64_t halves = in_halves ? gemm.weight.num_panels() / 2 : 0;
  const int64_t num_panels = in_halves ? halves : gemm.weight.num_panels();
  const bool few_rows = rows.num_rows <= gemm.kernels->max_rows_of_two;
  const RowBlocks blocks(rows);
  Scratch::Scope scope(team.scratch());
  PanelJobs jobs(gemm, rows, halves, 0, team.scratch(), store);
  if (blocks.count > 1 && num_panels < 8 * team.num_threads()) {  // too few panels to balance
    team.for_guided(num_panels * blocks.count,
                    [&](int64_t begin, int64_t end) { jobs.blocks(begin, end, 0, blocks.count); });
    return;
  }
  if (few_rows && !in_halves) {
    team.for_guided((num_panels + 1) / 2, [&](int64_t first, int64_t last) {
      jobs.two_streams(2 * first, std::min(2 * last, num_panels));
    });
    return;
  }
  for (int64_t first = 0; first < blocks.count; first += blocks.cached) {
    const int64_t count = std::min(blocks.cached, blocks.count - first);
    team.for_guided(num_panels, [&](int64_t begin, int64_t end) {
      jobs.blocks(begin * count, end * count, first, count);
    });
  }
}

void gemm_groups(Team& team, const GroupPlan& plan, TileFn store) {
  const auto run = [&](const GemmSegment& segment, int64_t begin, int64_t end) {
    const GemmGroup& group = plan.groups[segment.group];
    Scratch::Scope scope(team.scratch());
    PanelJobs jobs(*group.gemm, *group.rows, group.halves, segment.group, team.scratch(), store);
    const int64_t first = group.first_panel;
    if (segment.two_streams) {
      jobs.two_streams(first + 2 * begin, first + std::min(2 * end, group.num_panels));
    } else {
      const int64_t offset = first * segment.num_blocks;
      jobs.blocks(offset + begin, offset + end, segment.first_block, segment.num_blocks);
    }
  };
  int64_t at = 0;  // a thread's pieces come in order
  team.for_guided(plan.cost, [&](int64_t begin, int64_t end) {
    while (at < plan.num_segments - 1 && plan.segments[at + 1].begin <= begin) ++at;
    for (int64_t i = at; i < plan.num_segments && plan.segments[i].begin < end; ++i) {
      const GemmSegment& segment = plan.segments[i];
      const int64_t first = segment.unit_at(begin), last = segment.unit_at(end);
      if (first < last) run(segment, first, last);
    }
  });
}

void head_products(Team& team, const Gemm* gemms, int64_t first, int64_t num_heads,
                   RowsOfFn rows_of, TileFn store) {
  const PackedRows& alike = rows_of(first);
  const bool two_streams = alike.num_rows <= gemms[first].kernels->max_rows_of_two;
  const int64_t num_blocks = RowBlocks(alike).count;
  const int64_t num_panels = gemms[first].weight.num_panels();
  team.for_each(num_heads * num_blocks, [&](int64_t i) {
    const int64_t head = first + i / num_blocks;
    Scratch::Scope scope(team.scratch());
    PanelJobs jobs(gemms[head], rows_of(head), 0, head, team.scratch(), store);
    if (two_streams) {
      jobs.two_streams(0, num_panels);
    } else {
      jobs.blocks(0, num_panels, i % num_blocks, 1);
    }
  });
}

}  // namespace regatta::cpu
