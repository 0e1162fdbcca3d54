// See measure.cc.
#include "gemm_float.inl"
#include "gemm_tiles.inl"

namespace regatta::cpu::REGATTA_ISA {

// Independent sums: more than latency times multipliers, as many as there are registers.
constexpr int kChains = Vec::kLanes == 16 || Vec::kLanes == 4 ? 24 : 12;

// Floating-point operations done by `rounds` rounds of multiply-adds in registers.
inline double multiply_add(int64_t rounds, bool bf16_pairs, float* sink) {
  Vec sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = set1(static_cast<float>(i));
#if REGATTA_HAS_BF16_DOT
  if (bf16_pairs) {
    alignas(64) bf16 ones[32];
    for (bf16& value : ones) from_float(1.0f, &value);
    const VecBf16 one = load_pairs(ones);
    for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
      for (int i = 0; i < kChains; ++i) sums[i] = dot_pairs(sums[i], one, one);
    }
  } else
#endif
  {
    const Vec factor = set1(0.5f + *sink * 0.0f);
    for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
      for (int i = 0; i < kChains; ++i) sums[i] = fma(sums[i], factor, factor);
    }
  }
  for (int i = 1; i < kChains; ++i) sums[0] = sums[0] + sums[i];
  *sink = reduce_add(sums[0]);
  return static_cast<double>(rounds) * kChains * Vec::kLanes * (bf16_pairs ? 4 : 2);
}

#if REGATTA_HAS_TILES
// The same of bfloat16 by tiles: four sums, two tiles of rows and two of columns.
inline double multiply_tiles(int64_t rounds) {
  constexpr tiles::Shape kWhole = {tiles::kTileRows, tiles::kRowBytes};
  constexpr auto kPairs = tiles::Factors::kPairs;
  alignas(64) static const char zeros[tiles::kTileRows * tiles::kRowBytes] = {};
  tiles::Shapes shapes;
  shapes.set({kWhole, kWhole, kWhole, kWhole, kWhole, kWhole, kWhole, kWhole});
  tiles::load<4>(zeros, tiles::kRowBytes);
  tiles::load<5>(zeros, tiles::kRowBytes);
  tiles::load<6>(zeros, tiles::kRowBytes);
  tiles::load<7>(zeros, tiles::kRowBytes);
  for (int64_t round = 0; round < rounds; ++round) {
    tiles::dot<kPairs, 0, 4, 6>();
    tiles::dot<kPairs, 1, 4, 7>();
    tiles::dot<kPairs, 2, 5, 6>();
    tiles::dot<kPairs, 3, 5, 7>();
  }
  return static_cast<double>(rounds) * 4 * 16 * 16 * 32 * 2;
}

// The same of columns in [data, data + bytes), over and over, and two tiles of rows.
inline double stream_tiles(int64_t rounds, const char* data, int64_t bytes) {
  alignas(64) static const char zeros[tiles::kTileRows * tiles::kRowBytes] = {};
  const int64_t steps = bytes / tiles::kStepBytes;
  tiles::Shapes shapes;
  tiles::set_shapes(shapes, tiles::kTileRows, tiles::kTileRows);
  tiles::zero_sums<2>();
  for (int64_t round = 0; round < rounds; ++round) {
    Ahead ahead = ahead_of_streams(data, 1, tiles::kStepBytes);
    tiles::multiply<tiles::Factors::kPairs, 2, 1>(zeros, zeros, 0, data, nullptr, steps, ahead);
  }
  return static_cast<double>(rounds * steps) * 4 * 16 * 16 * 32 * 2;
}
#else
inline double multiply_tiles(int64_t) { return 0.0; }
inline double stream_tiles(int64_t, const char*, int64_t) { return 0.0; }
#endif

// Sums [data, data + bytes) as floats in four streams; bytes is a multiple of 4 * 64 * 4.
inline float read_streams(const char* data, int64_t bytes) {
  constexpr int kStreams = 4;
  constexpr int64_t kAhead = 2048;  // bytes
  const int64_t length = bytes / kStreams;
  Vec sums[kStreams];
  for (Vec& sum : sums) sum = zero();
  for (int64_t i = 0; i < length; i += 64) {
#pragma GCC unroll 4
    for (int stream = 0; stream < kStreams; ++stream) {
      const char* from = data + stream * length + i;
      prefetch(from + kAhead);
#pragma GCC unroll 16
      for (int j = 0; j < 16; j += Vec::kLanes) {
        sums[stream] = sums[stream] + load(reinterpret_cast<const float*>(from) + j);
      }
    }
  }
  return reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

}  // namespace regatta::cpu::REGATTA_ISA
