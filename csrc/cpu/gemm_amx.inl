// Many rows of int8 through AMX tiles (TDPBSUD: signed rows, unsigned codes), in the namespace of
// avx512_bf16, which every CPU with AMX has. Integer sums are exact and what follows them is done
// in the order of gemm_int8.inl: results are the same bits as without AMX.
//
// Both layouts are made of what a tile loads: a line of a row tile is up to 16 rows of 64 values,
// 64 bytes apart; 64 values of k of half a panel are 16 rows of 64 bytes, 128 bytes apart.
// Tiles: two sums (16 rows x 32 columns), rows and two halves of codes for 64 values of k, the same
// for 32. 4-bit codes are unpacked once per slab, for all tiles of rows.
// Assemblers of GCC 10's age do not know the instructions.
#if REGATTA_HAS_BF16_DOT && __GNUC__ < 11
namespace regatta::cpu::REGATTA_ISA {
namespace int8 {
template <int kBits, bool kByToken>
inline const GemmKernels* amx_kernels(DType dtype, bool zeros) {
  return kernels<kBits, kByToken>(dtype, zeros);
}
}  // namespace int8
}  // namespace regatta::cpu::REGATTA_ISA
#elif REGATTA_HAS_BF16_DOT
namespace regatta::cpu::REGATTA_ISA {
namespace int8 {

constexpr int kAmxRows = 16;

// What LDTILECFG reads.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Own assembly, not intrinsics: those want a target that the rest of the namespace must not have.
#define REGATTA_TILE_LOAD(TILE, FROM, STRIDE)                      \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #TILE ::"r"(FROM), \
                   "r"(static_cast<int64_t>(STRIDE))               \
                   : "memory")
#define REGATTA_TILE_STORE(TILE, TO, STRIDE)                         \
  __asm__ volatile("tilestored %%tmm" #TILE ", (%0,%1,1)" ::"r"(TO), \
                   "r"(static_cast<int64_t>(STRIDE))                 \
                   : "memory")
#define REGATTA_TILE_ZERO(TILE) __asm__ volatile("tilezero %%tmm" #TILE ::)
#define REGATTA_TILE_DOT(SUM, ROWS, CODES) \
  __asm__ volatile("tdpbsud %%tmm" #CODES ", %%tmm" #ROWS ", %%tmm" #SUM ::)

inline TileConfig tile_config(int64_t tile_rows) {
  TileConfig config;
  const auto set = [&](int tile, int64_t rows, int row_bytes) {
    config.rows[tile] = static_cast<uint8_t>(rows);
    config.row_bytes[tile] = static_cast<uint16_t>(row_bytes);
  };
  set(0, tile_rows, 64);  // sums of columns 0..15
  set(1, tile_rows, 64);  // and 16..31
  set(2, tile_rows, 64);  // rows, 64 values of k
  set(3, 16, 64);         // codes
  set(4, 16, 64);
  set(5, tile_rows, 32);  // rows, 32 values of k
  set(6, 8, 64);          // codes
  set(7, 8, 64);
  return config;
}

// Adds up blocks [begin, end) of a row tile times codes (8 bits, of block `begin` on) in sums.
REGATTA_INLINE void dot_blocks(const char* lines, int64_t tile_rows, const uint8_t* codes,
                               int64_t begin, int64_t end, int32_t* sums) {
  REGATTA_TILE_ZERO(0);
  REGATTA_TILE_ZERO(1);
  for (int64_t block = begin; block < end;) {
    const char* from = lines + (block >> 1) * tile_rows * kLineBytes + (block & 1) * kBlock;
    if ((block & 1) == 0 && end - block >= 2) {
      REGATTA_TILE_LOAD(2, from, kLineBytes);
      REGATTA_TILE_LOAD(3, codes, 128);
      REGATTA_TILE_DOT(0, 2, 3);
      REGATTA_TILE_LOAD(4, codes + 64, 128);
      REGATTA_TILE_DOT(1, 2, 4);
      block += 2;
      codes += 2048;
    } else {
      REGATTA_TILE_LOAD(5, from, kLineBytes);
      REGATTA_TILE_LOAD(6, codes, 128);
      REGATTA_TILE_DOT(0, 5, 6);
      REGATTA_TILE_LOAD(7, codes + 64, 128);
      REGATTA_TILE_DOT(1, 5, 7);
      block += 1;
      codes += 1024;
    }
  }
  REGATTA_TILE_STORE(0, sums, kPanel * 4);
  REGATTA_TILE_STORE(1, sums + 16, kPanel * 4);
}

// A slab of a panel, as 8-bit codes, times a row tile; fields as in Piece, `codes[0]` unpacked.
template <bool kZeros, bool kBlockScales>
void multiply_amx(const Piece& piece, int64_t num_rows) {
  alignas(64) int32_t sums[kAmxRows * kPanel];
  alignas(64) float totals[kAmxRows * kPanel];
  const auto* lines = reinterpret_cast<const char*>(piece.lines);
  const int64_t end = piece.first_block + piece.num_blocks;
  bool first = !piece.accumulate;
  const float* scales = piece.scales[0];
  for (int64_t begin = piece.first_block; begin < end; begin += piece.group_blocks) {
    const int64_t group_end = std::min(begin + piece.group_blocks, end);
    const uint8_t* codes = piece.codes[0] + (begin - piece.first_block) * 1024;
    float value_sums[kAmxRows] = {};
    int32_t starts[kAmxRows] = {};
    if (kBlockScales) {
      for (int64_t block = begin; block < group_end; ++block, codes += 1024) {
        dot_blocks(lines, piece.tile_rows, codes, block, block + 1, sums);
        const BlockScale* metas = piece.metas + block * piece.tile_rows;
        for (int64_t r = 0; r < num_rows; ++r) {
          const Vec scale = set1(metas[r].scale);
          if (kZeros) value_sums[r] += metas[r].value_sum;
          for (int v = 0; v < kVectors; ++v) {
            const int64_t at = r * kPanel + v * kLanes;
            Ints sum = {load_raw(sums + at)};
            if (!kZeros) sum = add(sum, set_ints(metas[r].start));
            store(totals + at,
                  fma(to_vec(sum), scale, block == begin ? zero() : load(totals + at)));
          }
        }
      }
    } else {
      dot_blocks(lines, piece.tile_rows, codes, begin, group_end, sums);
      for (int64_t block = begin; block < group_end; ++block) {
        const BlockScale* metas = piece.metas + block * piece.tile_rows;
        for (int64_t r = 0; r < num_rows; ++r) starts[r] += metas[r].start;
      }
    }
    for (int64_t r = 0; r < num_rows; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = r * kPanel + v * kLanes;
        const Vec value = kBlockScales ? load(totals + at)
                                       : to_vec(add({load_raw(sums + at)}, set_ints(starts[r])));
        Vec result = fma(value, load(scales + v * kLanes), first ? zero() : load(piece.sums + at));
        if (kZeros) {
          result = fnma(set1(value_sums[r]), load(scales + kPanel + v * kLanes), result);
        }
        store(piece.sums + at, result);
      }
    }
    scales += piece.scale_step;
    first = false;
  }
}

// 4-bit codes of blocks of a panel as 8-bit ones.
inline void unpack_nibbles(const uint8_t* from, int64_t num_blocks, uint8_t* to) {
  for (int64_t i = 0; i < num_blocks * 4; ++i, from += 128, to += 256) {
    for (int v = 0; v < 2; ++v) {
      Codes low, high;
      load_nibbles(from + v * 64, low, high);
      _mm512_storeu_si512(to + v * 64, low.v);
      _mm512_storeu_si512(to + 128 + v * 64, high.v);
    }
  }
}

template <int kBits, bool kZeros, bool kBlockScales>
void run_amx(const PanelJob& job) {
  constexpr int64_t kBlockBytes = 128 * kBits;
  const PackedRows& rows = *job.rows;
  const int64_t num_tiles = job.tile_end - job.tile_begin;
  const int64_t num_rows = job.num_rows();
  // Few rows wait for the weights: nothing to win.
  if (num_tiles == 1 && num_rows <= (kBlockScales ? kMaxBlockRows : kMaxRowRows)) {
    return run<kBits, kZeros, kBlockScales>(job);
  }
  const PanelWalk walk(job, kBits, kZeros);
  constexpr int64_t kMinSlabBlocks = 16;
  const int64_t slab = std::max<int64_t>(1, kMinSlabBlocks / walk.group_blocks) * walk.group_blocks;
  Scratch::Scope scope(*job.scratch);
  uint8_t* unpacked = kBits == 4 ? job.scratch->take<uint8_t>(slab * 1024) : nullptr;
  const TileConfig config = tile_config(rows.tile_rows);
  __asm__ volatile("ldtilecfg %0" ::"m"(config));
  Piece piece;
  walk.start(rows, 1, &piece);
  for (int i = 0; i < job.num_panels; ++i) {
    for (int64_t block = 0; block < walk.num_blocks; block += slab) {
      walk.set_panel(0, job.panels[i], block, &piece);
      piece.first_block = block;
      piece.num_blocks = std::min(slab, walk.num_blocks - block);
      piece.accumulate = block > 0;
      // The slab after this one, while this one is computed.
      const char* ahead = reinterpret_cast<const char*>(piece.codes[0]) + slab * kBlockBytes;
      for (int64_t byte = 0; byte < slab * kBlockBytes; byte += 64) prefetch_l2(ahead + byte);
      if (kBits == 4) {
        unpack_nibbles(piece.codes[0], piece.num_blocks, unpacked);
        piece.codes[0] = unpacked;
      }
      for (int64_t t = 0; t < num_tiles; ++t) {
        const int64_t tile = job.tile_begin + t;
        walk.set_tile(rows, tile, &piece);
        piece.sums = job.out + i * num_rows * kPanel + t * rows.tile_rows * kPanel;
        multiply_amx<kZeros, kBlockScales>(
            piece, std::min(rows.tile_rows, rows.num_rows - tile * rows.tile_rows));
      }
    }
  }
  __asm__ volatile("tilerelease" ::);
  if (!kBlockScales) scale_rows(job);
}

template <int kBits, bool kByToken>
inline const GemmKernels* amx_kernels(DType dtype, bool zeros) {
  if (kByToken || dtype != DType::kFloat32) {
    constexpr RowFormat kFormat = kByToken ? RowFormat::kInt8Rows : RowFormat::kInt8Blocks;
    constexpr int kMaxOfTwo = kByToken ? kMaxRowRowsOfTwo : kMaxBlockRowsOfTwo;
    static constexpr GemmKernels kSymmetric = {kFormat, kAmxRows, kMaxOfTwo,
                                               run_amx<kBits, false, !kByToken>};
    if (!zeros) return &kSymmetric;
    if constexpr (!kByToken) {
      static constexpr GemmKernels kWithZeros = {kFormat, kAmxRows, kMaxOfTwo,
                                                 run_amx<kBits, true, true>};
      return &kWithZeros;
    }
  }
  return kernels<kBits, kByToken>(dtype, zeros);
}

}  // namespace int8
}  // namespace regatta::cpu::REGATTA_ISA
#endif
