// The microkernel of weights stored as e2m1 codes. See gemm_weight_only_mxfp4.cc.
#include "gemm_float.inl"

namespace regatta::cpu::REGATTA_ISA {
namespace e2m1 {

constexpr int kLanes = Vec::kLanes;
constexpr int kVectors = static_cast<int>(kPanel) / kLanes;  // vectors across a panel
constexpr int kStepValues = 8;                               // of k: a lane's four bytes
constexpr int kSteps = static_cast<int>(kBlock) / kStepValues;
constexpr int kStepBytes = static_cast<int>(kPanel) * kStepValues / 2;
constexpr int64_t kBlockBytes = kSteps * kStepBytes;

constexpr int kMaxTileRows = kLanes == 16 ? 12 : kLanes == 8 ? 2 : 1;
constexpr int kMaxRowsOfTwo = kLanes == 16 ? 4 : 1;

// Where value k of a step lies in a lane, in nibbles.
constexpr int nibble_of(int k) { return k % 2 * 4 + k / 2; }

// A vector of lanes of eight codes, and the values at one nibble of each.
#if REGATTA_VECTOR_BITS == 0
using Raw = uint32_t;
REGATTA_INLINE Raw load_raw(const uint8_t* p) {
  Raw raw;
  __builtin_memcpy(&raw, p, 4);
  return raw;
}
REGATTA_INLINE Vec values(Raw raw, int nibble) {
  static constexpr float kValues[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                        -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  return {kValues[raw >> (4 * nibble) & 15]};
}
#elif REGATTA_VECTOR_BITS == 256
using Raw = __m256i;
REGATTA_INLINE Raw load_raw(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
REGATTA_INLINE Vec values(Raw raw, int nibble) {
  // The index's low three bits count; the fourth is the sign.
  const __m256 magnitudes = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
  const __m256 magnitude = _mm256_permutevar8x32_ps(magnitudes, _mm256_srli_epi32(raw, 4 * nibble));
  const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(raw, 28 - 4 * nibble),
                                        _mm256_set1_epi32(static_cast<int>(0x80000000u)));
  return {_mm256_or_ps(magnitude, _mm256_castsi256_ps(sign))};
}
#else
using Raw = __m512i;
REGATTA_INLINE Raw load_raw(const uint8_t* p) { return _mm512_loadu_si512(p); }
REGATTA_INLINE Vec values(Raw raw, int nibble) {
  // The index's low four bits count.
  const __m512 table = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f,
                                      -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
  return {_mm512_permutexvar_ps(_mm512_srli_epi32(raw, static_cast<unsigned>(4 * nibble)), table)};
}
#endif

// Rows of float. A unit of k is one value.
struct Floats {
  using Row = float;
  using Value = Vec;
  static constexpr int kUnitValues = 1;
  static REGATTA_INLINE Vec broadcast(const float* unit) { return set1(*unit); }
  static REGATTA_INLINE Vec columns(Raw raw, int unit) { return values(raw, nibble_of(unit)); }
  static REGATTA_INLINE Vec add(Vec sum, Vec x, Vec columns) { return fma(x, columns, sum); }
};

#if REGATTA_HAS_BF16_DOT
// Rows of bf16. A unit of k is a pair of values.
struct Pairs {
  using Row = bf16;
  using Value = VecBf16;
  static constexpr int kUnitValues = 2;
  static REGATTA_INLINE VecBf16 broadcast(const bf16* unit) { return set1_pair(unit); }
  static REGATTA_INLINE VecBf16 columns(Raw raw, int unit) {
    // bf16 of the values, twice, so that bit 4 of an index does not count.
    constexpr uint16_t kValues[16] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040,
                                      0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0,
                                      0xc000, 0xc040, 0xc080, 0xc0c0};
    const __m512i table =
        _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(kValues)));
    const __m512i index = _mm512_srli_epi32(raw, static_cast<unsigned>(4 * unit));
    return {(__m512bh)_mm512_permutexvar_epi16(index, table)};
  }
  static REGATTA_INLINE Vec add(Vec sum, VecBf16 x, VecBf16 columns) {
    return dot_pairs(sum, columns, x);
  }
};
#endif

// Blocks of k of one or two panels times the rows of a tile.
template <class Row>
struct Piece {
  const Row* lines;         // of the tile, from the first block on
  int64_t line_step;        // values from one line to the next
  const uint8_t* codes[2];  // of the panels, from the first block on
  const float* scales[2];
  int64_t num_values;    // of k
  int64_t scales_ahead;  // floats from a block's scales to those to prefetch meanwhile
  float* sums;           // [panels][panel_stride], rows kPanel apart
  int64_t panel_stride;
  bool accumulate;  // else `sums` is written
  Ahead ahead;
};

template <class P, int kPanels, bool kIntoL2, int kRows>
void multiply(const Piece<typename P::Row>& piece) {
  using Row = typename P::Row;
  constexpr int kUnits = kStepValues / P::kUnitValues;  // of a step
  constexpr int kLineValues = static_cast<int>(kLineBytes / int64_t{sizeof(Row)});
  constexpr int kLineSteps = kLineValues / kStepValues;
  const int64_t codes_distance = kPanels == 2 ? piece.codes[1] - piece.codes[0] : 0;
  const int64_t scales_distance = kPanels == 2 ? piece.scales[1] - piece.scales[0] : 0;
  const uint8_t* codes = piece.codes[0];
  const float* scales = piece.scales[0];
  const Row* line = piece.lines;
  Ahead ahead = piece.ahead;
  bool first = !piece.accumulate;
  for (int64_t left = piece.num_values; left > 0; left -= kBlock) {
    Vec sum[kPanels][kRows][kVectors];
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 2
      for (int byte = 0; byte < 2; ++byte) {
        prefetch(scales + (p ? scales_distance : 0) + piece.scales_ahead + byte * 16);
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
          const typename P::Value columns = P::columns(load_raw(from + v * kLanes * 4), u);
#pragma GCC unroll 12
          for (int r = 0; r < kRows; ++r) sum[p][r][v] = P::add(sum[p][r][v], xs[r], columns);
        }
      } else {
        typename P::Value columns[kVectors];
#pragma GCC unroll 32
        for (int v = 0; v < kVectors; ++v) {
          columns[v] = P::columns(load_raw(from + v * kLanes * 4), u);
        }
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
#pragma GCC unroll 2
        for (int byte = 0; byte < kStepBytes; byte += 64) {
          prefetch_ahead<kIntoL2>(ahead.at + (p ? codes_distance : 0) + byte);
        }
#pragma GCC unroll 8
        for (int u = 0; u < count; ++u) unit(p, u, x + u * P::kUnitValues);
      }
      codes += kStepBytes;
      ahead.at += ahead.step;
    };
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
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
      float* out = piece.sums + p * piece.panel_stride;
#pragma GCC unroll 32
      for (int v = 0; v < kVectors; ++v) {
        const Vec scale = load(scales + (p ? scales_distance : 0) + v * kLanes);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
          float* to = out + r * kPanel + v * kLanes;
          store(to, fma(sum[p][r][v], scale, first ? zero() : load(to)));
        }
      }
    }
    first = false;
    scales += kPanel;
    line += kSteps / kLineSteps * piece.line_step;
  }
}

template <class P>
using MultiplyFn = void (*)(const Piece<typename P::Row>&);

template <class P, int kPanels, int... kRows>
MultiplyFn<P> multiply_in(int64_t rows, bool into_l2, std::integer_sequence<int, kRows...>) {
  static constexpr MultiplyFn<P> kTables[2][sizeof...(kRows)] = {
      {multiply<P, kPanels, false, kRows + 1>...},
      {multiply<P, kPanels, kMayStreamIntoL2, kRows + 1>...}};
  return kTables[into_l2][rows - 1];
}

template <class P>
void run(const PanelJob& job) {
  using Row = typename P::Row;
  constexpr int64_t kLineValues = kLineBytes / int64_t{sizeof(Row)};
  const PackedRows& rows = *job.rows;
  const int64_t num_blocks = rows.num_blocks();
  const auto* weight = static_cast<const uint8_t*>(job.weight->tensors[0].data);
  const auto* scales = static_cast<const float*>(job.weight->tensors[1].data);
  const int64_t num_tiles = job.tile_end - job.tile_begin;
  const int64_t num_rows = job.num_rows();
  Piece<Row> piece;
  piece.line_step = rows.tile_rows * kLineValues;
  piece.panel_stride = num_rows * kPanel;
  const auto set_panel = [&](int slot, int64_t panel, int64_t block) {
    piece.codes[slot] = weight + (panel * num_blocks + block) * kBlockBytes;
    piece.scales[slot] = scales + (panel * num_blocks + block) * kPanel;
  };
  const auto set_tile = [&](int64_t tile, int64_t block) {
    piece.lines = reinterpret_cast<const Row*>(rows.tile(tile)) +
                  block * (kBlock / kLineValues) * piece.line_step;
  };
  const bool two = job.num_panels == 2 && num_tiles == 1 && num_rows <= kMaxRowsOfTwo;
  piece.scales_ahead = (1 + stream_ahead_bytes(two ? 2 : 1) / kBlockBytes) * kPanel;
  if (two) {
    set_panel(0, job.panels[0], 0);
    set_panel(1, job.panels[1], 0);
    set_tile(job.tile_begin, 0);
    piece.num_values = rows.width;
    piece.sums = job.out;
    piece.accumulate = false;
    piece.ahead = ahead_of_streams(piece.codes[0], 2, kStepBytes);
    multiply_in<P, 2>(num_rows, piece.ahead.into_l2,
                      std::make_integer_sequence<int, kMaxRowsOfTwo>())(piece);
    return;
  }
  // A slab of the panel stays in L1 while the tiles pass over it, as in gemm_int8.inl.
  const int64_t slab = num_tiles == 1 ? num_blocks : (num_tiles <= 3 ? 8192 : 16384) / kBlockBytes;
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
        set_tile(tile, block);
        piece.sums = job.out + i * piece.panel_stride + t * rows.tile_rows * kPanel;
        multiply_in<P, 1>(std::min(rows.tile_rows, rows.num_rows - tile * rows.tile_rows),
                          piece.ahead.into_l2,
                          std::make_integer_sequence<int, kMaxTileRows>())(piece);
        piece.ahead.at += steps * piece.ahead.step;
      }
    }
  }
}

inline const GemmKernels* kernels(DType dtype) {
  static constexpr GemmKernels kFloats = {RowFormat::kFloat32, kMaxTileRows, kMaxRowsOfTwo,
                                          run<Floats>};
#if REGATTA_HAS_BF16_DOT
  static constexpr GemmKernels kPairs = {RowFormat::kBFloat16, kMaxTileRows, kMaxRowsOfTwo,
                                         run<Pairs>};
  if (dtype == DType::kBFloat16) return &kPairs;
#endif
  return is_activation_dtype(dtype) ? &kFloats : nullptr;
}

}  // namespace e2m1
}  // namespace regatta::cpu::REGATTA_ISA
