// Rows of float (or pairs of bfloat16) times panels of the same: the microkernel of the "dense"
// scheme, and of what is first expanded to float. See gemm_dense.cc.
namespace regatta::cpu::REGATTA_ISA {

// What a microkernel prefetches meanwhile: of panel 0 from `at` on, `step` bytes further with each
// of its steps. Where CPUs may want L2, kernels are compiled for either: a branch costs up to 15 %.
constexpr bool kMayStreamIntoL2 = REGATTA_HAS_STREAMS;
struct Ahead {
  const char* at;
  int64_t step;
  bool into_l2;  // else L1
};
template <bool kIntoL2>
REGATTA_INLINE void prefetch_ahead(const char* p) {
  if constexpr (kIntoL2) {
    prefetch_l2(p);
  } else {
    prefetch(p);
  }
}

// Of panels that one tile of rows passes over, each a stream from memory of which a step reads
// `step` bytes. See gemm_dense.cc.
inline bool into_l2() { return kMayStreamIntoL2 && streams_into_l2(); }
inline int64_t stream_ahead_bytes(int num_streams) {
  return into_l2() ? (num_streams == 2 ? 2048 : 6144) : 8192 / num_streams;
}
inline Ahead ahead_of_streams(const void* panel, int num_streams, int64_t step) {
  return {static_cast<const char*>(panel) + stream_ahead_bytes(num_streams), step, into_l2()};
}

// Of a slab that several tiles pass over: the slab behind it, in `num_steps` steps.
inline Ahead ahead_of_slab(const void* slab, int64_t bytes, int64_t num_steps) {
  return {static_cast<const char*>(slab) + bytes, bytes / num_steps, false};
}

namespace dense {

constexpr int kLanes = Vec::kLanes;
constexpr int kVectors = static_cast<int>(kPanel) / kLanes;  // vectors across a panel
// Accumulators fill the register file: 12 x 2 of 32 (avx512), 3 x 4 of 16 (avx2), 3 x 8
// of 32 (neon).
constexpr int kMaxTileRows = kLanes == 16 ? 12 : kLanes == 8 || kLanes == 4 ? 3 : 1;
// Two panels at once double the streams from memory when few rows leave registers free.
constexpr int kMaxRowsOfTwo = kLanes == 16 ? 4 : 1;

// How rows meet stored weights. A unit of k is one value, or one pair of bf16; a line of packed
// rows holds 16 units, and kUnits of them lie together in a column of a panel.
template <class T>
struct Product {  // rows of float, weights of T
  using Row = float;
  using Stored = T;
  using Value = Vec;
  static constexpr int kUnitValues = 1;
  static constexpr int kUnits = std::is_same_v<T, bf16> ? 2 : 1;
  static REGATTA_INLINE Vec broadcast(const float* unit) { return set1(*unit); }
  // Unit `u` of kUnits, for vector `v` of the panel's columns.
  static REGATTA_INLINE Vec load_columns(const T* b, int v, int u) {
    if constexpr (kUnits == 2) {
      Vec even, odd;
      load_2k(b + v * kLanes * 2, even, odd);
      return u ? odd : even;
    } else {
      return load(b + v * kLanes);
    }
  }
  static REGATTA_INLINE Vec add(Vec sum, Vec x, Vec columns) { return fma(x, columns, sum); }
};

#if REGATTA_HAS_BF16_DOT
struct PairProduct {  // rows and weights of bf16
  using Row = bf16;
  using Stored = bf16;
  using Value = VecBf16;
  static constexpr int kUnitValues = 2;
  static constexpr int kUnits = 1;
  static REGATTA_INLINE VecBf16 broadcast(const bf16* unit) { return set1_pair(unit); }
  static REGATTA_INLINE VecBf16 load_columns(const bf16* b, int v, int) {
    return load_pairs(b + v * 2 * kLanes);
  }
  static REGATTA_INLINE Vec add(Vec sum, VecBf16 x, VecBf16 columns) {
    return dot_pairs(sum, columns, x);
  }
};
#endif

#if REGATTA_HAS_SWAPPED_PAIRS
// The same sums of rows in kSwappedPairs, by multiply-adds of float.
struct SwappedProduct : Product<bf16> {
  static REGATTA_INLINE Vec load_columns(const bf16* b, int v, int u) {
    return Product<bf16>::load_columns(b, v, 1 - u);
  }
};
#endif

// The microkernel: sums[p][r][0 .. 32) (+)= sum over units k of rows[r][k] * panels[p][k][0 .. 32).
// line: the tile at k = 0, `line_step` values from one line of 16 units to the next.
// b0, b1: the panels at k = 0 (b1 is null if kPanels is 1). num_units is a multiple of P::kUnits.
// sums: [kPanels][panel_stride], rows kPanel apart; read first if `accumulate`.
template <class P, int kPanels, bool kIntoL2, int kRows>
void multiply(const typename P::Row* line, int64_t line_step, const typename P::Stored* b0,
              const typename P::Stored* b1, int64_t num_units, float* sums, int64_t panel_stride,
              bool accumulate, Ahead ahead) {
  constexpr int kUnitStored = static_cast<int>(kPanel) * P::kUnitValues;
  constexpr int kStepBytes = P::kUnits * kUnitStored * static_cast<int>(sizeof(*b0));
  const int64_t panel_distance = (b1 - b0) * int64_t{sizeof(*b0)};
  Vec acc[kPanels][kRows][kVectors];
#pragma GCC unroll 2
  for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 32
      for (int v = 0; v < kVectors; ++v) {
        acc[p][r][v] =
            accumulate ? load(sums + p * panel_stride + r * kPanel + v * kLanes) : zero();
      }
    }
  }
  const auto step = [&](const typename P::Row* first) REGATTA_LAMBDA_INLINE {
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
      const typename P::Stored* b = p ? b1 : b0;
#pragma GCC unroll 4
      for (int byte = 0; byte < kStepBytes; byte += 64) {
        prefetch_ahead<kIntoL2>(ahead.at + (p ? panel_distance : 0) + byte);
      }
#pragma GCC unroll 2
      for (int u = 0; u < P::kUnits; ++u) {
        const auto x = [&](int r) REGATTA_LAMBDA_INLINE {
          return P::broadcast(first + (r * 16 + u) * P::kUnitValues);
        };
        // Held in registers: the rows' values or the panel's, whichever are fewer.
        if constexpr (kRows < kVectors) {
          typename P::Value xs[kRows];
#pragma GCC unroll 12
          for (int r = 0; r < kRows; ++r) xs[r] = x(r);
#pragma GCC unroll 32
          for (int v = 0; v < kVectors; ++v) {
            const typename P::Value columns = P::load_columns(b, v, u);
#pragma GCC unroll 12
            for (int r = 0; r < kRows; ++r) acc[p][r][v] = P::add(acc[p][r][v], xs[r], columns);
          }
        } else {
          typename P::Value columns[kVectors];
#pragma GCC unroll 32
          for (int v = 0; v < kVectors; ++v) columns[v] = P::load_columns(b, v, u);
#pragma GCC unroll 12
          for (int r = 0; r < kRows; ++r) {
            const typename P::Value value = x(r);
#pragma GCC unroll 32
            for (int v = 0; v < kVectors; ++v) {
              acc[p][r][v] = P::add(acc[p][r][v], value, columns[v]);
            }
          }
        }
      }
    }
    ahead.at += ahead.step;
    b0 += P::kUnits * kUnitStored;
    if (kPanels == 2) b1 += P::kUnits * kUnitStored;
  };
  for (; num_units >= 16; num_units -= 16, line += line_step) {
#pragma GCC unroll 2
    for (int i = 0; i < 16; i += P::kUnits) step(line + i * P::kUnitValues);
  }
  for (int i = 0; i < num_units; i += P::kUnits) step(line + i * P::kUnitValues);
#pragma GCC unroll 2
  for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 32
      for (int v = 0; v < kVectors; ++v) {
        store(sums + p * panel_stride + r * kPanel + v * kLanes, acc[p][r][v]);
      }
    }
  }
}

template <class P>
using MultiplyFn = void (*)(const typename P::Row*, int64_t, const typename P::Stored*,
                            const typename P::Stored*, int64_t, float*, int64_t, bool, Ahead);

template <class P, int kPanels, int... kRows>
MultiplyFn<P> multiply_in(int64_t rows, bool into_l2, std::integer_sequence<int, kRows...>) {
  static constexpr MultiplyFn<P> kTables[2][sizeof...(kRows)] = {
      {multiply<P, kPanels, false, kRows + 1>...},
      {multiply<P, kPanels, kMayStreamIntoL2, kRows + 1>...}};
  return kTables[into_l2][rows - 1];
}
template <class P>
MultiplyFn<P> multiply_one(int64_t rows, bool into_l2) {
  return multiply_in<P, 1>(rows, into_l2, std::make_integer_sequence<int, kMaxTileRows>());
}
template <class P>
MultiplyFn<P> multiply_two(int64_t rows, bool into_l2) {
  return multiply_in<P, 2>(rows, into_l2, std::make_integer_sequence<int, kMaxRowsOfTwo>());
}

// Units of k whose slab of a panel stays in L1 while all tiles of rows pass over it: 256 units are
// 32 KiB. One tile needs no slabs. With two or three tiles the time still goes into reading the
// panel from memory: slabs as long as what is prefetched ahead let the next one arrive meanwhile
// (16 rows: 20 % faster).
constexpr int64_t kMaxSlab = 256;
inline int64_t slab_units(int64_t num_tiles, int64_t num_units) {
  return num_tiles == 1 ? num_units : num_tiles <= 3 ? 64 : kMaxSlab;
}

// `num_units` of a panel as floats, [num_units][kPanel].
template <class P>
void expand(const typename P::Stored* b, int64_t num_units, float* out) {
  constexpr int kStepStored = P::kUnits * static_cast<int>(kPanel);
  for (int64_t k = 0; k < num_units; k += P::kUnits, b += kStepStored) {
    for (int u = 0; u < P::kUnits; ++u, out += kPanel) {
      for (int v = 0; v < kVectors; ++v) store(out + v * kLanes, P::load_columns(b, v, u));
    }
  }
}

// A slab of a panel, `num_units` from unit `k` on, times the job's tiles. Meanwhile `ahead` is
// prefetched, for each tile from where the one before it ended.
template <class P>
void multiply_tiles(const PanelJob& job, int64_t k, const typename P::Stored* slab,
                    int64_t num_units, float* sums, Ahead ahead) {
  const PackedRows& rows = *job.rows;
  const int64_t line_step = rows.tile_rows * 16 * P::kUnitValues;
  for (int64_t t = job.tile_begin; t < job.tile_end; ++t) {
    const char* lines = rows.tile(t) + k / 16 * rows.tile_rows * kLineBytes;
    multiply_one<P>(std::min(rows.tile_rows, rows.num_rows - t * rows.tile_rows), ahead.into_l2)(
        reinterpret_cast<const typename P::Row*>(lines), line_step, slab, nullptr, num_units, sums,
        0, k > 0, ahead);
    sums += rows.tile_rows * kPanel;
    ahead.at += num_units / P::kUnits * ahead.step;
  }
}

}  // namespace dense
}  // namespace regatta::cpu::REGATTA_ISA
