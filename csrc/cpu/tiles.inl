// Tiles of AMX, in the namespace of avx512_bf16, which every CPU with AMX has: instructions, and
// the shapes of a thread's tiles.
//
// A sum of bfloat16 is made so, whatever the number of rows (TDPBF16PS): for each 32 values of k,
// the last ones filled up with zeros, the sum of the even ones and that of the odd ones, k by k in
// one rounding each; both are added, and that to what is there. Denormals are zeros. Vectors make
// the same sums of one row, or of a few in attention, as fast as they read: tiles wait longer for
// memory and for what was stored just before. Sums of float16 (TDPFP16PS) are made alike, of its
// denormals too. Integer sums are exact.
#if REGATTA_HAS_TILES
namespace regatta::cpu::REGATTA_ISA {
namespace tiles {

constexpr int kTileRows = 16;
constexpr int kRowBytes = 64;

// Own assembly, not intrinsics: those want a target that the rest of the namespace must not have.
template <int kTile>
REGATTA_INLINE void load(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
}
// Of what passes by once: it takes no room in L1.
template <int kTile>
REGATTA_INLINE void load_passing(const void* from, int64_t stride) {
  __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile)
                   : "memory");
}
template <int kTile>
REGATTA_INLINE void store(void* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
REGATTA_INLINE void zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

// What is multiplied: pairs of bfloat16, or of float16; int8 rows with unsigned codes; int8 with
// int8.
enum class Factors : uint8_t { kPairs, kHalves, kCodes, kBytes };

template <Factors kFactors, int kSum, int kRows, int kColumns>
REGATTA_INLINE void dot() {
#define REGATTA_TILE_DOT(NAME) \
  __asm__ volatile(NAME " %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kRows), "i"(kColumns))
  if constexpr (kFactors == Factors::kPairs) REGATTA_TILE_DOT("tdpbf16ps");
  if constexpr (kFactors == Factors::kCodes) REGATTA_TILE_DOT("tdpbsud");
  if constexpr (kFactors == Factors::kBytes) REGATTA_TILE_DOT("tdpbssd");
#undef REGATTA_TILE_DOT
  if constexpr (kFactors == Factors::kHalves) {  // tdpfp16ps, which older assemblers do not know
    __asm__ volatile(".byte 0xc4, 0xe2, %c0, 0x5c, %c1" ::"i"(0x7b ^ kColumns << 3),
                     "i"(0xc0 | kSum << 3 | kRows));
  }
}

// Rows, and bytes of a row.
struct Shape {
  int64_t rows, bytes;
};

// The shapes of this thread's tiles, until the end of the scope.
class Shapes {
 public:
  Shapes() = default;
  ~Shapes() {
    if (config_.palette) __asm__ volatile("tilerelease" ::);
  }
  Shapes(const Shapes&) = delete;
  Shapes& operator=(const Shapes&) = delete;

  // Whether shapes of that name, not 0, are not those that were last set by a name.
  bool is_new(int64_t name) {
    const bool is_other = name != name_;
    name_ = name;
    return is_other;
  }

  // What tiles hold is lost where a shape changes.
  void set(const Shape (&shapes)[8]) {
    Config config;
    config.palette = 1;
    for (int i = 0; i < 8; ++i) {
      config.rows[i] = static_cast<uint8_t>(shapes[i].rows);
      config.row_bytes[i] = static_cast<uint16_t>(shapes[i].bytes);
    }
    if (__builtin_memcmp(&config, &config_, sizeof(config)) == 0) return;
    config_ = config;
    __asm__ volatile("ldtilecfg %0" ::"m"(config_));
  }

 private:
  struct alignas(64) Config {  // what LDTILECFG reads
    uint8_t palette = 0;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };
  Config config_;
  int64_t name_ = 0;
};

}  // namespace tiles
}  // namespace regatta::cpu::REGATTA_ISA
#endif
