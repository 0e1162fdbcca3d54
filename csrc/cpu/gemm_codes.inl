// The microkernels of codes times rows that stay in floating point. See gemm_codes.cc.
#include "gemm_float.inl"
#include "gemm_tiles.inl"

namespace regatta::cpu::REGATTA_ISA {
namespace codes {

constexpr int kLanes = Vec::kLanes;
constexpr int kVectors = static_cast<int>(kPanel) / kLanes;  // vectors across a panel
constexpr int kStepValues = 8;                               // of k
constexpr int kSteps = static_cast<int>(kBlock) / kStepValues;

constexpr int kMaxTileRows = kLanes == 16 ? 12 : kLanes == 8 ? 2 : kLanes == 4 ? 3 : 1;
constexpr int kMaxRowsOfTwo = kLanes == 16 ? 4 : 1;

// As in gemm_int8.inl: with one scale per output channel sums still get it each 512 values of k.
constexpr int64_t kChannelBlocks = 16;

constexpr int bits_of(CodeKind kind) { return kind == CodeKind::kInt8 ? 8 : 4; }
constexpr int step_bytes(CodeKind kind) { return static_cast<int>(kPanel) * bits_of(kind); }

// Where value k of a step lies in a lane of 32 bits (regatta/pack_quantized.h): its first bit. Of
// 8-bit codes values 4 to 7 are in a second lane, 128 bytes on.
template <CodeKind kKind>
constexpr int first_bit(int k) {
  if (kKind == CodeKind::kE2m1) return k % 2 * 16 + k / 2 * 4;
  return kKind == CodeKind::kInt8 ? k % 4 * 8 : k % 4 * 8 + k / 4 * 4;
}

}  // namespace codes
}  // namespace regatta::cpu::REGATTA_ISA

// Raw load_raw(const uint8_t*)   32 bits for each lane
// Vec value<kKind, kZeros>(Raw, int bit)   the code at that bit of each lane as a number: with zero
//                                points as stored, else less what was added to it
// VecBf16 pair_of<kKind, kZeros>(Raw, int unit)   with REGATTA_HAS_BF16_DOT: of the codes of values
//                                2 * unit and 2 * unit + 1 of a step
#include REGATTA_VALUES_INL

namespace regatta::cpu::REGATTA_ISA {
namespace codes {

template <CodeKind kKind>
REGATTA_INLINE Raw lanes(const uint8_t* step, int v, int k) {
  return load_raw(step + (kKind == CodeKind::kInt8 ? k / 4 * 128 : 0) + v * kLanes * 4);
}

// Rows of float. A unit of k is one value.
template <CodeKind kCodes, bool kHasZeros>
struct Floats {
  using Row = float;
  using Value = Vec;
  static constexpr CodeKind kKind = kCodes;
  static constexpr bool kZeros = kHasZeros, kMayStream = false;
  static constexpr int kUnitValues = 1;
  static REGATTA_INLINE Vec broadcast(const float* unit) { return set1(*unit); }
  // Unit `unit` of a step of a panel, for vector `v` of its columns.
  static REGATTA_INLINE Vec columns(const uint8_t* step, int v, int unit) {
    return value<kKind, kZeros>(lanes<kKind>(step, v, unit), first_bit<kKind>(unit));
  }
  static REGATTA_INLINE Vec add(Vec sum, Vec x, Vec columns) { return fma(x, columns, sum); }
  // Adds a line up, in lanes.
  static REGATTA_INLINE Vec add_line(Vec sum, const float* line) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += kLanes) sum = sum + load(line + i);
    return sum;
  }
};

#if REGATTA_HAS_BF16_DOT
// Rows of bf16. A unit of k is a pair of values; bf16 holds every code.
template <CodeKind kCodes, bool kHasZeros>
struct Pairs {
  using Row = bf16;
  using Value = VecBf16;
  static constexpr CodeKind kKind = kCodes;
  static constexpr bool kZeros = kHasZeros, kMayStream = true;
  static constexpr int kUnitValues = 2;
  static REGATTA_INLINE VecBf16 broadcast(const bf16* unit) { return set1_pair(unit); }
  static REGATTA_INLINE VecBf16 columns(const uint8_t* step, int v, int unit) {
    return pair_of<kKind, kZeros>(lanes<kKind>(step, v, 2 * unit), unit);
  }
  static REGATTA_INLINE Vec add(Vec sum, VecBf16 x, VecBf16 columns) {
    return dot_pairs(sum, columns, x);
  }
  static REGATTA_INLINE Vec add_line(Vec sum, const bf16* line) {
#pragma GCC unroll 16
    for (int i = 0; i < 32; i += 2 * kLanes) {
      Vec even, odd;
      load_2k(line + i, even, odd);
      sum = sum + even + odd;
    }
    return sum;
  }
};
#endif

// Blocks of k of one or two panels times the rows of a tile.
template <class Row>
struct Piece {
  const Row* lines;         // of the tile, from the first block on
  int64_t line_step;        // values from one line to the next
  const uint8_t* codes[2];  // of the panels, from the first block on
  const float* scales[2];   // of the first group
  const float* row_sums;    // of the first group: [group][tile_rows]; with zero points
  int64_t tile_rows;
  int64_t num_values;    // of k
  int64_t group_blocks;  // after which sums get their scale
  int64_t scale_step;    // floats from one group's scales to the next
  int64_t scales_ahead;  // floats from a group's scales to those to prefetch meanwhile
  float* sums;           // [panels][panel_stride], rows kPanel apart
  int64_t panel_stride;
  bool accumulate;  // else `sums` is written
  Ahead ahead;
};

template <class P, int kPanels, bool kIntoL2, int kRows>
void multiply(const Piece<typename P::Row>& piece) {
  using Row = typename P::Row;
  constexpr int kUnits = kStepValues / P::kUnitValues;  // of a step
  constexpr int kStepBytes = step_bytes(P::kKind);
  constexpr int kLineValues = static_cast<int>(kLineBytes / int64_t{sizeof(Row)});
  constexpr int kLineSteps = kLineValues / kStepValues;
  const int64_t codes_distance = kPanels == 2 ? piece.codes[1] - piece.codes[0] : 0;
  const int64_t scales_distance = kPanels == 2 ? piece.scales[1] - piece.scales[0] : 0;
  const uint8_t* codes = piece.codes[0];
  const float* scales = piece.scales[0];
  const float* row_sums = piece.row_sums;
  const Row* line = piece.lines;
  Ahead ahead = piece.ahead;
  bool first = !piece.accumulate;
  const int64_t group_values = piece.group_blocks * kBlock;
  for (int64_t rest = piece.num_values; rest > 0; rest -= group_values) {
    Vec sum[kPanels][kRows][kVectors];
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 4
      for (int part = 0; part < (P::kZeros ? 4 : 2); ++part) {
        prefetch(scales + (p ? scales_distance : 0) + piece.scales_ahead + part * 16);
      }
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 32
        for (int v = 0; v < kVectors; ++v) sum[p][r][v] = zero();
      }
    }
    // x: a unit of the tile's first row.
    const auto unit = [&](int p, int u, const Row* x) REGATTA_LAMBDA_INLINE {
      const uint8_t* from = codes + (p ? codes_distance : 0);
      // Held in registers: the rows' values or the panel's, whichever are fewer.
      if constexpr (kRows < kVectors) {
        typename P::Value xs[kRows];
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) xs[r] = P::broadcast(x + r * kLineValues);
#pragma GCC unroll 32
        for (int v = 0; v < kVectors; ++v) {
          const typename P::Value columns = P::columns(from, v, u);
#pragma GCC unroll 12
          for (int r = 0; r < kRows; ++r) sum[p][r][v] = P::add(sum[p][r][v], xs[r], columns);
        }
      } else {
        typename P::Value columns[kVectors];
#pragma GCC unroll 32
        for (int v = 0; v < kVectors; ++v) columns[v] = P::columns(from, v, u);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
          const typename P::Value value = P::broadcast(x + r * kLineValues);
#pragma GCC unroll 32
          for (int v = 0; v < kVectors; ++v) sum[p][r][v] = P::add(sum[p][r][v], value, columns[v]);
        }
      }
    };
    const auto step = [&](const Row* x, int count) REGATTA_LAMBDA_INLINE {
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 4
        for (int byte = 0; byte < kStepBytes; byte += 64) {
          prefetch_ahead<kIntoL2>(ahead.at + (p ? codes_distance : 0) + byte);
        }
#pragma GCC unroll 8
        for (int u = 0; u < count; ++u) unit(p, u, x + u * P::kUnitValues);
      }
      codes += kStepBytes;
      ahead.at += ahead.step;
    };
    for (int64_t left = std::min(rest, group_values); left > 0; left -= kBlock) {
      if (left >= kBlock) {
#pragma GCC unroll 2
        for (int i = 0; i < kSteps; ++i) {
          step(line + i / kLineSteps * piece.line_step + i % kLineSteps * kStepValues, kUnits);
        }
      } else {  // what is behind the last value may be no number
        for (int i = 0; i * kStepValues < left; ++i) {
          const int count = static_cast<int>(
              (std::min<int64_t>(left - i * kStepValues, kStepValues) + P::kUnitValues - 1) /
              P::kUnitValues);
          step(line + i / kLineSteps * piece.line_step + i % kLineSteps * kStepValues, count);
        }
      }
      line += kSteps / kLineSteps * piece.line_step;
    }
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
      const float* from = scales + (p ? scales_distance : 0);
      float* out = piece.sums + p * piece.panel_stride;
#pragma GCC unroll 32
      for (int v = 0; v < kVectors; ++v) {
        const Vec scale = load(from + v * kLanes);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
          float* to = out + r * kPanel + v * kLanes;
          Vec result = fma(sum[p][r][v], scale, first ? zero() : load(to));
          if constexpr (P::kZeros) {
            result = fnma(set1(row_sums[r]), load(from + kPanel + v * kLanes), result);
          }
          store(to, result);
        }
      }
    }
    first = false;
    scales += piece.scale_step;
    row_sums += piece.tile_rows;
  }
}

template <class P>
using MultiplyFn = void (*)(const Piece<typename P::Row>&);

template <class P, int kPanels, int... kRows>
MultiplyFn<P> multiply_in(int64_t rows, bool into_l2, std::integer_sequence<int, kRows...>) {
  static constexpr MultiplyFn<P> kTables[2][sizeof...(kRows)] = {
      {multiply<P, kPanels, false, kRows + 1>...},
      {multiply < P, kPanels, P::kMayStream && kMayStreamIntoL2, kRows + 1 > ...}};
  return kTables[into_l2][rows - 1];
}

// sums[group][row] of the tile's rows over the values of each group.
template <class P>
void sum_rows(const PackedRows& rows, int64_t tile, int64_t group_blocks, float* sums) {
  using Row = typename P::Row;
  constexpr int64_t kLineValues = kLineBytes / int64_t{sizeof(Row)};
  const auto* lines = reinterpret_cast<const Row*>(rows.tile(tile));
  const int64_t group_values = group_blocks * kBlock;
  const int64_t num_rows = std::min(rows.tile_rows, rows.num_rows - tile * rows.tile_rows);
  for (int64_t begin = 0; begin < rows.width; begin += group_values, sums += rows.tile_rows) {
    const int64_t end = std::min(begin + group_values, rows.width);
    for (int64_t r = 0; r < num_rows; ++r) {
      const auto line = [&](int64_t k) { return lines + (k * rows.tile_rows + r * kLineValues); };
      Vec sum = zero();
      int64_t k = begin;
      for (; k + kLineValues <= end; k += kLineValues) sum = P::add_line(sum, line(k));
      sums[r] = reduce_add(sum);
      for (int64_t i = 0; k + i < end; ++i) sums[r] += to_float(line(k)[i]);
    }
  }
}

// Where the panels and scales of a job lie.
struct CodePanels {
  CodePanels(const PanelJob& job, int bits, bool zeros)
      : weight(static_cast<const uint8_t*>(job.weight->tensors[0].data)),
        of_groups(static_cast<const float*>(job.weight->tensors[1].data)) {
    layout.bits = bits;
    layout.in_features = job.weight->in_features;
    layout.out_features = job.weight->out_features;
    layout.num_groups = job.weight->tensors[1].shape[1];
    layout.has_zeros = zeros;
    channel = layout.num_groups == 1;
    block_bytes = layout.block_bytes();
    group_blocks = channel ? kChannelBlocks : layout.group_size() / kBlock;
    group_floats = channel ? 0 : (zeros ? 2 : 1) * kPanel;
  }
  const uint8_t* codes(int64_t panel) const { return weight + panel * layout.panel_bytes(); }
  const float* scales(int64_t panel) const { return of_groups + panel * layout.panel_scales(); }

  QuantizedLayout layout;
  const uint8_t* weight;
  const float* of_groups;
  bool channel;  // one scale per output channel
  int64_t block_bytes, group_blocks;
  int64_t group_floats;  // from one group's scales to the next
};

template <class P>
void run(const PanelJob& job) {
  using Row = typename P::Row;
  constexpr int64_t kLineValues = kLineBytes / int64_t{sizeof(Row)};
  constexpr int64_t kStepBytes = step_bytes(P::kKind), kBlockBytes = kSteps * kStepBytes;
  const PackedRows& rows = *job.rows;
  const int64_t num_blocks = rows.num_blocks();
  const CodePanels panels(job, bits_of(P::kKind), P::kZeros);
  const int64_t group_blocks = panels.group_blocks;
  const int64_t num_tiles = job.tile_end - job.tile_begin;
  const int64_t num_rows = job.num_rows();
  Piece<Row> piece;
  piece.tile_rows = rows.tile_rows;
  piece.line_step = rows.tile_rows * kLineValues;
  piece.panel_stride = num_rows * kPanel;
  piece.group_blocks = group_blocks;
  piece.scale_step = panels.group_floats;
  const int64_t tile_sums = (num_blocks + group_blocks - 1) / group_blocks * rows.tile_rows;
  Scratch::Scope scope(*job.scratch);
  float* row_sums = nullptr;
  if constexpr (P::kZeros) {
    row_sums = job.scratch->take<float>(num_tiles * tile_sums);
    for (int64_t t = 0; t < num_tiles; ++t) {
      sum_rows<P>(rows, job.tile_begin + t, group_blocks, row_sums + t * tile_sums);
    }
  }
  const auto set_panel = [&](int slot, int64_t panel, int64_t block) {
    piece.codes[slot] = panels.codes(panel) + block * kBlockBytes;
    piece.scales[slot] = panels.scales(panel) + block / group_blocks * piece.scale_step;
  };
  const auto set_tile = [&](int64_t t, int64_t block) {
    piece.lines = reinterpret_cast<const Row*>(rows.tile(job.tile_begin + t)) +
                  block * (kBlock / kLineValues) * piece.line_step;
    piece.row_sums = row_sums + t * tile_sums + block / group_blocks * rows.tile_rows;
  };
  const bool two = job.num_panels == 2 && num_tiles == 1 && num_rows <= kMaxRowsOfTwo;
  piece.scales_ahead =
      (1 + stream_ahead_bytes(two ? 2 : 1) / (group_blocks * kBlockBytes)) * piece.scale_step;
  if (two) {
    set_panel(0, job.panels[0], 0);
    set_panel(1, job.panels[1], 0);
    set_tile(0, 0);
    piece.num_values = rows.width;
    piece.sums = job.out;
    piece.accumulate = false;
    piece.ahead = ahead_of_streams(piece.codes[0], 2, kStepBytes);
    multiply_in<P, 2>(num_rows, piece.ahead.into_l2,
                      std::make_integer_sequence<int, kMaxRowsOfTwo>())(piece);
    return;
  }
  // A slab of whole groups of the panel stays in L1 while the tiles pass over it, as in
  // gemm_int8.inl.
  const int64_t wanted = (num_tiles <= 3 ? 8192 : 16384) / kBlockBytes;
  const int64_t slab =
      num_tiles == 1 ? num_blocks : std::max<int64_t>(1, wanted / group_blocks) * group_blocks;
  for (int i = 0; i < job.num_panels; ++i) {
    for (int64_t block = 0; block < num_blocks; block += slab) {
      set_panel(0, job.panels[i], block);
      piece.num_values = std::min(slab * kBlock, rows.width - block * kBlock);
      piece.accumulate = block > 0;
      const int64_t steps = (piece.num_values + kStepValues - 1) / kStepValues;
      piece.ahead = num_tiles == 1 ? ahead_of_streams(piece.codes[0], 1, kStepBytes)
                                   : ahead_of_slab(piece.codes[0], slab * kBlockBytes,
                                                   num_tiles * slab * kSteps);
      for (int64_t t = 0; t < num_tiles; ++t) {
        const int64_t tile = job.tile_begin + t;
        set_tile(t, block);
        piece.sums = job.out + i * piece.panel_stride + t * rows.tile_rows * kPanel;
        multiply_in<P, 1>(std::min(rows.tile_rows, rows.num_rows - tile * rows.tile_rows),
                          piece.ahead.into_l2,
                          std::make_integer_sequence<int, kMaxTileRows>())(piece);
        piece.ahead.at += steps * piece.ahead.step;
      }
    }
  }
}

#if REGATTA_HAS_TILES
template <CodeKind kKind, bool kZeros>
inline const GemmKernels* tile_kernels();  // gemm_codes_tiles.inl
#endif

template <CodeKind kKind, bool kZeros>
inline const GemmKernels* kernels([[maybe_unused]] Isa isa, DType dtype) {
#if REGATTA_HAS_TILES
  if (has_tiles(isa) && dtype == DType::kBFloat16) return tile_kernels<kKind, kZeros>();
#endif
  static constexpr GemmKernels kFloats = {RowFormat::kFloat32, kMaxTileRows, kMaxRowsOfTwo,
                                          run<Floats<kKind, kZeros>>};
#if REGATTA_HAS_BF16_DOT
  static constexpr GemmKernels kPairs = {RowFormat::kBFloat16, kMaxTileRows, kMaxRowsOfTwo,
                                         run<Pairs<kKind, kZeros>>};
  if (dtype == DType::kBFloat16) return &kPairs;
#endif
  return is_activation_dtype(dtype) ? &kFloats : nullptr;
}

}  // namespace codes
}  // namespace regatta::cpu::REGATTA_ISA

#include "gemm_codes_tiles.inl"
