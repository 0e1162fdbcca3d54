// The "dense" scheme over the microkernels of gemm_float.inl. See gemm_dense.cc.
#include "gemm_float.inl"

namespace regatta::cpu::REGATTA_ISA {
namespace dense {

template <class P>
void run(const PanelJob& job) {
  constexpr bool kExpands = std::is_same_v<P, Product<fp16>> || std::is_same_v<P, Product<bf16>>;
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
      if (kExpands && num_tiles >= kTilesToExpand) {  // once, not for each tile
        alignas(64) float expanded[kMaxSlab * kPanel];
        expand(slab, depth, expanded);
        multiply_tiles<Product<float>>(job, k, expanded, depth, sums,
                                       ahead_of_slab(slab, slab_bytes, num_tiles * depth));
      } else {
        multiply_tiles<P>(job, k, slab, depth, sums,
                          num_tiles == 1
                              ? ahead_of_streams(slab, 1, kStepBytes)
                              : ahead_of_slab(slab, slab_bytes, num_tiles * depth / P::kUnits));
      }
    }
  }
}

inline const GemmKernels* kernels(DType dtype) {
  static constexpr GemmKernels kFloat32 = {RowFormat::kFloat32, kMaxTileRows, kMaxRowsOfTwo,
                                           run<Product<float>>};
  static constexpr GemmKernels kFloat16 = {RowFormat::kFloat32, kMaxTileRows, kMaxRowsOfTwo,
                                           run<Product<fp16>>};
#if REGATTA_HAS_BF16_DOT
  static constexpr GemmKernels kBFloat16 = {RowFormat::kBFloat16, kMaxTileRows, kMaxRowsOfTwo,
                                            run<PairProduct>};
#else
  static constexpr GemmKernels kBFloat16 = {RowFormat::kFloat32, kMaxTileRows, kMaxRowsOfTwo,
                                            run<Product<bf16>>};
#endif
  switch (dtype) {
    case DType::kFloat32:
      return &kFloat32;
    case DType::kBFloat16:
      return &kBFloat16;
    case DType::kFloat16:
      return &kFloat16;
    default:
      return nullptr;
  }
}

}  // namespace dense
}  // namespace regatta::cpu::REGATTA_ISA
