// The microkernels of weights stored as 8- or 4-bit codes (regatta/pack_quantized.h). Rows are int8
// (gemm.h: kInt8Blocks, kInt8Rows). See gemm_weight_only.cc; gemm_codes.inl has rows of floats.
#include "dot_int8.inl"
#include "gemm_float.inl"
#include "gemm_tiles.inl"

namespace regatta::cpu::REGATTA_ISA {
namespace int8 {

constexpr int kLanes = Vec::kLanes;
constexpr int kVectors = static_cast<int>(kPanel) / kLanes;  // vectors across a panel
constexpr int kBlockSteps = 4;                               // of 8 values of k

// Sums that fill the register file: integers and, where each block has its scale, as many floats.
constexpr int kMaxBlockRows = kLanes == 16 ? 6 : kLanes == 8 || kLanes == 4 ? 2 : 1;
constexpr int kMaxRowRows = kLanes == 16 ? 12 : kLanes == 8 ? 2 : kLanes == 4 ? 3 : 1;
constexpr int kMaxBlockRowsOfTwo = kLanes == 16 ? 3 : 1;
constexpr int kMaxRowRowsOfTwo = kLanes == 16 ? 4 : 1;

// With one scale per output channel sums still go into `sums` each 512 values of k: the same order
// of additions however K is cut into slabs, and integers that float holds exactly.
constexpr int64_t kChannelBlocks = 16;

// Blocks of k of one or two panels times the rows of a tile.
struct Piece {
  const int8_t* lines;      // of the tile, from its first line
  const BlockScale* metas;  // of the tile, from its first block
  int64_t tile_rows;        // stride of both
  const uint8_t* codes[2];  // of the panels, from first_block on
  const float* scales[2];   // of the panels, from the first block's group on
  int64_t first_block, num_blocks;
  int64_t group_blocks;  // blocks between two additions to `sums`
  int64_t scale_step;    // floats from a group's scales to the next's
  int64_t scales_ahead;  // floats from a group's scales to those to prefetch meanwhile
  float* sums;           // [panels][panel_stride], rows kPanel apart
  int64_t panel_stride;
  bool accumulate;  // else `sums` is written
  Ahead ahead;
};

// kBits: of a code. kZeros: groups have zero points. kBlockScales: each block of a row has its own
// scale; else the caller multiplies by the row's at the end.
template <int kBits, bool kZeros, bool kBlockScales, int kPanels, bool kIntoL2, int kRows>
void multiply(const Piece& piece) {
  constexpr int kStepBytes = 32 * kBits;  // of a panel
  constexpr bool kSigned = kBits == 8 && kSignedCodes;
  const int64_t line_step = piece.tile_rows * kLineBytes;
  const int64_t panel_distance = kPanels == 2 ? piece.codes[1] - piece.codes[0] : 0;
  const uint8_t* codes = piece.codes[0];
  Ahead ahead = piece.ahead;
  const int64_t end = piece.first_block + piece.num_blocks;
  bool first = !piece.accumulate;
  int64_t group = 0;
  for (int64_t begin = piece.first_block; begin < end; begin += piece.group_blocks, ++group) {
    const int64_t group_end = begin + piece.group_blocks < end ? begin + piece.group_blocks : end;
    Vec total[kPanels][kRows][kVectors];
    Ints sum[kPanels][kRows][kVectors];
    Vec value_sum[kRows];
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
      const float* next = piece.scales[p] + group * piece.scale_step + piece.scales_ahead;
#pragma GCC unroll 4
      for (int v = 0; v < (kZeros ? 4 : 2); ++v) prefetch(next + v * 16);
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      value_sum[r] = zero();
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 32
        for (int v = 0; v < kVectors; ++v) {
          total[p][r][v] = zero();
          sum[p][r][v] = set_ints(0);
        }
      }
    }
    for (int64_t block = begin; block < group_end; ++block) {
      const int8_t* x = piece.lines + (block >> 1) * line_step + (block & 1) * kBlock;
      const BlockScale* metas = piece.metas + block * piece.tile_rows;
      if (!kZeros) {
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
          // Codes less 128 are the weights, and nothing is to be taken off.
          const Ints start = set_ints(kSigned ? 0 : metas[r].start);
#pragma GCC unroll 2
          for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 32
            for (int v = 0; v < kVectors; ++v) {
              sum[p][r][v] = kBlockScales ? start : add(sum[p][r][v], start);
            }
          }
        }
      } else if (kBlockScales) {
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
          value_sum[r] = value_sum[r] + set1(metas[r].value_sum);
#pragma GCC unroll 2
          for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 32
            for (int v = 0; v < kVectors; ++v) sum[p][r][v] = set_ints(0);
          }
        }
      }
#pragma GCC unroll 2
      for (int step = 0; step < kBlockSteps; ++step) {
#pragma GCC unroll 2
        for (int p = 0; p < kPanels; ++p) {
          const uint8_t* from = codes + (p ? panel_distance : 0);
#pragma GCC unroll 4
          for (int byte = 0; byte < kStepBytes; byte += 64) {
            prefetch_ahead<kIntoL2>(ahead.at + (p ? panel_distance : 0) + byte);
          }
          Codes four[2][kVectors];  // k = 0 .. 3 and 4 .. 7 of the step
#pragma GCC unroll 32
          for (int v = 0; v < kVectors; ++v) {
            if constexpr (kBits == 8) {
              four[0][v] = load_codes(from + v * kLanes * 4);
              four[1][v] = load_codes(from + 128 + v * kLanes * 4);
            } else {
              load_nibbles(from + v * kLanes * 4, four[0][v], four[1][v]);
            }
          }
#pragma GCC unroll 2
          for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 12
            for (int r = 0; r < kRows; ++r) {
              const Bytes bytes = load_bytes(x + r * kLineBytes + step * 8 + half * 4);
#pragma GCC unroll 32
              for (int v = 0; v < kVectors; ++v) {
                sum[p][r][v] = dot(sum[p][r][v], four[half][v], bytes);
              }
            }
          }
        }
        codes += kStepBytes;
        ahead.at += ahead.step;
      }
      if (kBlockScales) {
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
          const Vec scale = set1(metas[r].scale);
#pragma GCC unroll 2
          for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 32
            for (int v = 0; v < kVectors; ++v) {
              total[p][r][v] = fma(to_vec(sum[p][r][v]), scale, total[p][r][v]);
            }
          }
        }
      }
    }
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
      const float* scales = piece.scales[p] + group * piece.scale_step;
      float* out = piece.sums + p * piece.panel_stride;
#pragma GCC unroll 32
      for (int v = 0; v < kVectors; ++v) {
        const Vec scale = load(scales + v * kLanes);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
          float* to = out + r * kPanel + v * kLanes;
          Vec value = kBlockScales ? total[p][r][v] : to_vec(sum[p][r][v]);
          if (kZeros && kSigned) value = fma(value_sum[r], set1(128.0f), value);
          Vec result = fma(value, scale, first ? zero() : load(to));
          if (kZeros) result = fnma(value_sum[r], load(scales + kPanel + v * kLanes), result);
          store(to, result);
        }
      }
    }
    first = false;
  }
}

using MultiplyFn = void (*)(const Piece&);

template <int kBits, bool kZeros, bool kBlockScales, int kPanels, int... kRows>
MultiplyFn multiply_in(int64_t rows, bool into_l2, std::integer_sequence<int, kRows...>) {
  static constexpr MultiplyFn kTables[2][sizeof...(kRows)] = {
      {multiply<kBits, kZeros, kBlockScales, kPanels, false, kRows + 1>...},
      {multiply<kBits, kZeros, kBlockScales, kPanels, kMayStreamIntoL2, kRows + 1>...}};
  return kTables[into_l2][rows - 1];
}

// Where the panels, scales and rows of a job lie.
struct PanelWalk {
  PanelWalk(const PanelJob& job, int bits, bool zeros)
      : weight(static_cast<const uint8_t*>(job.weight->tensors[0].data)),
        scales(static_cast<const float*>(job.weight->tensors[1].data)) {
    layout.bits = bits;
    layout.in_features = job.weight->in_features;
    layout.out_features = job.weight->out_features;
    layout.num_groups = job.weight->tensors[1].shape[1];
    layout.has_zeros = zeros;
    channel = layout.num_groups == 1;
    num_blocks = layout.num_blocks();
    group_blocks = channel ? kChannelBlocks : layout.group_size() / kBlock;
    group_floats = channel ? 0 : (zeros ? 2 : 1) * kPanel;
  }
  // What is the same for all pieces of the job.
  void start(const PackedRows& rows, int num_streams, Piece* piece) const {
    piece->tile_rows = rows.tile_rows;
    piece->group_blocks = group_blocks;
    piece->scale_step = group_floats;
    piece->scales_ahead =
        (1 + stream_ahead_bytes(num_streams) / (group_blocks * layout.block_bytes())) *
        group_floats;
  }
  void set_panel(int slot, int64_t panel, int64_t block, Piece* piece) const {
    piece->codes[slot] = weight + panel * layout.panel_bytes() + block * layout.block_bytes();
    piece->scales[slot] =
        scales + panel * layout.panel_scales() + block / group_blocks * group_floats;
  }
  void set_tile(const PackedRows& rows, int64_t tile, Piece* piece) const {
    piece->lines = reinterpret_cast<const int8_t*>(rows.tile(tile));
    piece->metas = rows.block_scales(tile);
  }

  QuantizedLayout layout;
  const uint8_t* weight;
  const float* scales;
  bool channel;          // one scale per output channel
  int64_t num_blocks;    // of K
  int64_t group_blocks;  // between two additions to the job's output
  int64_t group_floats;  // of scales; 0 per channel
};

// Products of int8 rows with one scale each, finished.
inline void scale_rows(const PanelJob& job) {
  const PackedRows& rows = *job.rows;
  const int64_t num_rows = job.num_rows();
  for (int i = 0; i < job.num_panels; ++i) {
    for (int64_t r = 0; r < num_rows; ++r) {
      const int64_t row = job.first_row() + r, tile = row / rows.tile_rows;
      const Vec scale = set1(rows.block_scales(tile)[row - tile * rows.tile_rows].scale);
      float* out = job.out + (i * num_rows + r) * kPanel;
      for (int v = 0; v < kVectors; ++v) store(out + v * kLanes, load(out + v * kLanes) * scale);
    }
  }
}

template <int kBits, bool kZeros, bool kBlockScales>
void run(const PanelJob& job) {
  constexpr int kMaxRows = kBlockScales ? kMaxBlockRows : kMaxRowRows;
  constexpr int kMaxOfTwo = kBlockScales ? kMaxBlockRowsOfTwo : kMaxRowRowsOfTwo;
  constexpr int64_t kStepBytes = 32 * kBits;
  constexpr int64_t kBlockBytes = kStepBytes * kBlockSteps;
  const PackedRows& rows = *job.rows;
  const PanelWalk walk(job, kBits, kZeros);
  const int64_t num_tiles = job.tile_end - job.tile_begin;
  const int64_t num_rows = job.num_rows();
  Piece piece;
  const bool two = job.num_panels == 2 && num_tiles == 1 && num_rows <= kMaxOfTwo;
  walk.start(rows, two ? 2 : 1, &piece);
  piece.panel_stride = num_rows * kPanel;
  if (two) {
    walk.set_panel(0, job.panels[0], 0, &piece);
    walk.set_panel(1, job.panels[1], 0, &piece);
    walk.set_tile(rows, job.tile_begin, &piece);
    piece.first_block = 0;
    piece.num_blocks = walk.num_blocks;
    piece.sums = job.out;
    piece.accumulate = false;
    piece.ahead = ahead_of_streams(piece.codes[0], 2, kStepBytes);
    multiply_in<kBits, kZeros, kBlockScales, 2>(
        num_rows, piece.ahead.into_l2, std::make_integer_sequence<int, kMaxOfTwo>())(piece);
  } else {
    // A slab of the panel stays in L1 while the tiles pass over it: 16 KiB, less for two or three
    // tiles (gemm_dense.inl says why); whole groups.
    const int64_t wanted = (num_tiles <= 3 ? 8192 : 16384) / kBlockBytes;
    const int64_t slab_groups = std::max<int64_t>(1, wanted / walk.group_blocks);
    const bool once = num_rows <= kMaxRows;  // pass rows over the panel
    const int64_t slab = once ? walk.num_blocks : slab_groups * walk.group_blocks;
    for (int i = 0; i < job.num_panels; ++i) {
      for (int64_t block = 0; block < walk.num_blocks; block += slab) {
        walk.set_panel(0, job.panels[i], block, &piece);
        piece.first_block = block;
        piece.num_blocks = std::min(slab, walk.num_blocks - block);
        piece.accumulate = block > 0;
        const int64_t slab_bytes = piece.num_blocks * kBlockBytes;
        const int64_t steps = piece.num_blocks * kBlockSteps;
        piece.ahead = once ? ahead_of_streams(piece.codes[0], 1, kStepBytes)
                           : ahead_of_slab(piece.codes[0], slab_bytes, num_tiles * steps);
        for (int64_t t = 0; t < num_tiles; ++t) {
          const int64_t tile = job.tile_begin + t;
          walk.set_tile(rows, tile, &piece);
          piece.sums = job.out + i * piece.panel_stride + t * rows.tile_rows * kPanel;
          int64_t left = std::min(rows.tile_rows, rows.num_rows - tile * rows.tile_rows);
          while (left > 0) {  // more than once where tiles are AMX's
            const int64_t parts = (left + kMaxRows - 1) / kMaxRows,
                          part = (left + parts - 1) / parts;
            multiply_in<kBits, kZeros, kBlockScales, 1>(
                part, piece.ahead.into_l2, std::make_integer_sequence<int, kMaxRows>())(piece);
            piece.lines += part * kLineBytes;
            piece.metas += part;
            piece.sums += part * kPanel;
            left -= part;
          }
          piece.ahead.at += steps * piece.ahead.step;
        }
      }
    }
  }
  if (!kBlockScales) scale_rows(job);
}

}  // namespace int8
}  // namespace regatta::cpu::REGATTA_ISA

#include "gemm_int8_quads.inl"

namespace regatta::cpu::REGATTA_ISA {
namespace int8 {

template <int kBits, bool kBlockScales>
inline const GemmKernels* int8_kernels(bool zeros) {
  constexpr RowFormat kFormat = kBlockScales ? RowFormat::kInt8Blocks : RowFormat::kInt8Rows;
  constexpr int kMaxRows = kBlockScales ? kMaxBlockRows : kMaxRowRows;
  constexpr int kMaxOfTwo = kBlockScales ? kMaxBlockRowsOfTwo : kMaxRowRowsOfTwo;
  static constexpr GemmKernels kSymmetric = {kFormat, kMaxRows, kMaxOfTwo,
                                             run<kBits, false, kBlockScales>};
#if REGATTA_HAS_QUADS
  // A tile of fours, or fewer rows, by fours.
  const auto of_many = [](auto kernel, const GemmKernels& few) {
    return GemmKernels{few.row_format, kQuadRows,        kMaxRows, kernel,
                       few.block_rows, few.cached_bytes, &few};
  };
  static const GemmKernels kSymmetricMany =
      of_many(run_quads<kBits, false, kBlockScales>, kSymmetric);
#else
  constexpr const GemmKernels& kSymmetricMany = kSymmetric;
#endif
  if constexpr (kBlockScales) {
    static constexpr GemmKernels kWithZeros = {kFormat, kMaxRows, kMaxOfTwo,
                                               run<kBits, true, kBlockScales>};
#if REGATTA_HAS_QUADS
    static const GemmKernels kZerosMany = of_many(run_quads<kBits, true, kBlockScales>, kWithZeros);
#else
    constexpr const GemmKernels& kZerosMany = kWithZeros;
#endif
    return zeros ? &kZerosMany : &kSymmetricMany;
  }
  return zeros ? nullptr : &kSymmetricMany;
}

#if REGATTA_HAS_TILES
template <int kBits>
inline const GemmKernels* tile_kernels(DType dtype);  // gemm_int8_tiles.inl
#endif

// kBits: of the scheme's codes; kByToken: activations have one scale per row, else per block.
template <int kBits, bool kByToken>
inline const GemmKernels* kernels([[maybe_unused]] Isa isa, DType dtype, bool zeros) {
#if REGATTA_HAS_TILES
  if constexpr (kByToken) {
    if (has_tiles(isa)) return tile_kernels<kBits>(dtype);
  }
#endif
  return is_activation_dtype(dtype) ? int8_kernels<kBits, !kByToken>(zeros) : nullptr;
}

}  // namespace int8
}  // namespace regatta::cpu::REGATTA_ISA

#include "gemm_int8_tiles.inl"
