// Rows times a packed weight, as used inside a running parallel region. This header is the part
// that does not depend on the ISA; cpu/block.inl has what does, the packing of rows and the storing
// of tiles.
//
// A block op, in its .inl (after `#include "block.inl"`):
//
//   Gemm qkv;                                                          // before the region
//   Status status = find_gemm(scheme, weight, dtype, &qkv);
//   if (!status.ok()) return status;
//   PackedRows rows = make_rows(qkv, Scratch::mine(), num_rows, Fill::kByRow);
//   parallel([&](Team& team) {
//     pack_rows(team, rows, x, width);                                 // fills `rows`, shared
//     complete_rows(team, rows);
//     gemm(team, qkv, rows, [&](const Tile& tile) { ... });            // any split over threads
//     team.barrier();                                                  // the caller's business
//   });
//
// Rules
//  * Activations are arranged ("packed rows") once, by whoever produces them: a row of floats is
//    handed to pack_columns()/pack_row(), which rounds to what the kernels multiply. The barrier
//    after that is complete_rows(): some formats need a row as a whole before they can round it.
//  * A row's product does not depend on which other rows are in the batch, nor on the number of
//    threads: k is summed in one order, so results are bitwise equal for every batch composition.
//  * gemm() has no barrier inside: rows must be complete before, outputs after one.
//  * Schemes (how a weight is stored) are a table; a new one is one file that defines a
//    `static const SchemeEntry`. Only the scheme knows what its tensors are. Its kernels are
//    compiled for each ISA in that file alone, and called through GemmKernels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "dispatch.h"
#include "function_ref.h"
#include "regatta/blocks.h"
#include "regatta/types.h"
#include "thread_pool.h"

namespace regatta::cpu {

constexpr int64_t kPanel = 32;      // output columns stored together
constexpr int64_t kLineBytes = 64;  // packed rows come in cache lines
// Rows a block op takes through its phases at once; longer prompts come in blocks of this many, so
// that scratch stays at some tens of MB.
constexpr int64_t kMaxBlockRows = 768;

// A [in_features, out_features] matrix stored by a scheme.
struct Weight {
  const TensorView* tensors = nullptr;
  int num_tensors = 0;
  int64_t in_features = 0;   // K
  int64_t out_features = 0;  // N
  int64_t num_panels() const { return (out_features + kPanel - 1) / kPanel; }
};

// What the kernels multiply.
enum class RowFormat : uint8_t {
  kFloat32,
  kBFloat16,
  kBFloat16Sums,  // the same, and the sum of each block of 32 values of a row
  kInt8Blocks,    // int8, a scale for each block of 32 values of a row
  kInt8Rows,      // int8, one scale for the row (or for all rows)
  kFloat16,
  kSwappedPairs,  // bfloat16 values as floats, those of a pair swapped
};

constexpr int64_t kBlock = 32;  // values that share a scale in kInt8Blocks

// Beside each block of 32 int8 values of a row (in kInt8Rows too, where all scales are the same).
// Weights are stored as unsigned codes u = w + offset, so that sum(w x) = sum(u x) - offset sum(x).
struct BlockScale {
  float scale;  // x = q * scale
  union {
    int32_t start;    // -offset * sum(q): where the integer sum of the products starts
    float value_sum;  // of the rounded values, where each weight group has its own zero point
  };
};

// What happens to activations before they are rounded, by the linear's tensors. Null: nothing.
struct RowTransform {
  const int32_t* perm = nullptr;  // [K] value i is x[perm[i]]
  const float* shift = nullptr;   // [K] x' = (x + shift) * smooth
  const float* smooth = nullptr;  // [K]
  float static_scale = 0.0f;      // kInt8Rows: the scale of every row; 0: absmax / 127 of each
  int32_t offset = 0;             // of the codes; 0: BlockScale holds value_sum
  bool any() const { return perm || shift || smooth; }
};

struct GemmKernels;

// Activations in tiles of rows, [tile][line][row of tile][64 bytes]: a microkernel walks one
// pointer, and copying a row in needs no transposition. A line holds 16 float, 32 bf16 or fp16, or
// 64 int8 values of one row. The last tile may have fewer rows; its stride is the same.
//
//   tile 0: | row 0 k 0..15 | row 1 k 0..15 | ... | row 0 k 16..31 | row 1 k 16..31 | ...
//
// Tiles of int8, and of kBFloat16Sums, go on with [block][row of tile] BlockScale.
struct PackedRows {
  RowFormat format = RowFormat::kFloat32;
  int64_t num_rows = 0;
  int64_t width = 0;      // K
  int64_t tile_rows = 1;  // rows per tile
  char* data = nullptr;
  RowTransform transform;
  const GemmKernels* kernels = nullptr;  // that multiply them
  float* staged = nullptr;  // [num_rows, width] until complete_rows() rounds it; or null

  bool is_int8() const {
    return format == RowFormat::kInt8Blocks || format == RowFormat::kInt8Rows;
  }
  bool is_16_bit() const {
    return format == RowFormat::kBFloat16 || format == RowFormat::kBFloat16Sums ||
           format == RowFormat::kFloat16;
  }
  bool has_blocks() const { return is_int8() || format == RowFormat::kBFloat16Sums; }
  int64_t line_values() const { return is_int8() ? 64 : is_16_bit() ? 32 : 16; }
  int64_t num_lines() const { return (width + line_values() - 1) / line_values(); }
  int64_t num_blocks() const { return (width + kBlock - 1) / kBlock; }
  int64_t num_tiles() const { return (num_rows + tile_rows - 1) / tile_rows; }
  int64_t lines_bytes() const { return num_lines() * tile_rows * kLineBytes; }
  int64_t tile_bytes() const {
    if (!has_blocks()) return lines_bytes();
    const int64_t scales = num_blocks() * tile_rows * int64_t{sizeof(BlockScale)};
    return lines_bytes() + (scales + kLineBytes - 1) / kLineBytes * kLineBytes;
  }
  const char* tile(int64_t t) const { return data + t * tile_bytes(); }
  // Line that holds (row, column).
  char* line(int64_t row, int64_t column) const {
    const int64_t t = row / tile_rows;
    return data + t * tile_bytes() +
           ((column / line_values()) * tile_rows + row - t * tile_rows) * kLineBytes;
  }
  // [block][tile_rows] of a tile that has them.
  BlockScale* block_scales(int64_t t) const {
    return reinterpret_cast<BlockScale*>(data + t * tile_bytes() + lines_bytes());
  }
};

// What a scheme computes: the products of some row tiles with some panels.
struct PanelJob {
  const PackedRows* rows;
  int64_t tile_begin, tile_end;
  const Weight* weight;
  int64_t panels[2];
  int num_panels;    // 1 or 2
  float* out;        // [num_panels][num_rows()][kPanel], overwritten
  Scratch* scratch;  // of this thread

  int64_t first_row() const { return tile_begin * rows->tile_rows; }
  int64_t num_rows() const {
    return std::min(tile_end * rows->tile_rows, rows->num_rows) - first_row();
  }
};

struct GemmKernels {
  RowFormat row_format;
  int64_t max_tile_rows;
  int64_t max_rows_of_two;  // with at most so many rows it reads two panels at once
  void (*run)(const PanelJob& job);
  // Products of so many rows with a panel stay in L1 or L2 until they are stored (96 rows are 12
  // KiB), and so many bytes of rows surely stay in the cache that all panels pass by.
  int64_t block_rows = 96, cached_bytes = int64_t{8} << 20;
  const GemmKernels* of_few = nullptr;  // that multiply at most max_rows_of_two rows, if others do

  const GemmKernels* of(int64_t num_rows) const {
    return of_few && num_rows <= max_rows_of_two ? of_few : this;
  }
};

// Many rows pass over a panel in blocks of tiles.
struct RowBlocks {
  int64_t tiles;   // of a block; the last one may have fewer
  int64_t count;   // of blocks
  int64_t cached;  // blocks to take over all panels before the next ones

  explicit RowBlocks(const PackedRows& rows) {
    const int64_t in_cache = rows.kernels->cached_bytes / rows.tile_bytes();
    tiles = std::max<int64_t>(1, std::min(rows.kernels->block_rows / rows.tile_rows, in_cache));
    count = (rows.num_tiles() + tiles - 1) / tiles;
    tiles = count > 0 ? (rows.num_tiles() + count - 1) / count : 1;
    cached = std::max<int64_t>(1, in_cache / tiles);
  }
};

// How weights are stored. `check` names what is wrong with the tensors; `kernels` returns
// null when there is none for that activation dtype; `transform` (or null) says what the tensors
// ask of activations.
struct Scheme {
  SchemeId id;
  Status (*check)(const Weight& weight, DType activation_dtype);
  const GemmKernels* (*kernels)(Isa isa, DType activation_dtype, const Weight& weight);
  RowTransform (*transform)(const Weight& weight, DType activation_dtype) = nullptr;
};

// `static const SchemeEntry kEntry(&kScheme);` puts a scheme into the table.
class SchemeEntry {
 public:
  explicit SchemeEntry(const Scheme* scheme);
};

// A weight with the kernels that multiply by it, for one activation dtype and the running ISA.
struct Gemm {
  Weight weight;
  const GemmKernels* kernels = nullptr;
  RowTransform transform;
};

// Looks the scheme up and checks the weight's tensors. The error names the known schemes.
Status find_gemm(SchemeId scheme, const Weight& weight, DType activation_dtype, Gemm* gemm);

// The same for a linear's weights; `name` is what an error calls them.
Status find_linear(const char* name, const LinearWeights& weights, SchemeId scheme,
                   int64_t in_features, int64_t out_features, DType activation_dtype, Gemm* gemm);

// Whether a linear's tensors fit it, those of which products believe the values, too: an order of
// columns names columns. For weights of a file.
Status check_linear(const char* name, const LinearWeights& weights, SchemeId scheme,
                    int64_t in_features, int64_t out_features, DType activation_dtype);

// The same for other tensors of the same shapes, which are not checked again.
Gemm gemm_like(const Gemm& checked, SchemeId scheme, const TensorView* tensors,
               DType activation_dtype);

enum class Fill : uint8_t { kByRow, kByColumns };  // pack_row() alone, or pack_columns() too

// Rows to be filled, in memory of `scratch` (the caller's, taken before the region), with at most
// `max_tile_rows` in a tile; 0: as many as the kernels take.
PackedRows make_rows(const Gemm& gemm, Scratch& scratch, int64_t num_rows, Fill fill,
                     int64_t max_tile_rows = 0);

// Row `from` of `rows` as row `to` of others of the same format, width and transform.
void copy_packed_row(const PackedRows& rows, int64_t from, const PackedRows& others, int64_t to);

// Complete products of rows [row, row + num_rows) and output columns [column, column +
// num_columns), which whoever gets them may change.
struct Tile {
  int64_t row, num_rows, column, num_columns;
  float* products;          // [num_rows][kPanel]
  float* second = nullptr;  // of the panel `halves` further on; or null
  int64_t owner = 0;        // gemm_groups(): whose; head_products(): the head
};
using TileFn = FunctionRef<void(const Tile& tile)>;

// store(tile): each (row, column) comes exactly once, on some thread. No barrier inside.
// in_halves: the halves of a weight together, column c and c + N / 2, where N / 2 is a multiple of
// 32: tiles are of the first half, and have a second one.
void gemm(Team& team, const Gemm& gemm, const PackedRows& rows, TileFn store,
          bool in_halves = false);

inline Weight weight_of(const LinearWeights& weights, SchemeId scheme, int64_t in_features,
                        int64_t out_features) {
  return {weights.tensors, scheme_info(scheme).num_tensors, in_features, out_features};
}

}  // namespace regatta::cpu
