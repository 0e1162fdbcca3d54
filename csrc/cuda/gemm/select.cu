// The candidates for a product of activations and weights, and the choice among them.
//
// Host code alone: any C++ compiler takes it. Thresholds are fields of rows; docs/kernels/cuda.md
// says what was measured, and how to do it again.
#include <cstring>
#include <iterator>

#include "cuda/gemm/select.h"
#include "cuda/gemm/tiles.h"

namespace regatta::cuda {
namespace {

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace

GemmProblem::GemmProblem(const GemmParams& p)
    : operands(p.operands),
      dtype(p.dtype),
      out_dtype(p.out_dtype),
      num_rows(p.num_rows),
      in_features(p.in_features),
      out_features(p.out_features),
      group_size(p.group_size),
      scale_rows(p.scale_rows),
      num_groups(p.num_groups),
      gated(p.gated),
      has_function(p.activates || (p.gated && p.function != Function::kSilu)),
      has_bias(p.bias != nullptr),
      has_residual(p.residual != nullptr),
      residual_is_out(p.residual != nullptr && p.residual == p.out),
      has_sumsq(p.sumsq != nullptr),
      has_sumsq_out(p.sumsq_out != nullptr),
      has_scaled_out(p.scaled_out != nullptr),
      has_x_scale(p.x_scale != nullptr),
      has_weight_scale(p.weight_scale != nullptr),
      is_operands_aligned(is_aligned(p.x) && is_aligned(p.weight)),
      is_bias_aligned(is_aligned(p.bias)),
      is_out_aligned(is_aligned(p.out) && is_aligned(p.residual)),
      is_scale_aligned(is_aligned(p.x_scale) && is_aligned(p.weight_scale)) {}

GemmColumn column_of(GemmOperands operands) {
  if (operands == GemmOperands::kDense) return GemmColumn::kDense;
  return is_packed(operands) ? GemmColumn::kPacked : GemmColumn::kCodes;
}

const char* kernel_name(GemmKernel kernel) {
  constexpr const char* kNames[] = {
      "gemv_stream_sm80", "gemm_stream_codes_sm90", "gemv_packed_sm90",
      "gemm_sm90",        "gemm_codes_sm90",        "gemm_packed_sm90",
      "gemm_tiles_sm90",  "gemm_tiles_codes_sm90",  "gemm_packed_tiles_sm90",
      "gemm_blas",        "gemm_blas_codes_sm90",   "gemm_blas_unfolded_sm90",
      "matrix",           "gemm_stream_sm80",       "gemm_packed_mma",
      "gemm_codes_mma",   "gemm_generic",
  };
  static_assert(std::size(kNames) == static_cast<size_t>(GemmKernel::kGeneric) + 1);
  return kNames[static_cast<int>(kernel)];
}

// ------------------------------------------------------------------------------------ refusals

namespace {

// What several say alike; each null where it is fine.
const char* dtypes_refused(const GemmProblem& p) {
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) {
    return "dtype must be bfloat16 or float16";
  }
  if (p.out_dtype != p.dtype && p.out_dtype != DType::kFloat32) {
    return "out_dtype must be dtype or float32";
  }
  return nullptr;
}

const char* operands_unaligned(const GemmProblem& p) {
  return p.is_operands_aligned ? nullptr : "x and weight must be aligned to 16 bytes";
}

const char* gate_refused(const GemmProblem& p) {
  if (p.gated && (p.has_residual || p.has_sumsq_out)) {
    return "a gated product takes no residual and gives no sumsq";
  }
  return nullptr;
}

const char* scales_refused(const GemmProblem& p) {
  if (!p.has_x_scale || !p.has_weight_scale || p.has_sumsq) {
    return "codes need x_scale and weight_scale, and no sumsq";
  }
  return nullptr;
}

// What every product in groups asks for.
const char* groups_refused(const GemmProblem& p) {
  if (p.num_groups > kMaxGroups) return "more than 512 groups of rows";
  if (p.has_residual || p.has_sumsq || p.has_sumsq_out || p.has_scaled_out) {
    return "groups of rows take no residual, norm or sums of squares";
  }
  return nullptr;
}

// Whether cuBLASLt writes p's output, whatever the operands are.
const char* blas_dtypes_refused(const GemmProblem& p) {
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) {
    return "dtype must be bfloat16 or float16";
  }
  if (p.out_dtype != p.dtype &&
      (p.out_dtype != DType::kFloat32 || p.gated || p.has_residual || p.has_bias)) {
    return "a float32 output takes no bias, residual or gate";
  }
  return nullptr;
}

const char* slabs_refused(const GemmProblem& p) {
  if (p.gated && p.out_features % (2 * kUnitRows) != 0) {
    return "out_features must be a multiple of 32 when gated";
  }
  return nullptr;
}

// What every product with packed weights asks for.
const char* packed_refused(const GemmProblem& p) {
  if (column_of(p.operands) != GemmColumn::kPacked) return "the weight must be packed";
  if (const char* reason = dtypes_refused(p)) return reason;
  if (p.operands == GemmOperands::kWeightInt8 && !p.has_weight_scale) {
    return "codes of 8 bits need weight_scale";
  }
  if (p.operands == GemmOperands::kW4A8) {
    if (!p.has_x_scale || p.has_sumsq) return "codes need x_scale, and no sumsq";
    if (p.in_features % 16 != 0) return "in_features must be a multiple of 16";
  }
  if (p.in_features % 8 != 0) return "in_features must be a multiple of 8";
  if (const char* reason = operands_unaligned(p)) return reason;
  if (const char* reason = gate_refused(p)) return reason;
  if (p.has_scaled_out && (!p.has_sumsq_out || p.out_dtype != p.dtype)) {
    return "scaled_out needs sumsq_out, and out of dtype";
  }
  return nullptr;
}

}  // namespace

const char* gemm_stream_sm80_refuses(const GemmProblem& p) {
  if (p.operands != GemmOperands::kDense) return "x and weight must be dense";
  if (const char* reason = dtypes_refused(p)) return reason;
  if (p.in_features % 8 != 0) return "in_features must be a multiple of 8";
  if (const char* reason = operands_unaligned(p)) return reason;
  if (p.gated && p.out_features % 16 != 0) {
    return "out_features must be a multiple of 16 when gated";
  }
  if (const char* reason = gate_refused(p)) return reason;
  if (p.has_sumsq_out && gemm_sumsq_columns(p.num_rows) != 16) {
    return "sumsq_out of more than 8 rows";
  }
  return nullptr;
}

const char* gemm_stream_codes_sm90_refuses(const GemmProblem& p) {
  if (column_of(p.operands) != GemmColumn::kCodes) return "x and weight must be codes";
  if (const char* reason = dtypes_refused(p)) return reason;
  if (p.num_rows > 1) return "more than one row";
  if (p.in_features > 65536) return "more than 65536 in_features";
  if (p.scale_rows != 0) return "scales of blocks";
  if (const char* reason = scales_refused(p)) return reason;
  if (p.has_sumsq_out) return "it gives no sumsq";
  if (p.in_features % 16 != 0) return "in_features must be a multiple of 16";
  if (p.gated && (p.has_residual || p.out_dtype != p.dtype)) {
    return "a gated product takes no residual and has no float32 output";
  }
  return operands_unaligned(p);
}

const char* gemv_packed_sm90_refuses(const GemmProblem& p) {
  if (p.num_groups == 0 && p.num_rows > 8) return "more than 8 rows";
  if (p.in_features % (p.operands == GemmOperands::kW4A8 ? 128 : 64) != 0) {
    return "in_features must be a multiple of 64 values or 128 codes";
  }
  return gemm_packed_sm90_refuses(p);
}

const char* gemm_sm90_refuses(const GemmProblem& p) {
  if (const char* reason = dtypes_refused(p)) return reason;
  if (column_of(p.operands) == GemmColumn::kPacked) return "the weight must not be packed";
  if (column_of(p.operands) == GemmColumn::kCodes) {
    if (const char* reason = scales_refused(p)) return reason;
    if (p.in_features % 16 != 0) return "in_features must be a multiple of 16";
  }
  if (p.scale_rows != 0 && p.operands != GemmOperands::kFp8) return "scales of blocks are of e4m3";
  if (p.in_features % 8 != 0) return "in_features must be a multiple of 8";
  if (const char* reason = operands_unaligned(p)) return reason;
  if (p.gated && p.out_features % 16 != 0) {
    return "out_features must be a multiple of 16 when gated";
  }
  return gate_refused(p);
}

const char* gemm_packed_sm90_refuses(const GemmProblem& p) {
  const char* reason = slabs_refused(p);
  return reason != nullptr ? reason : packed_refused(p);
}

const char* gemm_tiles_sm90_refuses(const GemmProblem& p) {
  if (const char* reason = gemm_sm90_refuses(p)) return reason;
  if (p.width() % 8 != 0) return "the output's width must be a multiple of 8";
  if (p.scale_rows != 0 &&
      (p.scale_rows != kScaleBlock || (p.gated && p.width() % kScaleBlock != 0))) {
    return "scales must be of whole blocks of 128 rows";
  }
  if (p.gated && p.out_dtype != p.dtype) return "a gated product has no float32 output";
  if (!p.is_bias_aligned || !p.is_out_aligned) {
    return "bias, residual and out must be aligned to 16 bytes";
  }
  if (p.has_sumsq_out && gemm_sumsq_columns(p.num_rows) != 64) return "sumsq_out of few rows";
  return nullptr;
}

const char* gemm_packed_tiles_sm90_refuses(const GemmProblem& p) {
  if (const char* reason = packed_refused(p)) return reason;
  if (p.operands == GemmOperands::kW4A8) return "activations must have 16 bits";
  if (p.out_dtype != p.dtype) return "out_dtype must be dtype";
  if (p.has_sumsq || p.has_sumsq_out) return "sums of squares";
  if (const char* reason = slabs_refused(p)) return reason;
  if (p.width() % 8 != 0 || !p.is_out_aligned) {
    return "rows of out and residual must be aligned to 16 bytes";
  }
  return nullptr;
}

const char* gemm_blas_refuses(const GemmProblem& p) {
  if (p.operands != GemmOperands::kDense) return "x and weight must be dense";
  if (const char* reason = blas_dtypes_refused(p)) return reason;
  if (p.in_features % 8 != 0 || p.out_features % 8 != 0 || p.width() % 8 != 0) {
    return "in_features and out_features must be multiples of 8";
  }
  if (!p.is_operands_aligned || !p.is_out_aligned) {
    return "x, weight, residual and out must be aligned to 16 bytes";
  }
  return gate_refused(p);
}

const char* gemm_blas_codes_sm90_refuses(const GemmProblem& p) {
  if (p.operands != GemmOperands::kFp8) return "x and weight must be e4m3 codes";
  if (const char* reason = blas_dtypes_refused(p)) return reason;
  if (const char* reason = scales_refused(p)) return reason;
  if (p.has_sumsq_out) return "it gives no sumsq";
  if (p.gated && p.has_residual) return "a gated product takes no residual";
  if (p.residual_is_out) return "its residual is not its output";
  if (p.in_features % 16 != 0) return "in_features must be a multiple of 16";
  if (p.out_features % 8 != 0 || p.width() % 8 != 0) {
    return "the output's width must be a multiple of 8";
  }
  if (p.scale_rows != 0 && p.scale_rows != kScaleBlock) {
    return "scales must be of whole blocks of 128 rows";
  }
  if (p.scale_rows != 0 &&
      (p.num_rows % 128 != 0 || ceil_div(p.in_features, kScaleBlock) % 4 != 0)) {
    return "with scales of blocks, rows must be a multiple of 128 and blocks of a row one of 4";
  }
  if (!p.is_operands_aligned || !p.is_bias_aligned || !p.is_out_aligned || !p.is_scale_aligned) {
    return "x, weight, scales, bias, residual and out must be aligned to 16 bytes";
  }
  return nullptr;
}

const char* gemm_packed_mma_refuses(const GemmProblem& p) {
  if (p.operands != GemmOperands::kWeightInt8 && p.operands != GemmOperands::kWeightInt4) {
    return "the weight must be packed, of weight_only_int8 or weight_only_int4";
  }
  if (p.operands == GemmOperands::kWeightInt4 && p.group_size != 64 && p.group_size != 128) {
    return "groups must be of 64 columns or of multiples of 128";
  }
  if (p.has_scaled_out) return "it gives no scaled_out";
  const char* reason = slabs_refused(p);
  return reason != nullptr ? reason : packed_refused(p);
}

const char* gemm_codes_mma_refuses(const GemmProblem& p) {
  if (column_of(p.operands) != GemmColumn::kCodes) return "x and weight must be codes of 8 bits";
  if (const char* reason = dtypes_refused(p)) return reason;
  if (const char* reason = scales_refused(p)) return reason;
  if (p.scale_rows != 0 && p.operands != GemmOperands::kFp8) return "scales of blocks are of e4m3";
  if (p.in_features % 16 != 0) return "in_features must be a multiple of 16";
  if (const char* reason = operands_unaligned(p)) return reason;
  if (p.gated && p.out_features % 2 != 0) return "out_features must be even when gated";
  return gate_refused(p);
}

const char* gemm_generic_refuses(const GemmProblem& p) {
  if (p.operands != GemmOperands::kDense) return "x and weight must be dense";
  if (!is_activation_dtype(p.dtype)) return "dtype must be float32, bfloat16 or float16";
  if (p.out_dtype != p.dtype && p.out_dtype != DType::kFloat32) {
    return "out_dtype must be dtype or float32";
  }
  if (p.gated && p.out_features % 2 != 0) return "out_features must be even when gated";
  return gate_refused(p);
}

// ---------------------------------------------------------------------------------- candidates

namespace {

using Architecture = GemmArchitecture;

// The refusals of kernels that look at the problem alone, as rows name them.
template <const char* (*kRefuses)(const GemmProblem&)>
const char* by_problem(const GemmProblem& p, const Architecture&) {
  return kRefuses(p);
}

template <const char* (*kRefuses)(const GemmProblem&)>
const char* not_bfloat16(const GemmProblem& p, const Architecture&) {
  return p.dtype == DType::kBFloat16 ? "bfloat16 needs sm_80" : kRefuses(p);
}

const char* refuses_float8_mma(const GemmProblem& p, const Architecture&) {
  return p.operands == GemmOperands::kFp8 ? "float8 needs sm_89" : gemm_codes_mma_refuses(p);
}

const char* refuses_blas(const GemmProblem& p, const Architecture& a) {
  if (!p.has_blas) return "no cuBLASLt handle";
  if (p.dtype == DType::kBFloat16 && a.compute_capability < 80) return "bfloat16 needs sm_80";
  return gemm_blas_refuses(p);
}

// cuBLASLt with a pass before and behind is as fast, but where it must fold gate and up.
const char* refuses_ungated_tiles(const GemmProblem& p, const Architecture&) {
  return p.gated ? gemm_tiles_sm90_refuses(p) : "cuBLASLt is as fast";
}

// Where it runs, it has the kernel of ours to fall back on.
const char* refuses_blas_codes(const GemmProblem& p, const Architecture&) {
  if (!p.has_blas) return "no cuBLASLt handle";
  const char* reason = gemm_blas_codes_sm90_refuses(p);
  return reason != nullptr ? reason : gemm_tiles_sm90_refuses(p);
}

const char* refuses_blas_to_codes(const GemmProblem& p, const Architecture& a) {
  return p.is_read_as_codes ? refuses_blas_codes(p, a) : "its output is not read as codes alone";
}

// A gated product is folded by a pass of its own, which costs more than is gained.
const char* refuses_many_blas_codes(const GemmProblem& p, const Architecture& a) {
  return p.gated ? "gate and up are folded faster" : refuses_blas_codes(p, a);
}

// Tiles of ours that leave half of the multiprocessors without one lose to smaller ones, and to a
// split of k (of dense products, 395 to 549 TFLOP/s with 256 rows).
const char* refuses_few_blas_codes(const GemmProblem& p, const Architecture& a) {
  if (large_tiles_fill(p, a.num_multiprocessors) > .5) return "tiles fill the multiprocessors";
  return refuses_many_blas_codes(p, a);
}

// Microseconds that blocks of gemm_packed_tiles_sm90 cost the launches around them, which wait:
// they take all of a multiprocessor's memory.
constexpr double kTilesAround = 6.;

const char* refuses_packed_tiles(const GemmProblem& p, const Architecture& a) {
  if (!p.gated && p.num_rows <= 128 &&
      packed_split_cost(p, a.num_multiprocessors) <
          choose_packed_tiles(p, a.num_multiprocessors).cost + kTilesAround) {
    return "blocks that share k are faster";
  }
  return gemm_packed_tiles_sm90_refuses(p);
}

const char* matrix_refused(const GemmProblem& p) {
  // Kernels of few rows read their weight before the launch ahead, which writes it, has ended.
  if (p.num_rows <= kSmallPackedRows) return "too few rows";
  if (!p.has_matrix) return "no room for the weight as a matrix";
  if (p.operands == GemmOperands::kW4A8) return "activations must have 16 bits";
  if (p.has_scaled_out) return "it gives no scaled_out";
  return packed_refused(p);
}

// Gated tiles are faster than a matrix of gates and ups.
const char* refuses_matrix_sm90(const GemmProblem& p, const Architecture&) {
  return p.gated ? "gated tiles are faster" : matrix_refused(p);
}

// A step's workspace has room for so much beside cuBLASLt's (predict/loading/memory.py).
constexpr int64_t kMostMatrixBytes = int64_t{320} << 20;

// Elsewhere a matrix is for cuBLASLt, and for products that have a kernel of few rows too.
template <bool kGated>
const char* refuses_matrix(const GemmProblem& p, const Architecture& a) {
  if (p.gated != kGated) return kGated ? "it has no gate" : "it has a gate";
  if (const char* reason = matrix_refused(p)) return reason;
  if (const char* reason = gemm_packed_mma_refuses(p)) return reason;
  if (2 * p.in_features * p.out_features > kMostMatrixBytes) return "the matrix is too large";
  GemmProblem dense = p;
  dense.operands = GemmOperands::kDense;
  return refuses_blas(dense, a);
}

// A row that shares its group has its weight read again. Of rows that choose at random one in eight
// does at most; those of one token never do.
const char* refuses_group_vector(const GemmProblem& p, const Architecture&) {
  if (p.num_rows > 16 || 4 * (p.num_rows - 1) > p.num_groups) return "rows would share weights";
  return gemm_stream_sm80_refuses(p);
}

// The same, while rows hardly ever share a group, as birthdays go.
const char* refuses_packed_group_vector(const GemmProblem& p, const Architecture&) {
  if (p.num_rows * p.num_rows > 2 * p.num_groups) return "rows would share weights";
  return gemv_packed_sm90_refuses(p);
}

constexpr int64_t kAny = int64_t{1} << 62;
constexpr int64_t kRowsGroupTiles = 33;  // of a group on average
constexpr int kAll = 999;                // architectures
constexpr int kHopperShared = 227;       // KiB
constexpr int kMmaShared = 56;
constexpr int kStaticShared = 48;

constexpr GemmColumn kDense = GemmColumn::kDense, kCodes = GemmColumn::kCodes,
                     kPacked = GemmColumn::kPacked;
using K = GemmKernel;

// Name, column, kernel, architectures, rows, shared memory, refusals, whether it is alike for any
// rows, makes any function, and takes groups. Rows of sm_90: measured on an H200.
constexpr GemmCandidate kCandidates[] = {
    // 16-bit weights. `stream` serves Hopper's single rows and the small batches of other
    // architectures; beyond, its blocks re-read the weights.
    {"gemv", kDense, K::kVectorDense, 80, kAll, 1, 1, kStaticShared,
     by_problem<gemm_stream_sm80_refuses>, false, true},
    {"sm90", kDense, K::kSmallDense, 90, 90, 1, 128, kHopperShared, by_problem<gemm_sm90_refuses>,
     false, true},
    {"tiles", kDense, K::kLargeDense, 90, 90, 129, kAny, kHopperShared, refuses_ungated_tiles},
    {"stream", kDense, K::kStream, 80, kAll, 1, 32, kStaticShared,
     by_problem<gemm_stream_sm80_refuses>, false, true},
    {"blas", kDense, K::kBlas, 75, kAll, 1, kAny, kStaticShared, refuses_blas},
    {"tiles", kDense, K::kLargeDense, 90, 90, 129, kAny, kHopperShared,
     by_problem<gemm_tiles_sm90_refuses>},
    {"sm90", kDense, K::kSmallDense, 90, 90, 1, kAny, kHopperShared, by_problem<gemm_sm90_refuses>,
     true},
    {"stream", kDense, K::kStream, 80, kAll, 1, kAny, kStaticShared,
     by_problem<gemm_stream_sm80_refuses>, true},
    {"generic", kDense, K::kGeneric, 75, kAll, 1, kAny, kStaticShared,
     by_problem<gemm_generic_refuses>, true},
    {"gemv", kDense, K::kVectorDense, 80, kAll, 1, 1, kStaticShared, refuses_group_vector, false,
     true, true},
    {"tiles", kDense, K::kLargeDense, 90, 90, kRowsGroupTiles, kAny, kHopperShared,
     by_problem<gemm_tiles_sm90_refuses>, false, false, true},
    {"sm90", kDense, K::kSmallDense, 90, 90, 1, kAny, kHopperShared, by_problem<gemm_sm90_refuses>,
     true, true, true},
    {"stream", kDense, K::kStream, 80, kAll, 1, kAny, kStaticShared,
     by_problem<gemm_stream_sm80_refuses>, true, true, true},
    {"generic", kDense, K::kGeneric, 75, kAll, 1, kAny, kStaticShared,
     by_problem<gemm_generic_refuses>, true, true, true},

    // Codes of 8 bits on both sides.
    {"stream_codes", kCodes, K::kVectorCodes, 90, 90, 1, 1, kHopperShared,
     by_problem<gemm_stream_codes_sm90_refuses>},
    {"sm90", kCodes, K::kSmallCodes, 90, 90, 1, 128, kHopperShared, by_problem<gemm_sm90_refuses>},
    {"blas_to_codes", kCodes, K::kBlasToCodes, 90, 90, 2048, kAny, kHopperShared,
     refuses_blas_to_codes},
    {"blas_codes", kCodes, K::kBlasCodes, 90, 90, kRowsBlasCodes, 2047, kHopperShared,
     refuses_few_blas_codes},
    {"blas_codes", kCodes, K::kBlasCodes, 90, 90, 2048, kAny, kHopperShared,
     refuses_many_blas_codes},
    {"tiles", kCodes, K::kLargeCodes, 90, 90, 129, kAny, kHopperShared,
     by_problem<gemm_tiles_sm90_refuses>},
    {"sm90", kCodes, K::kSmallCodes, 90, 90, 1, kAny, kHopperShared, by_problem<gemm_sm90_refuses>,
     true},
    {"mma", kCodes, K::kCodesMma, 89, kAll, 1, kAny, kMmaShared, by_problem<gemm_codes_mma_refuses>,
     true},
    {"mma", kCodes, K::kCodesMma, 75, 88, 1, kAny, kMmaShared, refuses_float8_mma, true},
    {"tiles", kCodes, K::kLargeCodes, 90, 90, kRowsGroupTiles, kAny, kHopperShared,
     by_problem<gemm_tiles_sm90_refuses>, false, false, true},
    {"sm90", kCodes, K::kSmallCodes, 90, 90, 1, kAny, kHopperShared, by_problem<gemm_sm90_refuses>,
     true, true, true},
    {"mma", kCodes, K::kCodesMma, 89, kAll, 1, kAny, kMmaShared, by_problem<gemm_codes_mma_refuses>,
     true, true, true},
    {"mma", kCodes, K::kCodesMma, 75, 88, 1, kAny, kMmaShared, refuses_float8_mma, true, true,
     true},

    // Weights of 8 and 4 bits, packed. A matrix first, from so many rows on as the dense product
    // saves more than making it costs: measured on an H200, computed for other GPUs.
    {"packed", kPacked, K::kVectorPacked, 90, 90, 1, 8, kHopperShared,
     by_problem<gemv_packed_sm90_refuses>},
    {"matrix", kPacked, K::kMatrix, 90, 90, 4096, kAny, kHopperShared, refuses_matrix_sm90},
    {"packed", kPacked, K::kLargePacked, 90, 90, 65, kAny, kHopperShared, refuses_packed_tiles},
    {"packed", kPacked, K::kSmallPacked, 90, 90, 1, kAny, kHopperShared,
     by_problem<gemm_packed_sm90_refuses>, true},
    {"packed", kPacked, K::kVectorPacked, 90, 90, 1, 1, kHopperShared, refuses_packed_group_vector,
     false, false, true},
    {"packed", kPacked, K::kLargePacked, 90, 90, 49, kAny, kHopperShared,
     by_problem<gemm_packed_tiles_sm90_refuses>, false, false, true},
    {"packed", kPacked, K::kSmallPacked, 90, 90, 1, kAny, kHopperShared,
     by_problem<gemm_packed_sm90_refuses>, true, false, true},
    {"matrix", kPacked, K::kMatrix, 75, 88, 512, kAny, kStaticShared, refuses_matrix<false>},
    {"matrix", kPacked, K::kMatrix, 75, 88, 768, kAny, kStaticShared, refuses_matrix<true>},
    {"matrix", kPacked, K::kMatrix, 89, kAll, 1024, kAny, kStaticShared, refuses_matrix<false>},
    {"matrix", kPacked, K::kMatrix, 89, kAll, 1536, kAny, kStaticShared, refuses_matrix<true>},
    {"mma", kPacked, K::kPackedMma, 80, kAll, 1, kAny, kMmaShared,
     by_problem<gemm_packed_mma_refuses>, true},
    {"mma", kPacked, K::kPackedMma, 75, 79, 1, kAny, kMmaShared,
     not_bfloat16<gemm_packed_mma_refuses>, true},
    {"mma", kPacked, K::kPackedMma, 80, kAll, 1, kAny, kMmaShared,
     by_problem<gemm_packed_mma_refuses>, true, true, true},
    {"mma", kPacked, K::kPackedMma, 75, 79, 1, kAny, kMmaShared,
     not_bfloat16<gemm_packed_mma_refuses>, true, true, true},
};

const char* reason_against(const GemmCandidate& c, const GemmProblem& p, const Architecture& a,
                           const char* force) {
  if (force != nullptr && std::strcmp(force, c.name) != 0) return "not the forced one";
  if (p.is_batch_invariant && !c.is_alike) return "not batch-invariant";
  if (p.has_function && !c.makes_functions) return "it makes no function but a gate's SiLU";
  if (p.num_groups > 0 && !c.takes_groups) return "it takes no groups of rows";
  if (a.compute_capability < c.min_arch || a.compute_capability > c.max_arch) {
    return "not for this architecture";
  }
  if (force == nullptr && (p.rows_of_weight() < c.min_rows || p.rows_of_weight() > c.max_rows)) {
    return "not for this number of rows";
  }
  if (a.shared_bytes < int64_t{c.shared_kib} * 1024) return "too little shared memory";
  if (c.takes_groups) {
    if (const char* reason = groups_refused(p)) return reason;
  }
  return c.refuses(p, a);
}

}  // namespace

GemmCandidates gemm_candidates() { return {std::begin(kCandidates), std::end(kCandidates)}; }

const GemmCandidate* select_gemm(const GemmProblem& problem, const GemmArchitecture& architecture,
                                 const char* force, std::string* reasons) {
  const GemmColumn column = column_of(problem.operands);
  for (const GemmCandidate& c : kCandidates) {
    if (c.column != column || (c.takes_groups && problem.num_groups == 0)) continue;
    const char* reason = reason_against(c, problem, architecture, force);
    if (reason == nullptr) return &c;
    if (reasons == nullptr) continue;
    *reasons += std::string(reasons->empty() ? "" : "; ") + c.name + ": " + reason;
  }
  return nullptr;
}

bool gives_scaled_out(const GemmProblem& p, const GemmArchitecture& a) {
  return p.dtype == DType::kBFloat16 && p.num_rows <= 64 && a.compute_capability == 90 &&
         !p.is_batch_invariant;
}

}  // namespace regatta::cuda
