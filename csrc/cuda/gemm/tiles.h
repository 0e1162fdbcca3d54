// How products are cut into tiles where that decides which kernel runs, and what it costs: host
// code, of the problem and the number of multiprocessors alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cuda/gemm/select.h"
#include "cuda/integers.h"
#include "regatta/gemm.h"

namespace regatta::cuda {

// ------------------------------------------------------------------------------- groups of rows

constexpr int64_t kMaxGroups = 512;  // that have a weight each

// Tiles of `tokens` rows that M rows in G groups have, at most; they are known on the device alone.
inline int64_t max_group_tiles(int64_t num_rows, int64_t num_groups, int64_t tokens) {
  const int64_t used = std::min(num_rows, num_groups);
  return used + (num_rows - used) / tokens;
}

// `least` times a power of two, up to `most`: a tile of so many rows has nearly every group whole,
// whose weight is then read once, where rows choose their groups at random.
inline int choose_group_tokens(int64_t num_rows, int64_t num_groups, int least, int most) {
  const double mean = static_cast<double>(num_rows) / static_cast<double>(num_groups);
  int tokens = least;
  while (tokens < most && tokens < mean + 2. * std::sqrt(mean)) tokens *= 2;
  return tokens;
}

// ------------------------------------------------------------------------------ gemm_tiles_sm90

constexpr int kLargeTokens = 128;  // of a block
constexpr int kLargeCluster = 2;   // blocks that share rows of weight

// Widths of tiles, and what one costs: a narrower one needs more of L2 per product (measured on an
// H200).
struct LargeTile {
  int columns;
  double cost;
};
constexpr LargeTile kLargeTiles[] = {{256, 256.}, {192, 192. * 1.04}, {128, 128. * 1.12}};

// Of a cluster. Of groups, about: as if those that have rows had as many each.
inline int64_t num_large_tiles(const GemmProblem& p, int columns) {
  constexpr int64_t kPair = kLargeCluster * kLargeTokens;
  const int64_t tiles = ceil_div(p.out_features, columns);
  if (p.num_groups == 0) return ceil_div(p.num_rows, kPair) * tiles;
  // Up to a tile's rows that are left over go with two tiles of weights.
  const int64_t rows = p.rows_of_weight(), pairs = (rows + kLargeTokens - 1) / kPair;
  const int64_t left = rows > pairs * kPair ? ceil_div(tiles, kLargeCluster) : 0;
  return std::min(p.num_rows, p.num_groups) * (pairs * tiles + left);
}

// The width whose last wave wastes least.
inline int choose_gemm_columns(const GemmProblem& p, int num_multiprocessors) {
  int best = 0;
  double best_cost = 0.;
  for (const LargeTile& tile : kLargeTiles) {
    const int64_t waves =
        ceil_div(num_large_tiles(p, tile.columns), num_multiprocessors / kLargeCluster);
    const double cost = static_cast<double>(waves) * tile.cost;
    if (best == 0 || cost < best_cost) best_cost = cost, best = tile.columns;
  }
  return best;
}

// Multiprocessors that have a tile, of 1, over all waves.
inline double large_tiles_fill(const GemmProblem& p, int num_multiprocessors) {
  const int64_t clusters = num_multiprocessors / kLargeCluster;
  const int64_t tiles = num_large_tiles(p, choose_gemm_columns(p, num_multiprocessors));
  return static_cast<double>(tiles) / static_cast<double>(ceil_div(tiles, clusters) * clusters);
}

// ------------------------------------------------------------------------------- packed weights

constexpr int kUnitRows = 16, kUnitColumns = 128;  // packed_weight.cuh

constexpr int code_bits(GemmOperands packed) {
  return packed == GemmOperands::kWeightInt8 || packed == GemmOperands::kWeightInt8Groups ? 8 : 4;
}

// ----------------------------------------------------------------------------- gemm_packed_sm90

constexpr int kMaxSplit = 8;           // blocks that share k
constexpr int kSmallPackedRows = 128;  // of weight, of a block

struct PackedSplit {
  int tokens = 16;     // of a block: 16, 32, 64, 128
  int64_t blocks = 1;  // that do not share k
  int split = 1;
};

// The most tokens of a block whose rows have the same bits however many there are: of more than 32,
// scales of groups of columns are applied elsewhere (gemm_packed_sm90.cu).
constexpr int alike_packed_tokens(GemmOperands operands) {
  return operands == GemmOperands::kWeightInt4 || operands == GemmOperands::kWeightInt8Groups ? 32
                                                                                              : 64;
}

// As many blocks as multiprocessors share k.
inline PackedSplit choose_packed_split(const GemmProblem& p, int num_multiprocessors) {
  PackedSplit chosen;
  while (chosen.tokens < p.num_rows && chosen.tokens < 128) chosen.tokens *= 2;
  chosen.blocks = ceil_div(p.out_features, kSmallPackedRows) * ceil_div(p.num_rows, chosen.tokens);
  const int64_t parts = std::min<int64_t>(kMaxSplit, packed_units(p.in_features));
  chosen.split =
      static_cast<int>(std::clamp<int64_t>(num_multiprocessors / chosen.blocks, 1, parts));
  return chosen;
}

// Microseconds of 65 to 128 rows, about, as measured on an H200.
inline double packed_split_cost(const GemmProblem& p, int num_multiprocessors) {
  const PackedSplit chosen = choose_packed_split(p, num_multiprocessors);
  const int64_t steps = ceil_div(packed_units(p.in_features), chosen.split);
  const int64_t waves = ceil_div(chosen.blocks * chosen.split, num_multiprocessors);
  return 11. + static_cast<double>(waves * steps) * .63;
}

// ----------------------------------------------------------------------- gemm_packed_groups_sm90

// Blocks that have registers on a multiprocessor, and KiB of a block's shared memory where so many
// fit.
constexpr int packed_groups_fit(GemmOperands operands, int tokens) {
  if (tokens <= (code_bits(operands) == 8 ? 8 : 16)) return 3;
  return tokens <= (operands == GemmOperands::kW4A8 ? 32 : 64) ? 2 : 1;
}
constexpr int kPackedGroupsShared[] = {220, 112, 75};
// What shares of slabs are rounded to costs this part of a block's time at most.
constexpr double kPackedGrains = 8.;

// As many blocks as fit: of one, a scheduler has two warps, which wait for each other's results.
// Measured on an H200: three are 9 to 22 % faster than two, with the third left to the next launch.
inline PackedGroupsTile choose_packed_groups_tile(const GemmProblem& p, int num_multiprocessors) {
  const int most = p.is_batch_invariant ? alike_packed_tokens(p.operands) : 128;
  PackedGroupsTile tile;
  tile.tokens = choose_group_tokens(p.num_rows, p.num_groups, 8, most);
  const int fit = packed_groups_fit(p.operands, tile.tokens);
  tile.blocks = fit;
  tile.kilobytes = kPackedGroupsShared[fit - 1];
  // Rows choose their groups at random, about.
  const auto rows = static_cast<double>(p.num_rows), groups = static_cast<double>(p.num_groups);
  const double tiles = std::max(groups * (1. - std::exp(-rows / groups)), rows / tile.tokens);
  const int64_t items = ceil_div(p.out_features, kUnitRows) / (p.gated ? 2 : 1);
  tile.grain = p.gated ? 2 : 4;
  while (tile.grain > 1 && tiles * static_cast<double>(ceil_div(items, tile.grain)) <
                               kPackedGrains * std::min(fit, 2) * num_multiprocessors) {
    tile.grain /= 2;
  }
  return tile;
}

// ----------------------------------------------------------------------- gemm_packed_tiles_sm90

constexpr int kMaxShared = 160;  // multiprocessors that share tiles out

// What tiles cost: microseconds of a unit, as measured on an H200.
struct PackedTileCost {
  int rows, tokens;
  double unit;
  bool gated;            // products may be
  bool grouped = false;  // rows may have groups with a weight each
};
constexpr PackedTileCost kPackedTiles[] = {
    {256, 128, 1.30, true, true}, {192, 192, 1.44, false},      {192, 128, 1.00, false},
    {128, 256, 1.25, false},      {128, 224, 1.09, false},      {128, 192, .95, false},
    {128, 160, .79, false},       {128, 128, .66, false, true}, {128, 64, .51, false, true}};

// Likewise, of the exchange of sums among 1, 2, 4 and 8 shares, and what a tile costs beside its
// units.
constexpr double kPackedExchange[] = {0., 5., 7., 10.};
constexpr double kPackedTile = 2.;

// The same of groups, whose tiles only the device knows: groups alike, half of a group's last tile
// in use. Last waves are not shared out.
inline PackedTiles packed_group_tiles_of(const GemmProblem& p, const PackedTileCost& shape,
                                         int num_multiprocessors) {
  const double mean = static_cast<double>(p.num_rows) / static_cast<double>(p.num_groups);
  const double tiles = static_cast<double>(ceil_div(p.out_features, shape.rows) * p.num_groups) *
                       std::max(1., mean / shape.tokens + .5);
  const double units = static_cast<double>(packed_units(p.in_features));
  PackedTiles chosen = {shape.rows, shape.tokens};
  chosen.cost = std::max(1., tiles / num_multiprocessors + .5) * (units * shape.unit + kPackedTile);
  return chosen;
}

inline PackedTiles packed_tiles_of(const GemmProblem& p, const PackedTileCost& shape,
                                   int num_multiprocessors) {
  if (p.num_groups > 0) return packed_group_tiles_of(p, shape, num_multiprocessors);
  const int64_t units = packed_units(p.in_features), blocks = num_multiprocessors;
  const int64_t tiles = ceil_div(p.out_features, shape.rows) * ceil_div(p.num_rows, shape.tokens);
  const int64_t tail = tiles % blocks, room = std::min<int64_t>(blocks, kMaxShared);
  const auto share_cost = [&](int bits) {
    return ceil_div(units, 1 << bits) * shape.unit + kPackedExchange[bits];
  };
  PackedTiles chosen = {shape.rows, shape.tokens};
  for (int bits = 1; bits <= 3; ++bits) {
    const int64_t shares = 1 << bits;
    if (tail * shares > room || shape.tokens % (shares * 16) != 0) break;
    if ((shares - 1) * ceil_div(units, shares) >= units) break;  // the last one would be empty
    if (share_cost(bits) < share_cost(chosen.share_bits)) chosen.share_bits = bits;
  }
  chosen.cost = tiles / blocks * (units * shape.unit + kPackedTile);
  if (tail > 0) chosen.cost += share_cost(chosen.share_bits) + kPackedTile;
  return chosen;
}

inline PackedTiles choose_packed_tiles(const GemmProblem& p, int num_multiprocessors) {
  PackedTiles best;
  for (const PackedTileCost& shape : kPackedTiles) {
    if ((p.gated && !shape.gated) || (p.num_groups > 0 && !shape.grouped)) continue;
    const PackedTiles tiles = packed_tiles_of(p, shape, num_multiprocessors);
    if (best.rows == 0 || tiles.cost < best.cost) best = tiles;
  }
  return best;
}

}  // namespace regatta::cuda
