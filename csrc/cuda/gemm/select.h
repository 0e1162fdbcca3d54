// Which kernel multiplies: a function of the product and of the GPU alone.
//
// No CUDA and no device calls: any C++ compiler takes this file and select.cu, and
// tests/csrc/test_select_gemm.py asks them on a CPU.
#pragma once

#include <string>

#include "cuda/integers.h"
#include "regatta/gemm.h"

namespace regatta::cuda {

// A product as far as the choice depends on it.
struct GemmProblem {
  GemmOperands operands = GemmOperands::kDense;
  DType dtype = DType::kBFloat16, out_dtype = DType::kBFloat16;
  int64_t num_rows = 0, in_features = 0, out_features = 0;
  int64_t group_size = 128, scale_rows = 0;
  int64_t num_groups = 0;  // of rows that have a weight each
  bool gated = false;
  bool has_function = false;  // another than a gate's SiLU
  bool has_bias = false, has_residual = false;
  bool residual_is_out = false;
  bool has_sumsq = false, has_sumsq_out = false, has_scaled_out = false;
  bool has_x_scale = false, has_weight_scale = false;
  // To 16 bytes.
  bool is_operands_aligned = true;  // x and weight
  bool is_bias_aligned = true;
  bool is_out_aligned = true;  // and residual
  bool is_scale_aligned = true;
  // Gated, and read as codes alone: gemm_to_codes().
  bool is_read_as_codes = false;
  // A row has the same bits whatever rows are beside it.
  bool is_batch_invariant = false;
  // GemmResources: cuBLASLt's handle, and room for the weight as a matrix.
  bool has_blas = false, has_matrix = false;

  GemmProblem() = default;
  // What `params` say: neither resources nor the mode.
  GemmProblem(const GemmParams& params);  // where a problem is asked for, too

  int64_t width() const { return gated ? out_features / 2 : out_features; }  // of the output
  // That share a weight: all, or those of a group on average, rounded up.
  int64_t rows_of_weight() const {
    return num_groups == 0 ? num_rows : ceil_div(num_rows, num_groups);
  }
};

// A GPU as far as the choice depends on it.
struct GemmArchitecture {
  int compute_capability = 0;  // * 10
  int num_multiprocessors = 0;
  int64_t shared_bytes = 0;  // of a block, at most
};

// Columns of the grid.
enum class GemmColumn : uint8_t { kDense, kCodes, kPacked };
GemmColumn column_of(GemmOperands operands);

// Its other side, and what lies beside the grid.
enum class GemmKernel : uint8_t {
  // vector: one row; of packed weights up to eight
  kVectorDense,
  kVectorCodes,
  kVectorPacked,
  // small: weights are streamed once
  kSmallDense,
  kSmallCodes,
  kSmallPacked,
  // large: the tensor cores are the bound
  kLargeDense,
  kLargeCodes,
  kLargePacked,
  kBlas,         // cuBLASLt
  kBlasCodes,    // cuBLASLt; the kernel of kLargeCodes where it will not
  kBlasToCodes,  // cuBLASLt, folded while the next product's codes are made
  kMatrix,       // the weight as a matrix first; then as for that
  // portable
  kStream,
  kPackedMma,
  kCodesMma,
  kGeneric,
};
// The function that launches it, or "matrix".
const char* kernel_name(GemmKernel kernel);

// A row of the table of candidates.
struct GemmCandidate {
  const char* name;  // what `force` and REGATTA_KERNEL call it
  GemmColumn column;
  GemmKernel kernel;
  int min_arch, max_arch;  // compute capability * 10
  // Of a weight, where it is the best choice: rows_of_weight(); ignored when forced.
  int64_t min_rows, max_rows;
  // KiB that its blocks may take.
  int shared_kib;
  const char* (*refuses)(const GemmProblem&, const GemmArchitecture&);  // null: it does not
  bool is_alike = false;         // for any rows: these alone serve the batch-invariant mode
  bool makes_functions = false;  // any, not a gate's SiLU alone
  bool takes_groups = false;     // and nothing else: products in groups have rows of their own
};

struct GemmCandidates {
  const GemmCandidate* begin_;
  const GemmCandidate* end_;
  const GemmCandidate* begin() const { return begin_; }
  const GemmCandidate* end() const { return end_; }
};
GemmCandidates gemm_candidates();  // of each column best first

// The first candidate that takes it; null where none does. `force`: the name of the only ones to
// consider, or null. `reasons`, unless null: what each said that did not.
const GemmCandidate* select_gemm(const GemmProblem& problem, const GemmArchitecture& architecture,
                                 const char* force = nullptr, std::string* reasons = nullptr);

// Whether products of packed weights give scaled_out, for so many rows. float16 has no room for it.
bool gives_scaled_out(const GemmProblem& problem, const GemmArchitecture& architecture);

// Why a kernel cannot do `problem` on the GPUs that it is for, or null.
const char* gemm_stream_sm80_refuses(const GemmProblem& problem);
const char* gemm_stream_codes_sm90_refuses(const GemmProblem& problem);
const char* gemv_packed_sm90_refuses(const GemmProblem& problem);
const char* gemm_sm90_refuses(const GemmProblem& problem);
const char* gemm_packed_sm90_refuses(const GemmProblem& problem);
const char* gemm_tiles_sm90_refuses(const GemmProblem& problem);
const char* gemm_packed_tiles_sm90_refuses(const GemmProblem& problem);
const char* gemm_blas_refuses(const GemmProblem& problem);
const char* gemm_blas_codes_sm90_refuses(const GemmProblem& problem);
const char* gemm_packed_mma_refuses(const GemmProblem& problem);
const char* gemm_codes_mma_refuses(const GemmProblem& problem);
const char* gemm_generic_refuses(const GemmProblem& problem);

}  // namespace regatta::cuda
