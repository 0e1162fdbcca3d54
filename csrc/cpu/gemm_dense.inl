// The microkernels of the "dense" scheme. See gemm_dense.cc.
namespace regatta::cpu::REGATTA_ISA {
namespace dense {

constexpr int kLanes = Vec::kLanes;
constexpr int kVectors = static_cast<int>(kPanel) / kLanes;  // vectors across a panel
// Accumulators fill the register file: 12 x 2 of 32 (avx512), 3 x 4 of 16 (avx2).
constexpr int kMaxTileRows = kLanes == 16 ? 12 : kLanes == 8 ? 3 : 1;
// Two panels at once double the streams from memory when few rows leave registers free.
constexpr int kMaxRowsOfTwo = kLanes == 16 ? 4 : 1;

// Bytes that lie prefetched ahead of the multiplication, over all streams. Of 2, 4, 8, 16 KiB per
// stream on one Zen 5 core: one stream (8 rows) read 72, 79, 92, 90 % of what a plain read loop did,
// two streams (1 row) 93, 94, 92, 92 %.
constexpr int kPrefetchBytes = 8192;

// Values of k stored together in a column, and the s-th of them for a vector of columns.
template <class T>
struct Panel {
  static constexpr int kStep = 1;
  static REGATTA_INLINE Vec load_vector(const T* b, int vector, int) {
    return load(b + vector * kLanes);
  }
};
template <>
struct Panel<bf16> {
  static constexpr int kStep = 2;
  static REGATTA_INLINE Vec load_vector(const bf16* b, int vector, int s) {
    Vec even, odd;
    load_2k(b + vector * kLanes * 2, even, odd);
    return s ? odd : even;
  }
};

// c[p][r][0 .. 32) (+)= sum over k in [0, num_k) of a[r][k] * b[p][k][0 .. 32).
// a: the tile's lines at k = 0, `line_step` floats from one line of 16 k to the next.
// b0, b1: panels 0 and 1 (null if kPanels is 1). num_k is a multiple of Panel<T>::kStep.
template <class T, int kRows, int kPanels>
void multiply(const float* a, int64_t line_step, const T* b0, const T* b1, int64_t num_k, float* c,
              int64_t c_panel_stride, bool accumulate) {
  constexpr int kStep = Panel<T>::kStep;
  constexpr int kPrefetch = kPrefetchBytes / kPanels;
  Vec acc[kPanels][kRows][kVectors];
#pragma GCC unroll 2
  for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 32
      for (int v = 0; v < kVectors; ++v) {
        acc[p][r][v] = accumulate ? load(c + p * c_panel_stride + r * kPanel + v * kLanes) : zero();
      }
    }
  }
  const auto step = [&](const float* line) REGATTA_LAMBDA_INLINE {
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
      const T* column = p ? b1 : b0;
#pragma GCC unroll 4
      for (int byte = 0; byte < kStep * 32 * static_cast<int>(sizeof(T)); byte += 64) {
        prefetch(reinterpret_cast<const char*>(column) + kPrefetch + byte);
      }
#pragma GCC unroll 2
      for (int s = 0; s < kStep; ++s) {
        // Held in registers: whichever of the row's values and the panel's are fewer.
        if constexpr (kRows < kVectors) {
          Vec x[kRows];
#pragma GCC unroll 12
          for (int r = 0; r < kRows; ++r) x[r] = set1(line[r * 16 + s]);
#pragma GCC unroll 32
          for (int v = 0; v < kVectors; ++v) {
            const Vec value = Panel<T>::load_vector(column, v, s);
#pragma GCC unroll 12
            for (int r = 0; r < kRows; ++r) acc[p][r][v] = fma(x[r], value, acc[p][r][v]);
          }
        } else {
          Vec values[kVectors];
#pragma GCC unroll 32
          for (int v = 0; v < kVectors; ++v) values[v] = Panel<T>::load_vector(column, v, s);
#pragma GCC unroll 12
          for (int r = 0; r < kRows; ++r) {
            const Vec x = set1(line[r * 16 + s]);
#pragma GCC unroll 32
            for (int v = 0; v < kVectors; ++v) acc[p][r][v] = fma(x, values[v], acc[p][r][v]);
          }
        }
      }
    }
    b0 += kStep * kPanel;
    if (kPanels == 2) b1 += kStep * kPanel;
  };
  int64_t k = 0;
  for (; k + 16 <= num_k; k += 16, a += line_step) {
#pragma GCC unroll 2
    for (int i = 0; i < 16; i += kStep) step(a + i);
  }
  for (int64_t i = 0; i < num_k - k; i += kStep) step(a + i);
#pragma GCC unroll 2
  for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 32
      for (int v = 0; v < kVectors; ++v) {
        store(c + p * c_panel_stride + r * kPanel + v * kLanes, acc[p][r][v]);
      }
    }
  }
}

template <class T>
using MultiplyFn = void (*)(const float*, int64_t, const T*, const T*, int64_t, float*, int64_t,
                            bool);

template <class T, int kPanels, int... kRows>
constexpr MultiplyFn<T> multiply_for(int64_t rows, std::integer_sequence<int, kRows...>) {
  constexpr MultiplyFn<T> kTable[] = {multiply<T, kRows + 1, kPanels>...};
  return kTable[rows - 1];
}

template <class T>
MultiplyFn<T> multiply_one(int64_t rows) {
  return multiply_for<T, 1>(rows, std::make_integer_sequence<int, kMaxTileRows>());
}
template <class T>
MultiplyFn<T> multiply_two(int64_t rows) {
  return multiply_for<T, 2>(rows, std::make_integer_sequence<int, kMaxRowsOfTwo>());
}

inline int64_t tile_size(const PackedRows& rows, int64_t t) {
  return std::min(rows.tile_rows, rows.num_rows - t * rows.tile_rows);
}

// Blocks of k whose slab of the panel stays in L1 while all tiles of rows pass over it.
constexpr int64_t kBlock = 256;

template <class T>
void run_panel(const PanelJob& job, const T* b, int64_t num_k, float* out) {
  constexpr int64_t kStep = Panel<T>::kStep;
  constexpr int64_t kTilesToExpand = 3;
  const PackedRows& rows = *job.rows;
  const int64_t num_tiles = job.tile_end - job.tile_begin;
  const int64_t line_step = rows.tile_rows * 16;
  const auto lines = [&](int64_t t, int64_t k) {
    return reinterpret_cast<const float*>(rows.tile(job.tile_begin + t) +
                                          k / 16 * rows.tile_rows * kLineBytes);
  };
  const auto products = [&](int64_t t) { return out + t * rows.tile_rows * kPanel; };
  if (!std::is_same_v<T, float> && num_tiles >= kTilesToExpand) {
    // Converting once for all tiles beats converting in each.
    Scratch::Scope scope(*job.scratch);
    float* slab = job.scratch->take<float>(kBlock * kPanel);
    for (int64_t k = 0; k < num_k; k += kBlock) {
      const int64_t depth = std::min(kBlock, num_k - k);
      for (int64_t i = 0; i < depth; i += kStep) {
        for (int s = 0; s < kStep; ++s) {
          for (int v = 0; v < kVectors; ++v) {
            store(slab + (i + s) * kPanel + v * kLanes,
                  Panel<T>::load_vector(b + (k + i) * kPanel, v, s));
          }
        }
      }
      for (int64_t t = 0; t < num_tiles; ++t) {
        multiply_one<float>(tile_size(rows, job.tile_begin + t))(
            lines(t, k), line_step, slab, nullptr, depth, products(t), 0, k > 0);
      }
    }
    return;
  }
  const int64_t block = num_tiles == 1 ? num_k : kBlock;
  for (int64_t k = 0; k < num_k; k += block) {
    for (int64_t t = 0; t < num_tiles; ++t) {
      multiply_one<T>(tile_size(rows, job.tile_begin + t))(lines(t, k), line_step, b + k * kPanel,
                                                           nullptr, std::min(block, num_k - k),
                                                           products(t), 0, k > 0);
    }
  }
}

template <class T>
void run(const PanelJob& job) {
  constexpr int64_t kStep = Panel<T>::kStep;
  const PackedRows& rows = *job.rows;
  const int64_t num_k = (rows.width + kStep - 1) / kStep * kStep;
  const auto panel = [&](int i) {
    return static_cast<const T*>(job.weight->tensors[0].data) + job.panels[i] * num_k * kPanel;
  };
  const int64_t num_rows = job.num_rows();
  if (job.num_panels == 2 && num_rows <= kMaxRowsOfTwo) {
    multiply_two<T>(num_rows)(reinterpret_cast<const float*>(rows.tile(job.tile_begin)),
                              rows.tile_rows * 16, panel(0), panel(1), num_k, job.out,
                              num_rows * kPanel, false);
    return;
  }
  for (int i = 0; i < job.num_panels; ++i) {
    run_panel(job, panel(i), num_k, job.out + i * num_rows * kPanel);
  }
}

#if REGATTA_HAS_BF16_DOT

// As multiply(), for pairs of bf16: a line holds 16 pairs of k, num_pairs of them are summed.
template <int kRows, int kPanels>
void multiply_pairs(const bf16* a, int64_t line_step, const bf16* b0, const bf16* b1,
                    int64_t num_pairs, float* c, int64_t c_panel_stride, bool accumulate) {
  constexpr int kPrefetch = kPrefetchBytes / kPanels;
  Vec acc[kPanels][kRows][2];
#pragma GCC unroll 2
  for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        acc[p][r][v] = accumulate ? load(c + p * c_panel_stride + r * kPanel + v * 16) : zero();
      }
    }
  }
  const auto step = [&](const bf16* line) REGATTA_LAMBDA_INLINE {
    VecBf16 values[kPanels][2];
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
      const bf16* column = p ? b1 : b0;
      prefetch(reinterpret_cast<const char*>(column) + kPrefetch);
      prefetch(reinterpret_cast<const char*>(column) + kPrefetch + 64);
      values[p][0] = load_pairs(column);
      values[p][1] = load_pairs(column + 32);
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const VecBf16 pair = set1_pair(line + r * 32);
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p) {
        acc[p][r][0] = dot_pairs(acc[p][r][0], values[p][0], pair);
        acc[p][r][1] = dot_pairs(acc[p][r][1], values[p][1], pair);
      }
    }
    b0 += 2 * kPanel;
    if (kPanels == 2) b1 += 2 * kPanel;
  };
  int64_t k = 0;
  for (; k + 16 <= num_pairs; k += 16, a += line_step) {
#pragma GCC unroll 2
    for (int i = 0; i < 16; ++i) step(a + i * 2);
  }
  for (int64_t i = 0; i < num_pairs - k; ++i) step(a + i * 2);
#pragma GCC unroll 2
  for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        store(c + p * c_panel_stride + r * kPanel + v * 16, acc[p][r][v]);
      }
    }
  }
}

using MultiplyPairsFn = void (*)(const bf16*, int64_t, const bf16*, const bf16*, int64_t, float*,
                                 int64_t, bool);

template <int kPanels, int... kRows>
constexpr MultiplyPairsFn multiply_pairs_for(int64_t rows, std::integer_sequence<int, kRows...>) {
  constexpr MultiplyPairsFn kTable[] = {multiply_pairs<kRows + 1, kPanels>...};
  return kTable[rows - 1];
}

inline void run_pairs(const PanelJob& job) {
  const PackedRows& rows = *job.rows;
  const int64_t num_pairs = (rows.width + 1) / 2;
  const auto panel = [&](int i) {
    return static_cast<const bf16*>(job.weight->tensors[0].data) +
           job.panels[i] * num_pairs * 2 * kPanel;
  };
  const int64_t line_step = rows.tile_rows * 32;
  const int64_t num_rows = job.num_rows();
  const auto lines = [&](int64_t t, int64_t k) {
    return reinterpret_cast<const bf16*>(rows.tile(t) + k / 16 * rows.tile_rows * kLineBytes);
  };
  if (job.num_panels == 2 && num_rows <= kMaxRowsOfTwo) {
    multiply_pairs_for<2>(num_rows, std::make_integer_sequence<int, kMaxRowsOfTwo>())(
        lines(job.tile_begin, 0), line_step, panel(0), panel(1), num_pairs, job.out,
        num_rows * kPanel, false);
    return;
  }
  const int64_t block = job.tile_end - job.tile_begin == 1 ? num_pairs : kBlock;
  for (int i = 0; i < job.num_panels; ++i) {
    float* out = job.out + i * num_rows * kPanel;
    for (int64_t k = 0; k < num_pairs; k += block) {
      for (int64_t t = job.tile_begin; t < job.tile_end; ++t) {
        multiply_pairs_for<1>(tile_size(rows, t), std::make_integer_sequence<int, kMaxTileRows>())(
            lines(t, k), line_step, panel(i) + k * 2 * kPanel, nullptr,
            std::min(block, num_pairs - k), out + (t - job.tile_begin) * rows.tile_rows * kPanel, 0,
            k > 0);
      }
    }
  }
}
#endif

inline const GemmKernels* kernels(DType dtype) {
  static constexpr GemmKernels kFloat32 = {RowFormat::kFloat32, kMaxTileRows, kMaxRowsOfTwo,
                                           run<float>};
  static constexpr GemmKernels kFloat16 = {RowFormat::kFloat32, kMaxTileRows, kMaxRowsOfTwo,
                                           run<fp16>};
#if REGATTA_HAS_BF16_DOT
  static constexpr GemmKernels kBFloat16 = {RowFormat::kBFloat16, kMaxTileRows, kMaxRowsOfTwo,
                                            run_pairs};
#else
  static constexpr GemmKernels kBFloat16 = {RowFormat::kFloat32, kMaxTileRows, kMaxRowsOfTwo,
                                            run<bf16>};
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
