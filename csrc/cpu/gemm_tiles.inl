// Tiles of rows times panels, 64 bytes of a row in each step.
//
// Rows and panels lie as vectors want them, and as tiles do. A line of a row tile is up to 16 rows,
// 64 bytes each. A step of a panel is 16 lines of 128 bytes, pairs of bfloat16 or quadruples of
// codes: two tiles, of 16 columns each.
#include "tiles.inl"
#if REGATTA_HAS_TILES
namespace regatta::cpu::REGATTA_ISA {
namespace tiles {

constexpr int64_t kStepBytes = 2048;  // of a panel
constexpr int64_t kPanelStride = 128;
constexpr int64_t kSumStride = kPanel * 4;

// Rows that pass over a panel in one job, and bytes of rows that stay in L2 meanwhile.
constexpr int64_t kBlockRows = 512, kCachedBytes = int64_t{3} << 19;

// Slabs of a panel, each of which stays in L1 while the rows pass over it.
constexpr int64_t kSlabSteps = 8, kFewestOfSlabs = 3;  // steps; tiles of rows
inline int64_t num_slabs(int64_t num_tiles, int64_t num_steps) {
  if (num_tiles < kFewestOfSlabs) return num_steps > 0;
  return (num_steps + kSlabSteps - 1) / kSlabSteps;
}

// What is fetched while tiles of rows pass over a slab, whose steps read `step_bytes` each: of one
// tile, or one panel's two, the panel itself; of more the slab behind it, into L2.
inline Ahead ahead_of_slab(const void* slab, int64_t step_bytes, int64_t num_steps,
                           int64_t num_tiles, int num_panels) {
  if (num_tiles == 1) return ahead_of_streams(slab, num_panels, step_bytes);
  return {static_cast<const char*>(slab) + num_steps * step_bytes,
          step_bytes / ((num_tiles + 1) / 2), true};
}

REGATTA_INLINE void fetch(const char* from, const Ahead& ahead) {
  for (int64_t byte = 0; byte < ahead.step; byte += kLineBytes) {
    ahead.into_l2 ? prefetch_l2(from + byte) : prefetch(from + byte);
  }
}

// Sums += rows times columns over `steps` steps. Tiles 0 and 1 are the sums of the first row tile
// with a panel, 2 and 3 those of the second, or of the first with another panel.
// rows: lines of each row tile, `line_bytes` from one to the next. kPassing: not kept in L1.
template <Factors kFactors, int kRowTiles, int kPanels, bool kPassing = false>
REGATTA_INLINE void multiply(const char* rows, const char* more_rows, int64_t line_bytes,
                             const char* columns, const char* more_columns, int64_t steps,
                             Ahead& ahead) {
  static_assert(kRowTiles * kPanels <= 2);
  for (; steps > 0; --steps, rows += line_bytes, columns += kStepBytes) {
    if (kPanels == 2) fetch(ahead.at + (more_columns - columns), ahead);
    fetch(ahead.at, ahead);
    ahead.at += ahead.step;
    load<6>(columns, kPanelStride);
    load<7>(columns + kRowBytes, kPanelStride);
    kPassing ? load_passing<4>(rows, kLineBytes) : load<4>(rows, kLineBytes);
    if constexpr (kRowTiles == 2) {
      kPassing ? load_passing<5>(more_rows, kLineBytes) : load<5>(more_rows, kLineBytes);
    }
    dot<kFactors, 0, 4, 6>();
    if constexpr (kRowTiles == 2) dot<kFactors, 2, 5, 6>();
    dot<kFactors, 1, 4, 7>();
    if constexpr (kRowTiles == 2) {
      dot<kFactors, 3, 5, 7>();
      more_rows += line_bytes;
    }
    if constexpr (kPanels == 2) {
      load<5>(more_columns, kPanelStride);
      dot<kFactors, 2, 4, 5>();
      load<6>(more_columns + kRowBytes, kPanelStride);
      dot<kFactors, 3, 4, 6>();
      more_columns += kStepBytes;
    }
  }
}

template <int kCount>
REGATTA_INLINE void zero_sums() {
  zero<0>();
  zero<1>();
  if constexpr (kCount == 2) zero<2>();
  if constexpr (kCount == 2) zero<3>();
}

// sums, more: [rows][kPanel] of either pair of tiles.
template <int kCount>
REGATTA_INLINE void load_sums(const float* sums, const float* more) {
  load<0>(sums, kSumStride);
  load<1>(sums + 16, kSumStride);
  if constexpr (kCount == 2) load<2>(more, kSumStride);
  if constexpr (kCount == 2) load<3>(more + 16, kSumStride);
}

template <int kCount, class T>
REGATTA_INLINE void store_sums(T* sums, T* more) {
  store<0>(sums, kSumStride);
  store<1>(sums + 16, kSumStride);
  if constexpr (kCount == 2) store<2>(more, kSumStride);
  if constexpr (kCount == 2) store<3>(more + 16, kSumStride);
}

// For row tiles of `rows` and, unless that is 0, `more` rows.
inline void set_shapes(Shapes& shapes, int64_t rows, int64_t more) {
  const Shape sums = {rows, kRowBytes}, more_sums = {more ? more : rows, kRowBytes};
  const Shape columns = {kTileRows, kRowBytes}, factors = {rows, kRowBytes},
              more_factors = {more, kRowBytes};
  if (!shapes.is_new(rows << 8 | more)) return;
  shapes.set(
      {sums, sums, more_sums, more_sums, factors, more ? more_factors : columns, columns, columns});
}

}  // namespace tiles
}  // namespace regatta::cpu::REGATTA_ISA
#endif
