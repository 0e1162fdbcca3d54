// Rows times a packed weight, as used inside a running parallel region. This header is the part
// that does not depend on the ISA; cpu/gemm.inl has the functions that a block op calls.
//
// A block op, in its .inl (after `#include "gemm.inl"`):
//
//   const GemmKernels* qkv = nullptr;                                  // before the region
//   Status status = find_gemm(scheme, weight, dtype, REGATTA_ISA_ENUM, &qkv);
//   if (!status.ok()) return status;
//   PackedRows rows = make_rows(*qkv, Scratch::mine(), num_rows, hidden_size);
//   parallel([&](Team& team) {
//     rms_norm_rows(team, rows, x, norm_weight, epsilon);              // fills `rows`, shared
//     team.barrier();
//     gemm(team, *qkv, rows, weight,                                   // any split over threads
//          [&](int64_t row, int64_t num, int64_t column, int64_t num_columns, const float* tile) {
//            // tile[i * kPanel + j] is the product for (row + i, column + j), once, complete
//          });
//     team.barrier();                                                  // the caller's business
//   });
//
// Rules
//  * Activations are arranged ("packed rows") once, by whoever produces them: a row of floats is
//    handed to pack_columns()/pack_row(), which rounds to what the kernels multiply.
//  * A row's product does not depend on which other rows are in the batch, nor on the number of
//    threads: k is summed in one order, so results are bitwise equal for every batch composition.
//  * gemm() has no barrier inside: rows must be complete before, outputs after one.
//  * Schemes (how a weight is stored) are a table by name; a new one is one file that defines a
//    `static const SchemeEntry`. Only the scheme knows what its tensors are.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "dispatch.h"
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

enum class RowFormat : uint8_t { kFloat32, kBFloat16 };

// Activations in tiles of rows, [tile][line][row of tile][64 bytes]: a microkernel walks one
// pointer, and copying a row in needs no transposition. A line holds 16 float or 32 bf16 values of
// one row. The last tile may have fewer rows; its stride is the same.
//
//   tile 0: | row 0 k 0..15 | row 1 k 0..15 | ... | row 0 k 16..31 | row 1 k 16..31 | ...
struct PackedRows {
  RowFormat format = RowFormat::kFloat32;
  int64_t num_rows = 0;
  int64_t width = 0;      // K
  int64_t tile_rows = 1;  // rows per tile
  char* data = nullptr;

  int64_t line_values() const { return format == RowFormat::kBFloat16 ? 32 : 16; }
  int64_t num_lines() const { return (width + line_values() - 1) / line_values(); }
  int64_t num_tiles() const { return (num_rows + tile_rows - 1) / tile_rows; }
  int64_t tile_bytes() const { return num_lines() * tile_rows * kLineBytes; }
  const char* tile(int64_t t) const { return data + t * tile_bytes(); }
  // Line that holds (row, column).
  char* line(int64_t row, int64_t column) const {
    const int64_t t = row / tile_rows;
    return data + t * tile_bytes() +
           ((column / line_values()) * tile_rows + row - t * tile_rows) * kLineBytes;
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
};

// How weights are stored, by name. `check` names what is wrong with the tensors; `kernels` returns
// null when there is none for that activation dtype.
struct Scheme {
  const char* name;
  Status (*check)(const Weight& weight, DType activation_dtype);
  const GemmKernels* (*kernels)(Isa isa, DType activation_dtype);
};

// `static const SchemeEntry kEntry(&kScheme);` puts a scheme into the table.
class SchemeEntry {
 public:
  explicit SchemeEntry(const Scheme* scheme);
};

// Looks the scheme up and checks the weight's tensors. The error names the known schemes.
Status find_gemm(const std::string& scheme, const Weight& weight, DType activation_dtype, Isa isa,
                 const GemmKernels** kernels);

}  // namespace regatta::cpu
