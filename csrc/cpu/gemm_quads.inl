// Many rows of bfloat16 by BFMMLA: 2 rows of 4 values of k times 4 values of 2 columns, twice the
// products of BFDOT. See gemm_dense.cc.
//
// It wants 4 values of k of a column together, and panels hold pairs. Two lines of pairs are zipped
// into one of quads, a slab at a time, for all rows that pass over it: the weights in memory stay
// the same on every set. BFMMLA adds the products of a quad's first pair, then those of its second,
// each sum rounded as BFDOT does it: the bits are BFDOT's, whatever the number of rows.
//
// 6 rows times 16 columns are 24 sums of 2 x 2. Bound: BFMMLA, with a zip for 2 of them in a slab
// of one tile of rows, for 2 n in a slab of n.
#if REGATTA_HAS_QUADS
namespace regatta::cpu::REGATTA_ISA {
namespace quads {

constexpr int kTileRows = 6;
constexpr int64_t kSlabPairs = 128;  // of k: 16 KiB as pairs, and as many as quads
constexpr int kStepValues = 4 * static_cast<int>(kPanel);

// `num_pairs` lines of pairs of a panel as quads, [num_pairs / 2][kPanel][4]; an odd one stays
// apart. Asks for the slab behind it.
inline void zip_slab(const bf16* pairs, int64_t num_pairs, bf16* out) {
  const auto* from = reinterpret_cast<const uint32_t*>(pairs);
  auto* to = reinterpret_cast<uint32_t*>(out);
  for (int64_t p = 0; p + 1 < num_pairs; p += 2, from += 2 * kPanel) {
    for (int byte = 0; byte < 256; byte += 64) {
      prefetch(reinterpret_cast<const char*>(from + num_pairs * kPanel) + byte);
    }
#pragma GCC unroll 8
    for (int c = 0; c < kPanel; c += 4, to += 8) {
      const uint32x4_t first = vld1q_u32(from + c), second = vld1q_u32(from + kPanel + c);
      vst1q_u32(to, vzip1q_u32(first, second));
      vst1q_u32(to + 4, vzip2q_u32(first, second));
    }
  }
}

REGATTA_INLINE bfloat16x8_t load_quads(const bf16* p) {
  return vreinterpretq_bf16_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(p)));
}
// 4 values of two rows.
REGATTA_INLINE bfloat16x8_t load_rows(const bf16* a, const bf16* b) {
  const uint16x4_t low = vld1_u16(reinterpret_cast<const uint16_t*>(a));
  const uint16x4_t high = vld1_u16(reinterpret_cast<const uint16_t*>(b));
  return vreinterpretq_bf16_u16(vcombine_u16(low, high));
}
// A pair of two rows, each twice; a pair of two columns, both twice: operands of BFDOT.
REGATTA_INLINE bfloat16x8_t load_rows_pair(const bf16* a, const bf16* b) {
  uint32_t x, y;
  __builtin_memcpy(&x, a, 4);
  __builtin_memcpy(&y, b, 4);
  return vreinterpretq_bf16_u32(vcombine_u32(vdup_n_u32(x), vdup_n_u32(y)));
}
REGATTA_INLINE bfloat16x8_t load_columns_pair(const bf16* p) {
  uint64_t two;
  __builtin_memcpy(&two, p, 8);
  return vreinterpretq_bf16_u64(vdupq_n_u64(two));
}
REGATTA_INLINE float32x4_t low_halves(float32x4_t a, float32x4_t b) {
  return vreinterpretq_f32_f64(vzip1q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b)));
}
REGATTA_INLINE float32x4_t high_halves(float32x4_t a, float32x4_t b) {
  return vreinterpretq_f32_f64(vzip2q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b)));
}

// sums[r][0 .. 16) (+)= rows[r] times 16 columns of a slab. line: the tile's at the slab's begin,
// lines line_step values apart; quads: the first of the columns; last: their pair behind all quads,
// or null.
template <int kRows>
void multiply(const bf16* line, int64_t line_step, const bf16* quads, int64_t num_quads,
              const bf16* last, float* sums, bool accumulate) {
  constexpr int kTwos = (kRows + 1) / 2;  // of rows; an odd one stands for two
  float32x4_t acc[kTwos][8];              // [r0 c0, r0 c1, r1 c0, r1 c1]
#pragma GCC unroll 3
  for (int t = 0; t < kTwos; ++t) {
    const float* first = sums + 2 * t * kPanel;
    const float* second = 2 * t + 1 < kRows ? first + kPanel : first;
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const float32x4_t a = accumulate ? vld1q_f32(first + 4 * j) : vdupq_n_f32(0.0f);
      const float32x4_t b = accumulate ? vld1q_f32(second + 4 * j) : vdupq_n_f32(0.0f);
      acc[t][2 * j] = low_halves(a, b);
      acc[t][2 * j + 1] = high_halves(a, b);
    }
  }
  const auto values = [&](int64_t k)
                          REGATTA_LAMBDA_INLINE { return line + k / 8 * line_step + k % 8 * 4; };
  bfloat16x8_t rows[kTwos];
  for (int64_t k = 0; k < num_quads; ++k, quads += kStepValues) {
    const bf16* x = values(k);
#pragma GCC unroll 3
    for (int t = 0; t < kTwos; ++t) {
      const bf16* first = x + 2 * t * 32;
      rows[t] = load_rows(first, 2 * t + 1 < kRows ? first + 32 : first);
    }
#pragma GCC unroll 8
    for (int v = 0; v < 8; ++v) {
      const bfloat16x8_t columns = load_quads(quads + 8 * v);
#pragma GCC unroll 3
      for (int t = 0; t < kTwos; ++t) acc[t][v] = vbfmmlaq_f32(acc[t][v], rows[t], columns);
    }
  }
  if (last) {
    for (int t = 0; t < kTwos; ++t) {
      const bf16* first = values(num_quads) + 2 * t * 32;
      rows[t] = load_rows_pair(first, 2 * t + 1 < kRows ? first + 32 : first);
#pragma GCC unroll 8
      for (int v = 0; v < 8; ++v) {
        acc[t][v] = vbfdotq_f32(acc[t][v], rows[t], load_columns_pair(last + 4 * v));
      }
    }
  }
#pragma GCC unroll 3
  for (int t = 0; t < kTwos; ++t) {
    float* to = sums + 2 * t * kPanel;
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const float32x4_t a = acc[t][2 * j], b = acc[t][2 * j + 1];
      vst1q_f32(to + 4 * j, low_halves(a, b));
      if (2 * t + 1 < kRows) vst1q_f32(to + kPanel + 4 * j, high_halves(a, b));
    }
  }
}

using MultiplyFn = void (*)(const bf16*, int64_t, const bf16*, int64_t, const bf16*, float*, bool);
template <int... kRows>
MultiplyFn multiply_of(int64_t rows, std::integer_sequence<int, kRows...>) {
  static constexpr MultiplyFn kTable[] = {multiply<kRows + 1>...};
  return kTable[rows - 1];
}

inline void run(const PanelJob& job) {
  const PackedRows& rows = *job.rows;
  const int64_t num_pairs = (rows.width + 1) / 2, num_rows = job.num_rows();
  const int64_t line_step = rows.tile_rows * 32;
  const auto* weight = static_cast<const bf16*>(job.weight->tensors[0].data);
  alignas(64) bf16 slab[kSlabPairs * 2 * kPanel];
  for (int i = 0; i < job.num_panels; ++i) {
    const bf16* panel = weight + job.panels[i] * num_pairs * 2 * kPanel;
    for (int64_t pair = 0; pair < num_pairs; pair += kSlabPairs) {
      const int64_t depth = std::min(kSlabPairs, num_pairs - pair);
      const bf16* pairs = panel + pair * 2 * kPanel;
      zip_slab(pairs, depth, slab);
      const bf16* last = depth % 2 ? pairs + (depth - 1) * 2 * kPanel : nullptr;
      float* sums = job.out + i * num_rows * kPanel;
      for (int64_t t = job.tile_begin; t < job.tile_end; ++t, sums += rows.tile_rows * kPanel) {
        const auto* line =
            reinterpret_cast<const bf16*>(rows.tile(t) + pair / 16 * rows.tile_rows * kLineBytes);
        const MultiplyFn multiply =
            multiply_of(std::min(rows.tile_rows, rows.num_rows - t * rows.tile_rows),
                        std::make_integer_sequence<int, kTileRows>());
        for (int half = 0; half < 2; ++half) {
          multiply(line, line_step, slab + half * kStepValues / 2, depth / 2,
                   last ? last + half * kPanel : nullptr, sums + half * 16, pair > 0);
        }
      }
    }
  }
}

}  // namespace quads
}  // namespace regatta::cpu::REGATTA_ISA
#endif
