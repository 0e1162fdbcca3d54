// The "dense" scheme over the microkernels of gemm_float.inl. See gemm_dense.cc.
#include "gemm_float.inl"
#include "gemm_tiles.inl"

namespace regatta::cpu::REGATTA_ISA {
namespace dense {

template <class P>
void run(const PanelJob& job) {
  constexpr bool kExpands = !std::is_same_v<typename P::Stored, typename P::Row>;
  constexpr int64_t kTilesToExpand = 3;
  constexpr int64_t kUnitStored = kPanel * P::kUnitValues;
  constexpr int64_t kStepValues = P::kUnits * P::kUnitValues;
  constexpr int64_t kStepBytes = P::kUnits * kUnitStored * int64_t{sizeof(typename P::Stored)};
  const PackedRows& rows = *job.rows;
  const int64_t num_units = (rows.width + kStepValues - 1) / kStepValues * P::kUnits;
  const auto* weight = static_cast<const typename P::Stored*>(job.weight->tensors[0].data);
  const auto panel = [&](int i) { return weight + job.panels[i] * num_units * kUnitStored; };
  const int64_t num_tiles = job.tile_end - job.tile_begin;
  const int64_t num_rows = job.num_rows();
  if (job.num_panels == 2 && num_tiles == 1 && num_rows <= kMaxRowsOfTwo) {
    const auto* lines = reinterpret_cast<const typename P::Row*>(rows.tile(job.tile_begin));
    const Ahead ahead = ahead_of_streams(panel(0), 2, kStepBytes);
    multiply_two<P>(num_rows, ahead.into_l2)(lines, rows.tile_rows * 16 * P::kUnitValues, panel(0),
                                             panel(1), num_units, job.out, num_rows * kPanel, false,
                                             ahead);
    return;
  }
  const int64_t step = slab_units(num_tiles, num_units);
  for (int i = 0; i < job.num_panels; ++i) {
    float* sums = job.out + i * num_rows * kPanel;
    for (int64_t k = 0; k < num_units; k += step) {
      const int64_t depth = std::min(step, num_units - k);
      const typename P::Stored* slab = panel(i) + k * kUnitStored;
      const int64_t slab_bytes = depth / P::kUnits * kStepBytes;
      if constexpr (kExpands) {
        if (num_tiles >= kTilesToExpand) {  // once, not for each tile
          alignas(64) float expanded[kMaxSlab * kPanel];
          expand<P>(slab, depth, expanded);
          multiply_tiles<Product<float>>(job, k, expanded, depth, sums,
                                         ahead_of_slab(slab, slab_bytes, num_tiles * depth));
          continue;
        }
      }
      multiply_tiles<P>(job, k, slab, depth, sums,
                        num_tiles == 1
                            ? ahead_of_streams(slab, 1, kStepBytes)
                            : ahead_of_slab(slab, slab_bytes, num_tiles * depth / P::kUnits));
    }
  }
}

#if REGATTA_HAS_SWAPPED_PAIRS
inline void run_swapped(const PanelJob& job) {
  const FlushDenormals flush;
  run<SwappedProduct>(job);
}
#endif

#if REGATTA_HAS_TILES
// The sums of tiles for one row and one or two panels, by vectors: they wait less than tiles do for
// what they read from memory.
template <int kPanels>
void run_row(const PanelJob& job) {
  constexpr int64_t kStepPairs = 16, kAheadBytes = 2048;
  const FlushDenormals flush;
  const int64_t num_pairs = (job.rows->width + 1) / 2;
  const auto* weight = static_cast<const bf16*>(job.weight->tensors[0].data);
  const bf16 *columns[kPanels], *ahead[kPanels];
  for (int p = 0; p < kPanels; ++p) {
    columns[p] = weight + job.panels[p] * num_pairs * 2 * kPanel;
    ahead[p] = columns[p] + kAheadBytes / 2;
  }
  const auto* row = reinterpret_cast<const bf16*>(job.rows->tile(job.tile_begin));
  Vec total[kPanels][kVectors];
  for (auto& of_panel : total) {
    for (Vec& sum : of_panel) sum = zero();
  }
  alignas(64) float values[2][kStepPairs];
  Vec even[kPanels][kVectors], odd[kPanels][kVectors];
  const auto add = [&](int64_t k) REGATTA_LAMBDA_INLINE {
    const Vec x = set1(values[0][k]), y = set1(values[1][k]);
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = (k * kVectors + v) * 2 * kLanes;
        prefetch(ahead[p] + at);
        Vec pairs = load(reinterpret_cast<const float*>(columns[p] + at)), evens, odds;
        __asm__("" : "+v"(pairs.v));  // else loaded twice
        split_pairs(pairs, evens, odds);
        even[p][v] = fma(x, evens, even[p][v]);
        odd[p][v] = fma(y, odds, odd[p][v]);
      }
    }
    __asm__ volatile("" ::: "memory");  // else prefetches gather
  };
  for (int64_t pair = 0; pair < num_pairs; pair += kStepPairs) {
    load_2k(row, even[0][0], odd[0][0]);
    row += job.rows->tile_rows * 2 * kStepPairs;
    store(values[0], even[0][0]);
    store(values[1], odd[0][0]);
    __asm__("" : "+m"(values));  // else each is shuffled out of a register
    for (int p = 0; p < kPanels; ++p) {
      for (int v = 0; v < kVectors; ++v) even[p][v] = odd[p][v] = zero();
    }
    if (num_pairs - pair >= kStepPairs) {
#pragma GCC unroll 16
      for (int64_t k = 0; k < kStepPairs; ++k) add(k);
    } else {
      for (int64_t k = 0; k < num_pairs - pair; ++k) add(k);
      for (int p = 0; p < kPanels; ++p) {
        for (int v = 0; v < kVectors; ++v) {  // tiles add zeros to them: -0 becomes 0
          even[p][v] = even[p][v] + zero();
          odd[p][v] = odd[p][v] + zero();
        }
      }
    }
    for (int p = 0; p < kPanels; ++p) {
      for (int v = 0; v < kVectors; ++v) total[p][v] = total[p][v] + (even[p][v] + odd[p][v]);
      columns[p] += kStepPairs * 2 * kPanel;
      ahead[p] += kStepPairs * 2 * kPanel;
    }
  }
  for (int p = 0; p < kPanels; ++p) {
    for (int v = 0; v < kVectors; ++v) store(job.out + p * kPanel + v * kLanes, total[p][v]);
  }
}

// `count` values of k of a panel of float16 as columns for tiles, in pairs; zeros behind them fill
// a step.
inline void stage_halves(const bf16* from, int64_t count, char* to) {
  auto* out = reinterpret_cast<bf16*>(to);
  for (; count > 1; count -= 2, from += 2 * kPanel, out += 2 * kPanel) {
    interleave(out, from, from + kPanel, kPanel);
  }
  bf16 last[2 * kPanel] = {};
  if (count > 0) {
    __builtin_memcpy(last, from, sizeof(last) / 2);
    interleave(out, last, last + kPanel, kPanel);
    out += 2 * kPanel;
  }
  const int64_t left = reinterpret_cast<char*>(out) - to;
  const int64_t whole = (left + tiles::kStepBytes - 1) / tiles::kStepBytes * tiles::kStepBytes;
  __builtin_memset(out, 0, whole - left);
}

// bfloat16 by tiles, any number of rows. Rows pass over a slab of the panel in L1 by two tiles at a
// time; meanwhile each job fetches its part of the next panel. A few rows take two panels at once.
// kHalves: float16, which is stored by k alone and becomes pairs a slab at a time.
template <tiles::Factors kFactors>
void run_tiles(const PanelJob& job) {
  constexpr bool kHalves = kFactors == tiles::Factors::kHalves;
  const PackedRows& rows = *job.rows;
  const int64_t num_pairs = (rows.width + 1) / 2, line_bytes = rows.tile_rows * kLineBytes;
  const int64_t panel_bytes = kHalves ? rows.width * 64 : num_pairs * tiles::kPanelStride;
  const int64_t num_steps = (num_pairs + 15 * kHalves) / 16;
  const int64_t rest = kHalves ? 0 : num_pairs % 16;  // pairs of a step
  const auto* weight = static_cast<const char*>(job.weight->tensors[0].data);
  const int64_t num_tiles = job.tile_end - job.tile_begin, num_rows = job.num_rows();
  const bool two_panels = !kHalves && job.num_panels == 2 && num_tiles == 1;
  if (num_rows == 1 && !kHalves) return two_panels ? run_row<2>(job) : run_row<1>(job);
  tiles::Shapes shapes;
  alignas(64) char last[2][tiles::kStepBytes];  // the rest of the panels, and zeros behind it
  alignas(64) char staged[kHalves ? tiles::kSlabSteps * tiles::kStepBytes : 1];
  for (int i = 0; i < job.num_panels; i += two_panels ? 2 : 1) {
    const char* panel = weight + job.panels[i] * panel_bytes;
    const char* other = two_panels ? weight + job.panels[1] * panel_bytes : nullptr;
    if (rest) {
      for (int p = 0; p < (two_panels ? 2 : 1); ++p) {
        const int64_t bytes = rest * tiles::kPanelStride;
        __builtin_memcpy(last[p], (p ? other : panel) + panel_bytes - bytes, bytes);
        __builtin_memset(last[p] + bytes, 0, tiles::kStepBytes - bytes);
      }
    }
    const int64_t slabs = tiles::num_slabs(kHalves ? tiles::kFewestOfSlabs : num_tiles, num_steps);
    for (int64_t slab = 0, step = 0; slab < slabs + (rest > 0); ++slab) {
      const bool at_rest = slab == slabs;
      const int64_t end = at_rest ? num_steps + 1 : num_steps * (slab + 1) / slabs;
      const char* columns = at_rest ? last[0] : kHalves ? staged : panel + step * tiles::kStepBytes;
      if (kHalves) {
        stage_halves(reinterpret_cast<const bf16*>(panel + step * tiles::kStepBytes),
                     std::min(rows.width, end * 32) - step * 32, staged);
      }
      const char* more_columns = !other    ? nullptr
                                 : at_rest ? last[1]
                                           : other + step * tiles::kStepBytes;
      Ahead ahead = tiles::ahead_of_slab(panel + step * tiles::kStepBytes, tiles::kStepBytes,
                                         end - step, num_tiles, job.num_panels);
      for (int64_t t = 0; t < num_tiles; t += 2) {
        const int64_t first = t * rows.tile_rows;
        const int64_t second = first + rows.tile_rows;  // row of the second tile
        const char* lines = rows.tile(job.tile_begin + t) + step * line_bytes;
        float* sums = job.out + (i * num_rows + first) * kPanel;
        const auto multiply = [&](auto row_tiles, auto panels, const char* more_lines,
                                  float* more_sums) REGATTA_LAMBDA_INLINE {
          constexpr int kTwo = row_tiles.value * panels.value;
          step > 0 ? tiles::load_sums<kTwo>(sums, more_sums) : tiles::zero_sums<kTwo>();
          tiles::multiply<kFactors, row_tiles.value, panels.value>(
              lines, more_lines, line_bytes, columns, more_columns, end - step, ahead);
          tiles::store_sums<kTwo>(sums, more_sums);
        };
        constexpr std::integral_constant<int, 1> kOne;
        constexpr std::integral_constant<int, 2> kTwo;
        if (t + 1 < num_tiles) {
          tiles::set_shapes(shapes, rows.tile_rows, std::min(rows.tile_rows, num_rows - second));
          multiply(kTwo, kOne, lines + rows.tile_bytes(), sums + rows.tile_rows * kPanel);
        } else {
          tiles::set_shapes(shapes, std::min(rows.tile_rows, num_rows - first), 0);
          two_panels ? multiply(kOne, kTwo, nullptr, sums + num_rows * kPanel)
                     : multiply(kOne, kOne, nullptr, nullptr);
        }
      }
      step = end;
    }
  }
}

template <tiles::Factors kFactors>
inline const GemmKernels* tile_kernels() {
  constexpr bool kHalves = kFactors == tiles::Factors::kHalves;
  static constexpr GemmKernels kKernels = {kHalves ? RowFormat::kFloat16 : RowFormat::kBFloat16,
                                           tiles::kTileRows,
                                           kHalves ? 0 : tiles::kTileRows,
                                           run_tiles<kFactors>,
                                           tiles::kBlockRows,
                                           tiles::kCachedBytes};
  return &kKernels;
}
#endif

}  // namespace dense
}  // namespace regatta::cpu::REGATTA_ISA

#include "gemm_quads.inl"

namespace regatta::cpu::REGATTA_ISA {
namespace dense {

inline const GemmKernels* kernels([[maybe_unused]] Isa isa, DType dtype) {
#if REGATTA_HAS_TILES
  using tiles::Factors;
  if (has_tiles(isa) && dtype == DType::kBFloat16) return tile_kernels<Factors::kPairs>();
  if (isa == Isa::kAmxFp16 && dtype == DType::kFloat16) return tile_kernels<Factors::kHalves>();
#endif
  static constexpr GemmKernels kFloat32 = {RowFormat::kFloat32, kMaxTileRows, kMaxRowsOfTwo,
                                           run<Product<float>>};
  static constexpr GemmKernels kFloat16 = {RowFormat::kFloat32, kMaxTileRows, kMaxRowsOfTwo,
                                           run<Product<fp16>>};
#if REGATTA_HAS_BF16_DOT
  static constexpr GemmKernels kPairs = {RowFormat::kBFloat16, kMaxTileRows, kMaxRowsOfTwo,
                                         run<PairProduct>};
#if REGATTA_HAS_SWAPPED_PAIRS
  static constexpr GemmKernels kSwapped = {
      RowFormat::kSwappedPairs, kMaxTileRows,        kMaxRowsOfTwo, run_swapped,
      kPairs.block_rows,        kPairs.cached_bytes, &kPairs};
  const GemmKernels& bfloat16 = pairs_are_slow() ? kSwapped : kPairs;
#elif REGATTA_HAS_QUADS
  // A tile of pairs, or fewer, by pairs.
  static constexpr GemmKernels bfloat16 = {
      RowFormat::kBFloat16, quads::kTileRows,    kMaxTileRows, quads::run,
      kPairs.block_rows,    kPairs.cached_bytes, &kPairs};
#else
  const GemmKernels& bfloat16 = kPairs;
#endif
#else
  static constexpr GemmKernels bfloat16 = {RowFormat::kFloat32, kMaxTileRows, kMaxRowsOfTwo,
                                           run<Product<bf16>>};
#endif
  switch (dtype) {
    case DType::kFloat32:
      return &kFloat32;
    case DType::kBFloat16:
      return &bfloat16;
    case DType::kFloat16:
      return &kFloat16;
    default:
      return nullptr;
  }
}

}  // namespace dense
}  // namespace regatta::cpu::REGATTA_ISA
