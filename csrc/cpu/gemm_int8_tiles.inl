// Rows of int8 through tiles, in the namespace of avx512_bf16. Integer sums are exact and what
// follows them is done in the order of gemm_int8.inl: results are the same bits as by vectors.
//
// A slab of a panel is staged once for all rows of a job: as signed bytes, so that sums need no
// start, or as the codes that they are where groups have zero points; a group that ends within a
// step of 64 values of k filled up with zeros. Two tiles of rows at a time pass over it.
#if REGATTA_HAS_BF16_DOT && REGATTA_TILES
namespace regatta::cpu::REGATTA_ISA {
namespace int8 {

// Steps of 64 values of k in which blocks [begin, end) lie.
inline int64_t num_steps(int64_t begin, int64_t end) { return (end + 1) / 2 - begin / 2; }

// `num_blocks` of a panel as bytes, 1,024 each: with kZeros the codes, else signed values.
template <int kBits, bool kZeros>
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
      if (!kZeros) low.v = _mm512_sub_epi8(low.v, offset);
      if (!kZeros) high.v = _mm512_sub_epi8(high.v, offset);
      _mm512_store_si512(out + v * 64, low.v);
      _mm512_store_si512(out + 128 + v * 64, high.v);
    }
  }
}

// One or two tiles of rows, whose rows follow each other in `sums`.
struct RowTiles {
  const char* lines[2];
  const BlockScale* metas[2];
  int64_t num_rows[2];
  float* sums;
};

// Products of two tiles of rows with blocks whose codes are staged.
template <bool kZeros, bool kBlockScales>
struct SlabProduct {
  static constexpr auto kFactors = kZeros ? tiles::Factors::kCodes : tiles::Factors::kBytes;

  // Blocks of a group whose integer sums are made together. Where blocks have scales, those of one
  // chunk are made while those of the chunk before become floats: tiles and vectors both work.
  static constexpr int kChunk = 4;
  struct Chunk {
    int64_t block;
    int count = 0;
    bool starts, ends;    // a group
    int64_t group;        // its first block
    const float* scales;  // of the panel
  };

  int64_t tile_rows;
  alignas(64) int32_t ints[kBlockScales ? 2 * kChunk : 1][2 * tiles::kTileRows * kPanel];
  alignas(64) float totals[2 * tiles::kTileRows * kPanel];

  // Integer sums of `steps` steps of the columns, `offset` bytes into the lines from `line` on.
  REGATTA_INLINE void dot(const RowTiles& rows, int64_t line, int64_t offset,
                          const uint8_t* columns, int64_t steps, int32_t* out, Ahead& ahead) const {
    const int64_t line_bytes = tile_rows * kLineBytes, at = line * line_bytes + offset;
    const auto* from = reinterpret_cast<const char*>(columns);
    if (rows.num_rows[1]) {
      tiles::zero_sums<2>();
      tiles::multiply<kFactors, 2, 1>(rows.lines[0] + at, rows.lines[1] + at, line_bytes, from,
                                      nullptr, steps, ahead);
      tiles::store_sums<2>(out, out + tile_rows * kPanel);
    } else {
      tiles::zero_sums<1>();
      tiles::multiply<kFactors, 1, 1>(rows.lines[0] + at, nullptr, line_bytes, from, nullptr, steps,
                                      ahead);
      tiles::store_sums<1>(out, out);
    }
  }

  // A chunk's integer sums, in `from`, times its scales, of part `part` of kChunk of the rows.
  REGATTA_INLINE void convert(const RowTiles& rows, const Chunk& chunk,
                              const int32_t (*from)[2 * tiles::kTileRows * kPanel], int part) {
    const int64_t num_rows = rows.num_rows[0] + rows.num_rows[1];
    for (int64_t row = num_rows * part / kChunk; row < num_rows * (part + 1) / kChunk; ++row) {
      const int t = row >= rows.num_rows[0];
      const BlockScale* metas = rows.metas[t] + row - t * rows.num_rows[0];
      Vec total[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        total[v] = chunk.starts ? zero() : load(totals + row * kPanel + v * kLanes);
      }
      const BlockScale* meta = metas + chunk.block * tile_rows;
      const auto add = [&](int i) REGATTA_LAMBDA_INLINE {
        const Vec scale = set1(meta[i * tile_rows].scale);
        for (int v = 0; v < kVectors; ++v) {
          const Ints sum = {load_raw(from[i] + row * kPanel + v * kLanes)};
          total[v] = fma(to_vec(sum), scale, total[v]);
        }
      };
      if (chunk.count == kChunk) {
#pragma GCC unroll 4
        for (int i = 0; i < kChunk; ++i) add(i);
      } else {
        for (int i = 0; i < chunk.count; ++i) add(i);
      }
      if (chunk.ends) {
        float value_sum = 0.0f;
        for (int64_t block = chunk.group; kZeros && block < chunk.block + chunk.count; ++block) {
          value_sum += metas[block * tile_rows].value_sum;
        }
        add_to_sums(rows, row, total, chunk.scales, chunk.group == 0, value_sum);
      } else {
        for (int v = 0; v < kVectors; ++v) store(totals + row * kPanel + v * kLanes, total[v]);
      }
    }
  }

  // A row's values of a group times the weights' scales.
  static REGATTA_INLINE void add_to_sums(const RowTiles& rows, int64_t row, const Vec* values,
                                         const float* scales, bool first, float value_sum) {
    for (int v = 0; v < kVectors; ++v) {
      float* to = rows.sums + row * kPanel + v * kLanes;
      Vec sum = fma(values[v], load(scales + v * kLanes), first ? zero() : load(to));
      if (kZeros) sum = fnma(set1(value_sum), load(scales + kPanel + v * kLanes), sum);
      store(to, sum);
    }
  }

  // rows.sums (+)= blocks [begin, end), whole groups; columns, scales: of `begin`.
  void add_blocks(const RowTiles& rows, int64_t begin, int64_t end, int64_t group_blocks,
                  const uint8_t* columns, const float* scales, int64_t scale_step, Ahead& ahead) {
    Chunk before;
    for (int64_t block = begin, slot = 0;; slot ^= 1) {
      Chunk now;
      if (block < end) {
        const int64_t group = block - (block - begin) % group_blocks;
        const int64_t group_end = std::min(group + group_blocks, end);
        now.block = block;
        now.count = static_cast<int>(std::min<int64_t>(kChunk, group_end - block));
        now.starts = block == group;
        now.ends = block + now.count == group_end;
        now.group = group;
        now.scales = scales + (group - begin) / group_blocks * scale_step;
      }
      for (int i = 0; i < kChunk; ++i) {
        if (i < now.count) {
          dot(rows, (block + i) >> 1, (block + i) % 2 * kBlock, columns + i * 1024, 1,
              ints[slot * kChunk + i], ahead);
        }
        if (before.count) convert(rows, before, ints + (slot ^ 1) * kChunk, i);
      }
      if (now.count == 0) return;
      before = now;
      block += now.count;
      columns += now.count * 1024;
    }
  }

  // rows.sums (+)= blocks [begin, end), a group of rows with one scale each.
  void add_group(const RowTiles& rows, int64_t begin, int64_t end, const uint8_t* columns,
                 const float* scales, Ahead& ahead) {
    dot(rows, begin >> 1, 0, columns, num_steps(begin, end), ints[0], ahead);
    const int64_t num_rows = rows.num_rows[0] + rows.num_rows[1];
    for (int64_t row = 0; row < num_rows; ++row) {
      Vec values[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        values[v] = to_vec({load_raw(ints[0] + row * kPanel + v * kLanes)});
      }
      add_to_sums(rows, row, values, scales, begin == 0, 0.0f);
    }
  }
};

template <int kBits, bool kZeros, bool kBlockScales>
void run_tiles(const PanelJob& job) {
  const PackedRows& rows = *job.rows;
  const int64_t num_tiles = job.tile_end - job.tile_begin, num_rows = job.num_rows();
  // Few rows wait for the weights, and are not worth staging them. Measured on Granite Rapids:
  // tiles are faster from so many rows on.
  constexpr int64_t kFewRows = kBlockScales ? 96 : 24;
  if (num_rows <= kFewRows) return run<kBits, kZeros, kBlockScales>(job);
  const PanelWalk walk(job, kBits, kZeros);
  // Whole groups, at least 16 KiB of staged codes.
  const int64_t group_blocks = walk.group_blocks;
  const int64_t slab = std::max<int64_t>(1, 16 / group_blocks) * group_blocks;
  Scratch::Scope scope(*job.scratch);
  auto* staged = job.scratch->take<uint8_t>((slab + 2 * slab / group_blocks) * 1024);
  SlabProduct<kZeros, kBlockScales> product;
  product.tile_rows = rows.tile_rows;
  tiles::Shapes shapes;
  Piece piece;
  for (int i = 0; i < job.num_panels; ++i) {
    walk.set_panel(0, job.panels[i], 0, &piece);
    for (int64_t block = 0; block < walk.num_blocks; block += slab) {
      const int64_t end = std::min(block + slab, walk.num_blocks);
      // fn(begin, end of a group, where it is staged)
      const auto for_groups = [&](auto fn) {
        uint8_t* at = staged;
        for (int64_t begin = block; begin < end; begin += group_blocks) {
          const int64_t group_end = std::min(begin + group_blocks, end);
          fn(begin, group_end, at);
          at += kBlockScales ? (group_end - begin) * 1024
                             : num_steps(begin, group_end) * tiles::kStepBytes;
        }
      };
      for_groups([&](int64_t begin, int64_t group_end, uint8_t* at) {
        walk.set_panel(0, job.panels[i], begin, &piece);
        const int64_t before = kBlockScales ? 0 : begin % 2 * 1024;
        __builtin_memset(at, 0, before);
        stage_blocks<kBits, kZeros>(piece.codes[0], group_end - begin, at + before);
        if (!kBlockScales && group_end % 2) {
          __builtin_memset(at + before + (group_end - begin) * 1024, 0, 1024);
        }
      });
      walk.set_panel(0, job.panels[i], block, &piece);
      Ahead ahead = tiles::ahead_of_slab(
          piece.codes[0], walk.layout.block_bytes() * (kBlockScales ? 1 : 2),
          kBlockScales ? end - block : (end - block) / 2, num_tiles, job.num_panels);
      for (int64_t t = 0; t < num_tiles; t += 2) {
        RowTiles tile = {};
        for (int j = 0; j < 2 && t + j < num_tiles; ++j) {
          const int64_t index = job.tile_begin + t + j;
          tile.lines[j] = rows.tile(index);
          tile.metas[j] = rows.block_scales(index);
          tile.num_rows[j] = std::min(rows.tile_rows, rows.num_rows - index * rows.tile_rows);
        }
        tile.sums = job.out + (i * num_rows + t * rows.tile_rows) * kPanel;
        tiles::set_shapes(shapes, tile.num_rows[0], tile.num_rows[1],
                          kBlockScales ? kBlock : kLineBytes);
        if constexpr (kBlockScales) {
          walk.set_panel(0, job.panels[i], block, &piece);
          product.add_blocks(tile, block, end, group_blocks, staged, piece.scales[0],
                             walk.group_floats, ahead);
        } else {
          for_groups([&](int64_t begin, int64_t group_end, uint8_t* at) {
            walk.set_panel(0, job.panels[i], begin, &piece);
            product.add_group(tile, begin, group_end, at, piece.scales[0], ahead);
          });
        }
      }
    }
  }
  if (!kBlockScales) scale_rows(job);
}

template <int kBits, bool kByToken>
inline const GemmKernels* tile_kernels(DType dtype, bool zeros) {
  if (!kByToken && dtype == DType::kFloat32) return kernels<kBits, kByToken>(dtype, zeros);
  constexpr RowFormat kFormat = kByToken ? RowFormat::kInt8Rows : RowFormat::kInt8Blocks;
  constexpr int kMaxOfTwo = kByToken ? kMaxRowRowsOfTwo : kMaxBlockRowsOfTwo;
  static constexpr GemmKernels kSymmetric = {kFormat,           tiles::kTileRows,
                                             kMaxOfTwo,         run_tiles<kBits, false, !kByToken>,
                                             tiles::kBlockRows, tiles::kCachedBytes};
  if constexpr (!kByToken) {
    static constexpr GemmKernels kWithZeros = {kFormat,           tiles::kTileRows,
                                               kMaxOfTwo,         run_tiles<kBits, true, true>,
                                               tiles::kBlockRows, tiles::kCachedBytes};
    if (zeros) return &kWithZeros;
  }
  return zeros ? nullptr : &kSymmetric;
}

}  // namespace int8
}  // namespace regatta::cpu::REGATTA_ISA
#elif REGATTA_HAS_BF16_DOT
namespace regatta::cpu::REGATTA_ISA {
namespace int8 {
template <int kBits, bool kByToken>
inline const GemmKernels* tile_kernels(DType dtype, bool zeros) {
  return kernels<kBits, kByToken>(dtype, zeros);
}
}  // namespace int8
}  // namespace regatta::cpu::REGATTA_ISA
#endif
