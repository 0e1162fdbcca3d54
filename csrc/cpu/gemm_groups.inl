// See gemm_groups.h. Behind gemm.inl.
namespace regatta::cpu::REGATTA_ISA {

// store(group, row, num_rows, column, num_columns, tile, second): as gemm()'s, row and column of
// that group; second: the tile of the panel `halves` further on, or null. No barrier inside.
template <class Store>
inline void gemm_groups(Team& team, const GroupPlan& plan, Store&& store) {
  const auto run = [&](const GemmSegment& segment, int64_t begin, int64_t end) {
    const GemmGroup& group = plan.groups[segment.group];
    const Weight& weight = group.gemm->weight;
    const auto each = [&](const PanelJob& job) {
      group.gemm->kernels->run(job);
      const int64_t num_rows = job.num_rows(), tile_floats = num_rows * kPanel;
      const int num_tiles = group.halves ? 1 : job.num_panels;
      for (int i = 0; i < num_tiles; ++i) {
        const int64_t column = job.panels[i] * kPanel;
        const float* tile = job.out + i * tile_floats;
        store(segment.group, job.first_row(), num_rows, column,
              std::min(kPanel, weight.out_features - column), tile,
              static_cast<const float*>(group.halves ? tile + tile_floats : nullptr));
      }
    };
    Scratch::Scope scope(team.scratch());
    internal::PanelJobs jobs(*group.rows, weight, group.halves, team.scratch());
    const int64_t first = group.first_panel;
    if (segment.two_streams) {
      jobs.two_streams(first + 2 * begin, first + std::min(2 * end, group.num_panels), each);
    } else {
      const int64_t offset = first * segment.num_blocks;
      jobs.blocks(offset + begin, offset + end, segment.first_block, segment.num_blocks, each);
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

}  // namespace regatta::cpu::REGATTA_ISA
