// Rows of int8 with one scale each through tiles, in the namespace of avx512_bf16. Integer sums are
// exact and what follows them is done in the order of gemm_int8.inl: results are the same bits as
// by vectors.
//
// A slab of a panel is staged once for all rows of a job: as signed bytes, so that sums need no
// start; a group that ends within a step of 64 values of k filled up with zeros. Two tiles of rows
// at a time pass over it. Vectors make floats of a group's sums while tiles multiply the next one.
#if REGATTA_HAS_TILES
namespace regatta::cpu::REGATTA_ISA {
namespace int8 {

// Steps of 64 values of k in which blocks [begin, end) lie.
inline int64_t num_steps(int64_t begin, int64_t end) { return (end + 1) / 2 - begin / 2; }

// `num_blocks` of a panel as signed bytes, 1,024 each.
template <int kBits>
void stage_blocks(const uint8_t* codes, int64_t num_blocks, uint8_t* out) {
  const __m512i offset = _mm512_set1_epi8(kBits == 8 ? -128 : 8);
  for (int64_t i = 0; i < num_blocks * 4; ++i, codes += 32 * kBits, out += 256) {
    for (int v = 0; v < 2; ++v) {
      Codes low, high;
      if constexpr (kBits == 8) {
        low = load_codes(codes + v * 64);
        high = load_codes(codes + 128 + v * 64);
      } else {
        load_nibbles(codes + v * 64, low, high);
      }
      _mm512_store_si512(out + v * 64, _mm512_sub_epi8(low.v, offset));
      _mm512_store_si512(out + 128 + v * 64, _mm512_sub_epi8(high.v, offset));
    }
  }
}

// One or two tiles of rows, whose rows follow each other in `out`.
struct RowTiles {
  const char* lines[2];
  const BlockScale* metas[2];
  int64_t num_rows[2];
  float* out;
};

// Products of tiles of rows with groups whose codes are staged.
struct GroupProducts {
  int64_t tile_rows, num_blocks;  // of rows; of K
  alignas(64) int32_t ints[2][2 * tiles::kTileRows * kPanel];
  // Of what is in ints[slot ^ 1]: its rows, from `done` on not yet floats.
  RowTiles waiting = {};
  int64_t num_waiting = 0, done = 0;
  const float* scales = nullptr;
  bool first = false, last = false;  // of the groups of k
  int slot = 0;

  // out = (first ? 0 : out) + sums times the weights' scales, and of the last group times the
  // row's; rows [done, end) of those that wait.
  REGATTA_INLINE void convert(int64_t end) {
    for (; done < end; ++done) {
      const int t = done >= waiting.num_rows[0];
      const Vec row_scale = set1(waiting.metas[t][done - t * waiting.num_rows[0]].scale);
      for (int v = 0; v < kVectors; ++v) {
        const Vec value = to_vec({load_raw(ints[slot ^ 1] + done * kPanel + v * kLanes)});
        float* to = waiting.out + done * kPanel + v * kLanes;
        const Vec sum = fma(value, load(scales + v * kLanes), first ? zero() : load(to));
        store(to, last ? sum * row_scale : sum);
      }
    }
  }

  // Blocks [begin, end), a group, whose steps are staged at `columns`.
  template <int kTiles>
  REGATTA_INLINE void multiply(const RowTiles& rows, int64_t begin, int64_t end,
                               const uint8_t* columns, const float* group_scales, Ahead& ahead) {
    const int64_t line_bytes = tile_rows * kLineBytes, steps = num_steps(begin, end);
    const char* lines = rows.lines[0] + (begin >> 1) * line_bytes;
    const char* more = rows.lines[kTiles - 1] + (begin >> 1) * line_bytes;  // or the same
    const auto* from = reinterpret_cast<const char*>(columns);
    tiles::zero_sums<kTiles>();
    for (int64_t step = 0; step < steps; ++step) {
      tiles::multiply<tiles::Factors::kBytes, kTiles, 1, true>(
          lines + step * line_bytes, more + step * line_bytes, line_bytes,
          from + step * tiles::kStepBytes, nullptr, 1, ahead);
      convert(num_waiting * (step + 1) / steps);
    }
    tiles::store_sums<kTiles>(ints[slot], ints[slot] + tile_rows * kPanel);
    slot ^= 1;
    waiting = rows;
    num_waiting = rows.num_rows[0] + rows.num_rows[1];
    done = 0;
    scales = group_scales;
    first = begin == 0;
    last = end == num_blocks;
  }
};

template <int kBits>
void run_tiles(const PanelJob& job) {
  const PackedRows& rows = *job.rows;
  const int64_t num_tiles = job.tile_end - job.tile_begin, num_rows = job.num_rows();
  // Few rows wait for the weights, and are not worth staging them. Measured on Granite Rapids:
  // tiles are faster from so many rows on.
  constexpr int64_t kFewRows = 24;
  if (num_rows <= kFewRows) return run<kBits, false, false>(job);
  const PanelWalk walk(job, kBits, false);
  // Whole groups, at least 16 KiB of staged codes.
  const int64_t group_blocks = walk.group_blocks;
  const int64_t slab = std::max<int64_t>(1, 16 / group_blocks) * group_blocks;
  Scratch::Scope scope(*job.scratch);
  auto* staged = job.scratch->take<uint8_t>((slab + 2 * slab / group_blocks) * 1024);
  GroupProducts products;
  products.tile_rows = rows.tile_rows;
  products.num_blocks = walk.num_blocks;
  tiles::Shapes shapes;
  Piece piece;
  for (int i = 0; i < job.num_panels; ++i) {
    for (int64_t block = 0; block < walk.num_blocks; block += slab) {
      const int64_t end = std::min(block + slab, walk.num_blocks);
      // fn(begin, end of a group, where it is staged)
      const auto for_groups = [&](auto fn) REGATTA_LAMBDA_INLINE {
        uint8_t* at = staged;
        for (int64_t begin = block; begin < end; begin += group_blocks) {
          const int64_t group_end = std::min(begin + group_blocks, end);
          walk.set_panel(0, job.panels[i], begin, &piece);
          fn(begin, group_end, at);
          at += num_steps(begin, group_end) * tiles::kStepBytes;
        }
      };
      for_groups([&](int64_t begin, int64_t group_end, uint8_t* at) {
        const int64_t before = begin % 2 * 1024;
        __builtin_memset(at, 0, before);
        stage_blocks<kBits>(piece.codes[0], group_end - begin, at + before);
        if (group_end % 2) __builtin_memset(at + before + (group_end - begin) * 1024, 0, 1024);
      });
      walk.set_panel(0, job.panels[i], block, &piece);
      Ahead ahead = tiles::ahead_of_slab(piece.codes[0], walk.layout.block_bytes() * 2,
                                         (end - block) / 2, num_tiles, job.num_panels);
      for (int64_t t = 0; t < num_tiles; t += 2) {
        RowTiles tile = {};
        for (int j = 0; j < 2 && t + j < num_tiles; ++j) {
          const int64_t index = job.tile_begin + t + j;
          tile.lines[j] = rows.tile(index);
          tile.metas[j] = rows.block_scales(index);
          tile.num_rows[j] = std::min(rows.tile_rows, rows.num_rows - index * rows.tile_rows);
        }
        tile.out = job.out + (i * num_rows + t * rows.tile_rows) * kPanel;
        tiles::set_shapes(shapes, tile.num_rows[0], tile.num_rows[1]);
        for_groups([&](int64_t begin, int64_t group_end, uint8_t* at) REGATTA_LAMBDA_INLINE {
          tile.num_rows[1]
              ? products.multiply<2>(tile, begin, group_end, at, piece.scales[0], ahead)
              : products.multiply<1>(tile, begin, group_end, at, piece.scales[0], ahead);
        });
      }
    }
  }
  products.convert(products.num_waiting);
}

template <int kBits>
inline const GemmKernels* tile_kernels(DType dtype) {
  if (dtype == DType::kFloat32) return int8_kernels<kBits, false>(false);
  static constexpr GemmKernels kKernels = {RowFormat::kInt8Rows, tiles::kTileRows,
                                           kMaxRowRowsOfTwo,     run_tiles<kBits>,
                                           tiles::kBlockRows,    tiles::kCachedBytes};
  return &kKernels;
}

}  // namespace int8
}  // namespace regatta::cpu::REGATTA_ISA
#endif
