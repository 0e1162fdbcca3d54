// Products of activations with a weight, dense as checkpoints store it or in codes of 8 and 4 bits,
// for CUDA devices. No framework.
//
// M rows (tokens), K in_features, N out_features, I = N / 2 when gated.
#pragma once

#include <cstdint>

#include "regatta/activate.h"
#include "regatta/types.h"

struct CUstream_st;  // cudaStream_t without the CUDA headers

namespace regatta {

// Columns whose squares one partial of GemmParams::sumsq_out covers, for this many rows.
constexpr int64_t gemm_sumsq_columns(int64_t num_rows) { return num_rows <= 8 ? 16 : 64; }

// Columns that share a scale of a block, and the row stride of scales of activations in blocks.
constexpr int64_t kScaleBlock = 128;
constexpr int64_t gemm_block_stride(int64_t num_rows) { return (num_rows + 127) / 128 * 128; }

// Rows from which e4m3 codes may go through cuBLASLt.
constexpr int64_t kRowsBlasCodes = 129;

// How x and weight are stored.
enum class GemmOperands : uint8_t {
  kDense,  // both of GemmParams::dtype
  kFp8,    // both e4m3 codes; value = code * x_scale[m], code * weight_scale[n]
  kInt8,   // the same with int8 codes
  // x of GemmParams::dtype, weight packed by pack_weight():
  kWeightInt8,        // value = code * weight_scale[n]
  kWeightInt4,        // value = (code - zero) * scale, both of a row's group of columns
  kWeightInt8Groups,  // the same
  kWeightMxfp4,       // value = e2m1 of the code * scale; groups of 32 columns
  // x int8 codes, value = code * x_scale[m]; weight packed by pack_weight():
  kW4A8,  // 4 bits, value = (code - zero) * scale as above
};

constexpr bool is_packed(GemmOperands operands) { return operands >= GemmOperands::kWeightInt8; }

// out = epilogue(scale[m] * (x weight^T)[m, n] + bias[n]), all in float, rounded once at the end.
//   scale[m] = rsqrt(sum(sumsq[m, :]) / K + epsilon), or 1 without sumsq. That is an RMS norm of x
//   when the norm's weight has been multiplied into the columns of `weight` (fold_norm_weight).
//   Of codes, it is x_scale[m] * weight_scale[n].
//   epilogue: + residual[m, n]; or, gated, function(column n) * column (I + n) for n < I.
struct GemmParams {
  const void* x = nullptr;              // [M, K]
  const void* weight = nullptr;         // [N, K]; gated: gate rows, then up rows
  const void* bias = nullptr;           // [N]
  const void* residual = nullptr;       // [M, N]; may be out
  const float* sumsq = nullptr;         // [M, num_sumsq]: partial sums of x^2; none with codes
  const float* x_scale = nullptr;       // [M], of kFp8, kInt8 and kW4A8; see scale_rows
  const float* weight_scale = nullptr;  // [N], of kFp8, kInt8 and kWeightInt8; see scale_rows
  void* out = nullptr;                  // [M, N]; gated: [M, I]
  float* sumsq_out = nullptr;           // [M, ceil(N / gemm_sumsq_columns(M))]: of out, as rounded
  // With sumsq_out, of packed weights: out * next_norm_weight, which the product behind the norm
  // reads as its x, with sumsq.
  void* scaled_out = nullptr;              // [M, N] of dtype
  const void* next_norm_weight = nullptr;  // [N]
  int64_t num_rows = 0;                    // M
  int64_t in_features = 0;                 // K
  int64_t out_features = 0;                // N
  int64_t num_sumsq = 0;
  int64_t group_size = 128;  // where groups of columns have scales: packed_group_size()
  // Not 0: of kFp8, scales of blocks of 128 columns (B of them) by so many rows of weight, 128 or
  // 1: x_scale is [B, gemm_block_stride(M)], weight_scale [ceil(N / scale_rows), B].
  int64_t scale_rows = 0;
  // Not 0: groups of rows have a weight each (experts). weight, bias and weight_scale are [G, ...]
  // of what they are without groups; rows group_ends[g - 1] .. group_ends[g] - 1 of x, from 0 on,
  // go with weight g. Many groups may have no rows. None of residual, sumsq, sumsq_out, scaled_out.
  int64_t num_groups = 0;               // G
  const int32_t* group_ends = nullptr;  // [G] on the device; the last one is M
  // Whether group_ends was there before the launch ahead on the stream could begin: then weights
  // are asked for while that one ends. So it is behind another product of the same groups, and not
  // right behind the kernel that writes them.
  bool group_ends_ready = false;
  float epsilon = 0.f;
  GemmOperands operands = GemmOperands::kDense;
  DType dtype = DType::kBFloat16;      // of bias and residual, and of dense x and weight
  DType out_dtype = DType::kBFloat16;  // dtype, or float32
  bool gated = false;
  bool activates = false;               // not gated: columns go through `function`, then + residual
  Function function = Function::kSilu;  // of them, or of gates
  // The launch may overlap the end of the kernel ahead of it on the stream (common.cuh, PDL).
  bool dependent_launch = true;
};

// Activations as codes: x = code * scale[m].
struct QuantizeRowsParams {
  const void* x = nullptr;              // [M, K]; gated: [M, 2 K]
  const void* norm_weight = nullptr;    // [K] or null
  const float* shift = nullptr;         // [K] or null: x' = (x + shift) * smooth is what is coded
  const float* smooth = nullptr;        // [K] or null
  const float* static_scale = nullptr;  // [1] or null; where it is 0, absmax / largest code
  void* codes = nullptr;                // [M, K] int8 or e4m3
  float* scale = nullptr;               // [M]; in blocks [ceil(K / 128), gemm_block_stride(M)]
  int64_t num_rows = 0, width = 0;
  float epsilon = 0.f;
  bool blocks = false;  // a scale for every 128 columns of a row; kFp8 alone, without shift, smooth
  bool normalize = false;  // x is divided by its root mean square first
  // silu(x[:, k]) * x[:, K + k], rounded to dtype, is what is coded; kFp8 alone, without norm,
  // shift and smooth.
  bool gated = false;
  GemmOperands operands = GemmOperands::kFp8;
  DType dtype = DType::kBFloat16;  // of x and norm_weight
  bool dependent_launch = true;
};

// Codes of a weight into the order in which the GPU's kernels read them: rows in tiles of 16,
// columns in units of 128, the operand registers of one thread side by side. But with kWeightInt8,
// a unit ends with the scales and zero points of its groups.
struct PackWeightParams {
  const int8_t* codes = nullptr;  // [N, K]: -128..127, or 0..15
  const float* scale = nullptr;   // [N, num_groups], but of kWeightInt8
  // [N, num_groups] whole numbers: -128..128, or of 4 bits 0..16; null: 0, or of 4 bits 8. None of
  // kWeightMxfp4.
  const float* zero = nullptr;
  uint8_t* packed = nullptr;  // packed_weight_bytes()
  int64_t out_features = 0, in_features = 0, num_groups = 1;
  GemmOperands operands = GemmOperands::kWeightInt8;  // or another whose weight is packed
  DType dtype = DType::kBFloat16;  // of the activations; the same for all of kW4A8
};

namespace cuda {

// Columns of a group as packed: 128, 64 (kWeightInt8Groups: always), the scales of wider ones being
// repeated, 32 (kWeightInt4, kWeightMxfp4), or 0 when groups of in_features / num_groups columns
// cannot be packed.
int64_t packed_group_size(GemmOperands operands, int64_t in_features, int64_t num_groups);
// The same from the last dimension of a packed weight [tiles, units, bytes].
int64_t packed_unit_group_size(int64_t unit_bytes);
// Whether units of 8-bit codes of this size have scales of groups: kWeightInt8Groups.
bool packed_unit_has_groups(int64_t unit_bytes);
// out[m, k] = x[m, perm[k]] of 16-bit values.
Status gather_columns(const void* x, const int32_t* perm, void* out, int64_t num_rows,
                      int64_t width, CUstream_st* stream);
// out[i] = scale[i], or scale[0] where count is 1.
Status repeat_scale(const float* scale, int64_t count, float* out, int64_t num_values,
                    CUstream_st* stream);
Status copy_bytes(void* to, const void* from, int64_t bytes, CUstream_st* stream);
// Rows of tiles of 16 and columns of units of 128: the first dimensions of a packed weight.
constexpr int64_t packed_tiles(int64_t out_features) { return (out_features + 15) / 16; }
constexpr int64_t packed_units(int64_t in_features) { return (in_features + 127) / 128; }
int64_t packed_weight_bytes(int64_t out_features, int64_t in_features, GemmOperands operands,
                            int64_t group_size);
Status pack_weight(const PackWeightParams& params, CUstream_st* stream);
// out[n, k] of params.dtype: the matrix that packed stands for; not of kW4A8. weight_scale: as
// GemmParams.
Status unpack_weight(const GemmParams& params, void* out, CUstream_st* stream);

// Launches of the sm_90a kernel. A pure function of the problem chooses one.
struct GemmTile {
  int tokens = 8;     // rows of x per block: 8, 16, 32, 64, 128; packed: from 16
  int features = 64;  // rows of weight per block: 64, 128, 256; packed: 128
  int stages = 4;     // of 64 values of k in flight
  int split = 1;      // blocks of a cluster that share one tile's k: 1, 2, 4, 8; packed: to 8
  int trigger = 4;    // stages left to request when the next kernel may start; -1: at once
  int blocks = 1;     // of groups, not packed: blocks of a multiprocessor, which stay
};
GemmTile choose_gemm_tile(const GemmParams& params);

// What gemm() needs beside the tensors; the caller owns all of it, for one stream.
struct GemmResources {
  void* blas = nullptr;     // from create_blas(), or null: then cuBLASLt is not used
  void* scratch = nullptr;  // gemm_scratch_bytes() of the largest problem
  int64_t scratch_bytes = 0;
  void* matrix =
      nullptr;  // room for a packed weight as a matrix: gemm_matrix_bytes() of the largest
  int64_t matrix_bytes = 0;
};
Status create_blas(void** blas);  // for the current device; an error when built without cuBLASLt
void destroy_blas(void* blas);
int64_t gemm_scratch_bytes(const GemmParams& params);
// What gemm() makes of this weight on this GPU, in bytes, where it multiplies by the matrix that a
// packed weight stands for, as it does with many rows; 0 where it does not. Reads sizes, types and
// `gated` alone.
int64_t gemm_matrix_bytes(const GemmParams& params);

// Whether gemm() makes the function of `params`, another than a gate's SiLU, with so many rows.
bool gemm_makes_function(const GemmParams& params);

// Runs the first candidate that accepts (csrc/cuda/gemm/select.cu). `force`: name of the only ones
// to consider, or null.
Status gemm(const GemmParams& params, const GemmResources& resources, const char* force,
            CUstream_st* stream);

// Whether products of packed weights give scaled_out on this GPU, for so many rows. float16 has no
// room for it.
bool gemm_packed_scales_out(DType dtype, int64_t num_rows);

// sums[m, i] = sum of squares of x[m, i * columns .. (i + 1) * columns - 1], and scaled, if there
// is one, x * norm_weight: what the product ahead does in its epilogue, for a first layer.
struct RowSumsqParams {
  const void* x = nullptr;            // [M, N]
  float* sums = nullptr;              // [M, ceil(N / columns)]
  const void* norm_weight = nullptr;  // [N]
  void* scaled = nullptr;             // [M, N] or null
  int64_t num_rows = 0, width = 0, columns = 0;
  DType dtype = DType::kBFloat16;
};
Status row_sumsq(const RowSumsqParams& params, CUstream_st* stream);

// weight[n, k] *= norm_weight[k], in place, rounded once. [N, K], [K], same dtype.
Status fold_norm_weight(void* weight, const void* norm_weight, DType dtype, int64_t out_features,
                        int64_t in_features, CUstream_st* stream);

// Who holds a row: a block; a warp, of many narrow rows; four blocks, of few wide ones. The codes
// are the same.
enum class QuantizeWay : uint8_t { kBlock, kWarp, kCluster };
bool can_quantize(const QuantizeRowsParams& params, QuantizeWay way);
Status quantize_rows(const QuantizeRowsParams& params, CUstream_st* stream);  // the best way
Status quantize_rows(const QuantizeRowsParams& params, QuantizeWay way, CUstream_st* stream);

// gemm() of the codes that quantize_rows() makes of q.x, in one launch where that is faster. x and
// x_scale of `params` are not read; q.codes and q.scale are room for them, and may stay unwritten.
Status gemm_quantized(const GemmParams& params, const QuantizeRowsParams& q,
                      const GemmResources& resources, CUstream_st* stream);

// gemm_quantized() of a gated product whose output is read as codes alone: those that `next` makes
// of it, where *coded becomes true; else `out` is what gemm() leaves. next.x is out; next.codes and
// next.scale are not q's.
Status gemm_to_codes(const GemmParams& params, const QuantizeRowsParams& q,
                     const QuantizeRowsParams& next, const GemmResources& resources, bool* coded,
                     CUstream_st* stream);

// The kernels. Where one cannot do `params`, it says why.
Status gemm_stream_sm80(const GemmParams& params, bool use_mma,
                        CUstream_st* stream);  // else: gemv at M 1, in groups up to 32
Status gemm_sm90(const GemmParams& params, CUstream_st* stream);
Status gemm_sm90(const GemmParams& params, const GemmTile& tile, CUstream_st* stream);
Status gemm_packed_sm90(const GemmParams& params, CUstream_st* stream);
Status gemm_packed_sm90(const GemmParams& params, const GemmTile& tile, CUstream_st* stream);
// Launches of gemm_packed_groups_sm90: gemm_packed_sm90 of groups of rows.
struct PackedGroupsTile {
  int tokens = 8;       // of a group, at most: 8, 16, 32, 64, 128
  int blocks = 1;       // of a multiprocessor
  int kilobytes = 110;  // of shared memory, of a block
  int grain = 4;    // slabs of 16 rows of weight that go to one block: 1, 2, 4; gated, 1, 2 pairs
  int trigger = 4;  // stages left to request when the next kernel may start; -1: at once
};
PackedGroupsTile choose_packed_groups_tile(const GemmParams& params);
Status gemm_packed_groups_sm90(const GemmParams& params, const PackedGroupsTile& tile,
                               CUstream_st* stream);
// Launches of gemv_packed_sm90.
struct GemvTile {
  int cluster = 1;      // blocks that share what they read of x: 1, 2, 4
  int kilobytes = 112;  // of shared memory
  int trigger = 4;      // stages left to request when the next kernel may start
};
Status gemv_packed_sm90(const GemmParams& params, CUstream_st* stream);
Status gemv_packed_sm90(const GemmParams& params, const GemvTile& tile, CUstream_st* stream);
// Tiles of gemm_packed_tiles_sm90.
struct PackedTiles {
  // Of weight and x: 256 x 128; not gated also 192 x 192, 192 x 128, and 128 x 256, 224, 192,
  // 160, 128 and 64.
  int rows = 0, tokens = 0;
  int share_bits = 0;  // those of the last wave are shared out along k among 1, 2, 4 or 8 blocks
  double cost = 0.;    // microseconds, about
};
PackedTiles packed_tiles_of(const GemmParams& params, int rows, int tokens);
Status gemm_packed_tiles_sm90(const GemmParams& params, CUstream_st* stream);
Status gemm_packed_tiles_sm90(const GemmParams& params, const PackedTiles& tiles,
                              CUstream_st* stream);
Status gemm_codes_sm90(const GemmParams& params, const GemmTile& tile, CUstream_st* stream);
Status gemm_blocks_sm90(const GemmParams& params, const GemmTile& tile, CUstream_st* stream);
// Of groups of rows; each kind of operands from the first.
Status gemm_groups_sm90(const GemmParams& params, const GemmTile& tile, CUstream_st* stream);
Status gemm_groups_codes_sm90(const GemmParams& params, const GemmTile& tile, CUstream_st* stream);
Status gemm_groups_blocks_sm90(const GemmParams& params, const GemmTile& tile, CUstream_st* stream);
struct StreamCodesTile {
  int stages = 4;              // of 1024 columns
  int blocks = 2;              // per multiprocessor
  bool trigger_early = false;  // the next kernel may start at once
};
StreamCodesTile choose_stream_codes_tile(const GemmParams& params);
// Whether it takes `quantize` for its x.
bool gemm_stream_codes_sm90_quantizes(const GemmParams& params, const QuantizeRowsParams& quantize);
Status gemm_stream_codes_sm90(const GemmParams& params, const QuantizeRowsParams* quantize,
                              CUstream_st* stream);
Status gemm_stream_codes_sm90(const GemmParams& params, const QuantizeRowsParams* quantize,
                              const StreamCodesTile& tile, CUstream_st* stream);
// `columns`: rows of weight per tile: 128, 192 or 256.
Status gemm_tiles_sm90(const GemmParams& params, CUstream_st* stream);
Status gemm_tiles_sm90(const GemmParams& params, int columns, CUstream_st* stream);
Status gemm_tiles_codes_sm90(const GemmParams& params, int columns, CUstream_st* stream);
Status gemm_tiles_blocks_sm90(const GemmParams& params, CUstream_st* stream);
// Of groups of rows; each kind of operands from the first.
Status gemm_tiles_groups_sm90(const GemmParams& params, int columns, CUstream_st* stream);
Status gemm_tiles_groups_codes_sm90(const GemmParams& params, int columns, CUstream_st* stream);
Status gemm_tiles_groups_blocks_sm90(const GemmParams& params, CUstream_st* stream);
// Launches of the kernels for every architecture (gemm_mma.cuh).
struct MmaTile {
  int tokens = 8;  // rows of x per block: 8, 32, 64; of codes also 128
  int pairs = 1;   // of 16 rows of weight side by side: 1, 2, 4; eight warps share them and k
};
Status gemm_packed_mma(const GemmParams& params, CUstream_st* stream);
Status gemm_packed_mma(const GemmParams& params, const MmaTile& tile, CUstream_st* stream);
Status gemm_codes_mma(const GemmParams& params, CUstream_st* stream);
Status gemm_codes_mma(const GemmParams& params, const MmaTile& tile, CUstream_st* stream);
Status gemm_codes_mma_sm89(const GemmParams& params, const MmaTile& tile, CUstream_st* stream);
Status gemm_generic(const GemmParams& params, CUstream_st* stream);
Status gemm_blas(const GemmParams& params, const GemmResources& resources, CUstream_st* stream);
Status gemm_blas_codes_sm90(const GemmParams& params, const GemmResources& resources,
                            CUstream_st* stream);
// The gated product through cuBLASLt, folded while `next` makes codes of it.
Status gemm_blas_unfolded_sm90(const GemmParams& params, const QuantizeRowsParams& next,
                               const GemmResources& resources, CUstream_st* stream);

}  // namespace cuda
}  // namespace regatta
