// Codes times rows of bfloat16 beside tiles, in the namespace of avx512_bf16: codes of 4 and 8 bits
// are whole bfloat16 numbers, and a group's sum is a tile's (tiles.inl) before it gets the group's
// scale, in any number of rows.
//
// One row goes through vectors. Few rows wait for the codes: 32 values of k become bfloat16 while
// tiles multiply those before. Many rows pass over a slab of 8 such steps, 16 KiB that stay in L1.
#if REGATTA_HAS_TILES
namespace regatta::cpu::REGATTA_ISA {
namespace codes {

// 8 values of k of a panel as columns for tiles; asks for what lies so many bytes ahead, unless 0.
template <CodeKind kKind, bool kZeros>
REGATTA_INLINE void stage_step(const uint8_t* codes, char* out, int64_t ahead) {
  using P = Pairs<kKind, kZeros>;
#pragma GCC unroll 4
  for (int unit = 0; unit < kStepValues / P::kUnitValues; ++unit, out += tiles::kPanelStride) {
    if (ahead && unit * kLineBytes < step_bytes(kKind)) prefetch(codes + ahead + unit * kLineBytes);
    for (int v = 0; v < kVectors; ++v) {
      _mm512_store_si512(out + v * 64, (__m512i)P::columns(codes, v, unit).v);
    }
  }
}

// A slab's codes that become columns, some at each of so many steps that multiply others.
template <CodeKind kKind, bool kZeros>
struct Staging {
  const uint8_t* codes = nullptr;
  char* out = nullptr;
  int64_t total = 0, left = 0, steps = 1, credit = 0;

  REGATTA_INLINE void one() {
    stage_step<kKind, kZeros>(codes, out, 0);
    codes += step_bytes(kKind);
    out += tiles::kStepBytes / kSteps;
    --left;
  }
  REGATTA_INLINE void some() {
    for (credit += total; credit >= steps && left > 0; credit -= steps) one();
  }
  void rest() {
    while (left > 0) one();
  }
};

// One or two tiles of rows, whose rows follow each other in `out`.
struct RowTiles {
  const char* lines[2];
  const BlockScale* sums[2];  // with zero points: value_sum of each block
  int64_t num_rows[2];
  float* out;  // [rows][kPanel]
};

// Sums of blocks [begin, end), a group, that are still to be scaled and added to rows' products.
struct GroupSums {
  RowTiles rows = {};
  const float* sums = nullptr;    // [rows][kPanel]
  const float* scales = nullptr;  // of the group
  int64_t begin = 0, end = 0, tile_rows = 0, done = 0;

  int64_t num_rows() const { return rows.num_rows[0] + rows.num_rows[1]; }

  // out = (the first group ? 0 : out) + sums times scales, of rows up to `until`.
  template <bool kZeros>
  REGATTA_INLINE void add(int64_t until) {
    for (; done < until; ++done) {
      float value_sum = 0.0f;
      if constexpr (kZeros) {
        const int t = done >= rows.num_rows[0];
        const BlockScale* of_blocks = rows.sums[t] + done - t * rows.num_rows[0];
        for (int64_t i = begin; i < end; ++i) value_sum += of_blocks[i * tile_rows].value_sum;
      }
      for (int v = 0; v < kVectors; ++v) {
        float* to = rows.out + done * kPanel + v * kLanes;
        const Vec value = load(sums + done * kPanel + v * kLanes);
        Vec sum = fma(value, load(scales + v * kLanes), begin == 0 ? zero() : load(to));
        if (kZeros) sum = fnma(set1(value_sum), load(scales + kPanel + v * kLanes), sum);
        store(to, sum);
      }
    }
  }
};

// The tiles of rows from tile t of a job on, whose products with a panel are at `out`.
inline RowTiles row_tiles(const PanelJob& job, int64_t t, float* out) {
  const PackedRows& rows = *job.rows;
  RowTiles tile = {};
  for (int64_t index = job.tile_begin + t, j = 0; j < 2 && index < job.tile_end; ++j, ++index) {
    tile.lines[j] = rows.tile(index);
    tile.sums[j] = rows.block_scales(index);
    tile.num_rows[j] = std::min(rows.tile_rows, rows.num_rows - index * rows.tile_rows);
  }
  tile.out = out + t * rows.tile_rows * kPanel;
  return tile;
}

// A tile of rows and one or two panels, or two tiles and one panel at a time.
template <CodeKind kKind, bool kZeros, int kTiles, int kPanels>
void run_few(const PanelJob& job) {
  constexpr int64_t kRing = 4, kEarly = 2;  // steps; those that are staged ahead
  const PackedRows& rows = *job.rows;
  const CodePanels panels(job, bits_of(kKind), kZeros);
  const int64_t num_blocks = rows.num_blocks(), line_bytes = rows.tile_rows * kLineBytes;
  const int64_t group = panels.channel ? num_blocks : panels.group_blocks;
  constexpr int64_t kFetch = 2048;  // bytes ahead; more is slower
  alignas(64) char staged[kPanels][kRing][tiles::kStepBytes];
  alignas(64) float sums[2][tiles::kTileRows * kPanel];
  float* const more_sums = kPanels == 2 ? sums[1] : sums[0] + rows.tile_rows * kPanel;
  tiles::Shapes shapes;
  for (int i = 0; i < job.num_panels; i += kPanels) {
    RowTiles tile = row_tiles(job, 0, job.out + i * job.num_rows() * kPanel);
    tiles::set_shapes(shapes, tile.num_rows[0], tile.num_rows[1]);
    const uint8_t* codes[kPanels];
    for (int p = 0; p < kPanels; ++p) codes[p] = panels.codes(job.panels[i + p]);
    const auto stage_next = [&](int64_t block) REGATTA_LAMBDA_INLINE {
      for (int p = 0; p < kPanels; ++p) {
        for (int step = 0; step < kSteps; ++step, codes[p] += step_bytes(kKind)) {
          stage_step<kKind, kZeros>(
              codes[p], staged[p][block % kRing] + step * tiles::kStepBytes / kSteps, kFetch);
        }
      }
    };
    for (int64_t block = 0; block < std::min(kEarly, num_blocks); ++block) stage_next(block);
    const char *lines = tile.lines[0], *more = tile.lines[kTiles - 1];
    for (int64_t begin = 0, index = 0; begin < num_blocks; begin += group, ++index) {
      const int64_t end = std::min(begin + group, num_blocks);
      Ahead none = {nullptr, 0, false};
      tiles::zero_sums<kTiles * kPanels>();
      for (int64_t block = begin; block < end; ++block, lines += line_bytes, more += line_bytes) {
        if (block + kEarly < num_blocks) stage_next(block + kEarly);
        tiles::multiply<tiles::Factors::kPairs, kTiles, kPanels>(
            lines, more, line_bytes, staged[0][block % kRing], staged[kPanels - 1][block % kRing],
            1, none);
      }
      tiles::store_sums<kTiles * kPanels>(sums[0], more_sums);
      for (int p = 0; p < kPanels; ++p) {
        RowTiles of_panel = tile;
        of_panel.out += p * job.num_rows() * kPanel;
        GroupSums{of_panel, sums[p], panels.scales(job.panels[i + p]) + index * panels.group_floats,
                  begin,    end,     rows.tile_rows}
            .template add<kZeros>(of_panel.num_rows[0] + of_panel.num_rows[1]);
      }
    }
  }
}

// The sums of tiles for one row and one or two panels, by vectors: codes become numbers where they
// are multiplied, and are not written before.
template <CodeKind kKind, bool kZeros, int kPanels>
void run_row(const PanelJob& job) {
  constexpr int64_t kAheadBytes = 2048;
  constexpr int kPairs = static_cast<int>(kBlock) / 2, kStepPairs = kStepValues / 2;
  const PackedRows& rows = *job.rows;
  const CodePanels panels(job, bits_of(kKind), kZeros);
  const int64_t num_blocks = rows.num_blocks();
  const int64_t group = panels.channel ? num_blocks : panels.group_blocks;
  const int64_t num_groups = (num_blocks + group - 1) / group;
  Scratch::Scope scope(*job.scratch);
  float* const sums = job.scratch->take<float>(num_groups * kPanels * kPanel);
  const uint8_t* codes[kPanels];
  for (int p = 0; p < kPanels; ++p) codes[p] = panels.codes(job.panels[p]);
  const auto* row = reinterpret_cast<const bf16*>(rows.tile(job.tile_begin));
  {
    const FlushDenormals flush;
    for (int64_t index = 0; index < num_groups; ++index) {
      Vec total[kPanels][kVectors];
      for (auto& of_panel : total) {
        for (Vec& sum : of_panel) sum = zero();
      }
      const int64_t end = std::min((index + 1) * group, num_blocks);
      for (int64_t block = index * group; block < end; ++block) {
        alignas(64) float values[2][kPairs];
        Vec even[kPanels][kVectors], odd[kPanels][kVectors];
        load_2k(row, even[0][0], odd[0][0]);
        row += rows.tile_rows * kBlock;
        store(values[0], even[0][0]);
        store(values[1], odd[0][0]);
        __asm__("" : "+m"(values));  // else each is shuffled out of a register
        for (int p = 0; p < kPanels; ++p) {
          for (int v = 0; v < kVectors; ++v) even[p][v] = odd[p][v] = zero();
        }
#pragma GCC unroll 16
        for (int k = 0; k < kPairs; ++k) {
          const int step = k / kStepPairs, at = k % kStepPairs * 2;
          const Vec x = set1(values[0][k]), y = set1(values[1][k]);
#pragma GCC unroll 2
          for (int p = 0; p < kPanels; ++p) {
            const uint8_t* from = codes[p] + step * step_bytes(kKind);
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) {
              if (at % (kKind == CodeKind::kInt8 ? 4 : 8) == 0) {
                prefetch(from + (kKind == CodeKind::kInt8 ? at / 4 * 128 : 0) + v * kLineBytes +
                         kAheadBytes);
              }
              const Raw raw = lanes<kKind>(from, v, at);
              even[p][v] = fma(x, value<kKind, kZeros>(raw, first_bit<kKind>(at)), even[p][v]);
              odd[p][v] = fma(y, value<kKind, kZeros>(raw, first_bit<kKind>(at + 1)), odd[p][v]);
            }
          }
          __asm__ volatile("" ::: "memory");  // else prefetches gather
        }
        for (int p = 0; p < kPanels; ++p) {
          for (int v = 0; v < kVectors; ++v) total[p][v] = total[p][v] + (even[p][v] + odd[p][v]);
          codes[p] += kSteps * step_bytes(kKind);
        }
      }
      for (int p = 0; p < kPanels; ++p) {
        for (int v = 0; v < kVectors; ++v) {
          store(sums + (index * kPanels + p) * kPanel + v * kLanes, total[p][v]);
        }
      }
    }
  }
  for (int64_t index = 0; index < num_groups; ++index) {
    for (int p = 0; p < kPanels; ++p) {
      GroupSums{row_tiles(job, 0, job.out + p * kPanel),
                sums + (index * kPanels + p) * kPanel,
                panels.scales(job.panels[p]) + index * panels.group_floats,
                index * group,
                std::min((index + 1) * group, num_blocks),
                rows.tile_rows}
          .template add<kZeros>(1);
    }
  }
}

// Many rows: each slab of a panel becomes columns once, while rows pass over the slab before; and a
// group's sums get their scale while tiles multiply those of other rows.
template <CodeKind kKind, bool kZeros>
void run_many(const PanelJob& job) {
  const PackedRows& rows = *job.rows;
  const CodePanels panels(job, bits_of(kKind), kZeros);
  const int64_t num_tiles = job.tile_end - job.tile_begin, line_bytes = rows.tile_rows * kLineBytes;
  const int64_t num_blocks = rows.num_blocks();
  const int64_t group = panels.channel ? num_blocks : panels.group_blocks;
  // Whole groups, but of one that has all of k parts, whose sums wait in the output. Many rows
  // visit their sums less often; few wait for the first slab.
  const int64_t deep = num_tiles <= 8 ? 8 : 14;
  const int64_t slab = panels.channel ? deep : std::max<int64_t>(1, deep / group) * group;
  const int64_t num_slabs = (num_blocks + slab - 1) / slab, all_slabs = job.num_panels * num_slabs;
  Scratch::Scope scope(*job.scratch);
  char* const staged = job.scratch->take<char>(2 * slab * tiles::kStepBytes);
  alignas(64) float sums[2 * tiles::kTileRows * kPanel];
  tiles::Shapes shapes;
  Staging<kKind, kZeros> staging;
  GroupSums waiting;
  for (int64_t index = -1; index < all_slabs; ++index) {
    const int64_t next = index + 1, next_block = next % num_slabs * slab;
    if (next < all_slabs) {
      staging.codes = panels.codes(job.panels[next / num_slabs]) + next_block * panels.block_bytes;
      staging.out = staged + next % 2 * slab * tiles::kStepBytes;
      staging.left = std::min(slab, num_blocks - next_block) * kSteps;
    }
    staging.total = staging.left;
    staging.credit = 0;
    if (index < 0) {
      staging.rest();
      continue;
    }
    const int64_t panel = job.panels[index / num_slabs], block = index % num_slabs * slab;
    const int64_t end = std::min(block + slab, num_blocks);
    const char* const columns = staged + index % 2 * slab * tiles::kStepBytes;
    staging.steps = (num_tiles + 1) / 2 * (end - block);
    Ahead ahead = tiles::ahead_of_slab(panels.codes(panel) + (block + slab) * panels.block_bytes,
                                       panels.block_bytes, slab, num_tiles, job.num_panels);
    for (int64_t t = 0; t < num_tiles; t += 2) {
      const RowTiles tile =
          row_tiles(job, t, job.out + index / num_slabs * job.num_rows() * kPanel);
      tiles::set_shapes(shapes, tile.num_rows[0], tile.num_rows[1]);
      const auto multiply = [&](auto two, int64_t begin, int64_t stop) REGATTA_LAMBDA_INLINE {
        constexpr int kTiles = two.value;
        float* const of = panels.channel ? tile.out : sums;
        float* const more = of + rows.tile_rows * kPanel;
        begin % group ? tiles::load_sums<kTiles>(of, more) : tiles::zero_sums<kTiles>();
        const int64_t num_waiting = waiting.num_rows();
        for (int64_t at = begin; at < stop; ++at) {
          tiles::multiply<tiles::Factors::kPairs, kTiles, 1, true>(
              tile.lines[0] + at * line_bytes, tile.lines[kTiles - 1] + at * line_bytes, line_bytes,
              columns + (at - block) * tiles::kStepBytes, nullptr, 1, ahead);
          staging.some();
          waiting.add<kZeros>(num_waiting * (at + 1 - begin) / (stop - begin));
        }
        tiles::store_sums<kTiles>(of, more);
        if (stop % group && stop != num_blocks) return;
        const int64_t of_group = (stop - 1) / group;
        waiting = {tile,
                   of,
                   panels.scales(panel) + of_group * panels.group_floats,
                   of_group * group,
                   stop,
                   rows.tile_rows};
      };
      for (int64_t begin = block; begin < end; begin += group) {
        const int64_t stop = std::min(end, (begin / group + 1) * group);
        tile.num_rows[1] ? multiply(std::integral_constant<int, 2>(), begin, stop)
                         : multiply(std::integral_constant<int, 1>(), begin, stop);
      }
    }
    staging.rest();
  }
  waiting.add<kZeros>(waiting.num_rows());
}

template <CodeKind kKind, bool kZeros>
void run_tiles(const PanelJob& job) {
  const int64_t num_tiles = job.tile_end - job.tile_begin;
  if (job.num_rows() == 1) {
    return job.num_panels == 2 ? run_row<kKind, kZeros, 2>(job) : run_row<kKind, kZeros, 1>(job);
  }
  if (num_tiles == 2) return run_few<kKind, kZeros, 2, 1>(job);
  if (num_tiles == 1) {
    return job.num_panels == 2 ? run_few<kKind, kZeros, 1, 2>(job)
                               : run_few<kKind, kZeros, 1, 1>(job);
  }
  run_many<kKind, kZeros>(job);
}

template <CodeKind kKind, bool kZeros>
inline const GemmKernels* tile_kernels() {
  static constexpr GemmKernels kKernels = {kZeros ? RowFormat::kBFloat16Sums : RowFormat::kBFloat16,
                                           tiles::kTileRows,
                                           tiles::kTileRows,
                                           run_tiles<kKind, kZeros>,
                                           tiles::kBlockRows,
                                           tiles::kCachedBytes};
  return &kKernels;
}

}  // namespace codes
}  // namespace regatta::cpu::REGATTA_ISA
#endif
