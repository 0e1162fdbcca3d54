// Many int8 rows by USMMLA: 2 rows of 8 values of k times 8 codes of 2 columns, twice the products
// of USDOT. See gemm_int8.inl, and gemm_quads.inl, which does the same with bfloat16.
//
// Codes lie in fours along k. A slab of them is zipped into eights (of 4 bits into bytes) once for
// all rows that pass over it. Integer sums are exact, and floats are summed in the order of
// gemm_int8.inl: the bits are the same.
#if REGATTA_HAS_QUADS
namespace regatta::cpu::REGATTA_ISA {
namespace int8 {

constexpr int kQuadRows = 6;  // with 8 columns 12 sums of 2 x 2, and as many floats
constexpr int kQuadColumns = 8;
constexpr int64_t kSlabSteps = 64;  // of 8 values of k, 256 bytes of a panel each

// The codes of `num_steps` steps as [step][kPanel][8]. Asks for those behind them.
template <int kBits>
void zip_slab(const uint8_t* codes, int64_t num_steps, uint8_t* out) {
  constexpr int64_t kStepBytes = 32 * kBits;
  for (int64_t step = 0; step < num_steps; ++step, codes += kStepBytes) {
    for (int byte = 0; byte < kStepBytes; byte += 64) {
      prefetch(codes + num_steps * kStepBytes + byte);
    }
#pragma GCC unroll 8
    for (int c = 0; c < kPanel; c += 4, out += 32) {
      Codes low, high;  // k = 0 .. 3 and 4 .. 7
      if constexpr (kBits == 8) {
        low = load_codes(codes + c * 4);
        high = load_codes(codes + 128 + c * 4);
      } else {
        load_nibbles(codes + c * 4, low, high);
      }
      const uint32x4_t a = vreinterpretq_u32_u8(low.v), b = vreinterpretq_u32_u8(high.v);
      vst1q_u8(out, vreinterpretq_u8_u32(vzip1q_u32(a, b)));
      vst1q_u8(out + 16, vreinterpretq_u8_u32(vzip2q_u32(a, b)));
    }
  }
}

// Blocks of k of a panel's kQuadColumns columns times the rows of a tile: as multiply() has them,
// but piece.codes are zipped, and piece.scales and piece.sums are those of the first column.
template <int kBits, bool kZeros, bool kBlockScales, int kRows>
void multiply_quads(const Piece& piece) {
  constexpr int kTwos = (kRows + 1) / 2, kPairs = kQuadColumns / 2;
  const int64_t line_step = piece.tile_rows * kLineBytes;
  const uint8_t* codes = piece.codes[0];
  const int64_t end = piece.first_block + piece.num_blocks;
  bool first = !piece.accumulate;
  int64_t group = 0;
  // An odd last row stands for two.
  const auto second = [](int t)
                          REGATTA_LAMBDA_INLINE { return 2 * t + 1 < kRows ? 2 * t + 1 : 2 * t; };
  for (int64_t begin = piece.first_block; begin < end; begin += piece.group_blocks, ++group) {
    const int64_t group_end = begin + piece.group_blocks < end ? begin + piece.group_blocks : end;
    int32x4_t sum[kTwos][kPairs];  // [r0 c0, r1 c0, r0 c1, r1 c1]
    float32x4_t total[kTwos][kPairs];
    Vec value_sum[kRows];
    for (Vec& each : value_sum) each = zero();
#pragma GCC unroll 3
    for (int t = 0; t < kTwos; ++t) {
#pragma GCC unroll 4
      for (int v = 0; v < kPairs; ++v) {
        sum[t][v] = vdupq_n_s32(0);
        total[t][v] = vdupq_n_f32(0.0f);
      }
    }
    for (int64_t block = begin; block < group_end; ++block) {
      const int8_t* x = piece.lines + (block >> 1) * line_step + (block & 1) * kBlock;
      const BlockScale* metas = piece.metas + block * piece.tile_rows;
      if constexpr (kZeros) {
        for (int r = 0; r < kRows; ++r) value_sum[r] = value_sum[r] + set1(metas[r].value_sum);
      }
#pragma GCC unroll 3
      for (int t = 0; t < kTwos; ++t) {
        const int32x2_t starts = {metas[2 * t].start, metas[second(t)].start};
        const int32x4_t start = kZeros ? vdupq_n_s32(0) : vcombine_s32(starts, starts);
#pragma GCC unroll 4
        for (int v = 0; v < kPairs; ++v) {
          sum[t][v] = kBlockScales ? start : vaddq_s32(sum[t][v], start);
        }
      }
#pragma GCC unroll 4
      for (int step = 0; step < kBlockSteps; ++step, codes += 8 * kPanel) {
        int8x16_t rows[kTwos];
#pragma GCC unroll 3
        for (int t = 0; t < kTwos; ++t) {
          rows[t] = vcombine_s8(vld1_s8(x + 2 * t * kLineBytes + step * 8),
                                vld1_s8(x + second(t) * kLineBytes + step * 8));
        }
#pragma GCC unroll 4
        for (int v = 0; v < kPairs; ++v) {
          const uint8x16_t columns = vld1q_u8(codes + 16 * v);
#pragma GCC unroll 3
          for (int t = 0; t < kTwos; ++t) {
            sum[t][v] = vusmmlaq_s32(sum[t][v], columns, rows[t]);
          }
        }
      }
      if constexpr (kBlockScales) {
#pragma GCC unroll 3
        for (int t = 0; t < kTwos; ++t) {
          const float32x2_t of_rows = {metas[2 * t].scale, metas[second(t)].scale};
          const float32x4_t scale = vcombine_f32(of_rows, of_rows);
#pragma GCC unroll 4
          for (int v = 0; v < kPairs; ++v) {
            total[t][v] = vfmaq_f32(total[t][v], vcvtq_f32_s32(sum[t][v]), scale);
          }
        }
      }
    }
    const float* scales = piece.scales[0] + group * piece.scale_step;
#pragma GCC unroll 3
    for (int t = 0; t < kTwos; ++t) {
#pragma GCC unroll 2
      for (int j = 0; j < kPairs / 2; ++j) {
        float32x4_t made[2];
        for (int i = 0; i < 2; ++i) {
          made[i] = kBlockScales ? total[t][2 * j + i] : vcvtq_f32_s32(sum[t][2 * j + i]);
        }
        const Vec of_rows[2] = {{vuzp1q_f32(made[0], made[1])}, {vuzp2q_f32(made[0], made[1])}};
        const Vec scale = load(scales + 4 * j);
        for (int i = 0; i < 2 && 2 * t + i < kRows; ++i) {
          float* to = piece.sums + (2 * t + i) * kPanel + 4 * j;
          Vec result = fma(of_rows[i], scale, first ? zero() : load(to));
          if constexpr (kZeros) {
            result = fnma(value_sum[2 * t + i], load(scales + kPanel + 4 * j), result);
          }
          store(to, result);
        }
      }
    }
    first = false;
  }
}

template <int kBits, bool kZeros, bool kBlockScales, int... kRows>
MultiplyFn multiply_quads_of(int64_t rows, std::integer_sequence<int, kRows...>) {
  static constexpr MultiplyFn kTable[] = {
      multiply_quads<kBits, kZeros, kBlockScales, kRows + 1>...};
  return kTable[rows - 1];
}

template <int kBits, bool kZeros, bool kBlockScales>
void run_quads(const PanelJob& job) {
  const PackedRows& rows = *job.rows;
  const PanelWalk walk(job, kBits, kZeros);
  const int64_t num_rows = job.num_rows();
  // Whole groups; where one is longer than a slab, USDOT does it.
  const int64_t slab_groups = kSlabSteps / kBlockSteps / walk.group_blocks;
  if (slab_groups == 0) return run<kBits, kZeros, kBlockScales>(job);
  const int64_t slab = slab_groups * walk.group_blocks;
  alignas(64) uint8_t zipped[kSlabSteps * 8 * kPanel];
  Piece piece;
  walk.start(rows, 1, &piece);
  for (int i = 0; i < job.num_panels; ++i) {
    for (int64_t block = 0; block < walk.num_blocks; block += slab) {
      walk.set_panel(0, job.panels[i], block, &piece);
      piece.first_block = block;
      piece.num_blocks = std::min(slab, walk.num_blocks - block);
      piece.accumulate = block > 0;
      zip_slab<kBits>(piece.codes[0], piece.num_blocks * kBlockSteps, zipped);
      const float* scales = piece.scales[0];
      float* sums = job.out + i * num_rows * kPanel;
      for (int64_t t = job.tile_begin; t < job.tile_end; ++t, sums += rows.tile_rows * kPanel) {
        walk.set_tile(rows, t, &piece);
        const MultiplyFn multiply = multiply_quads_of<kBits, kZeros, kBlockScales>(
            std::min(rows.tile_rows, rows.num_rows - t * rows.tile_rows),
            std::make_integer_sequence<int, kQuadRows>());
        for (int column = 0; column < kPanel; column += kQuadColumns) {
          piece.codes[0] = zipped + column * 8;
          piece.scales[0] = scales + column;
          piece.sums = sums + column;
          multiply(piece);
        }
      }
    }
  }
  if (!kBlockScales) scale_rows(job);
}

}  // namespace int8
}  // namespace regatta::cpu::REGATTA_ISA
#endif
