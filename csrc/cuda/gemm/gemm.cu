// A product of activations and weights by the kernel that select_gemm() names for this GPU.
//
// Host code: what the device is, and the launches.
#include <algorithm>
#include <mutex>

#include "cuda/common.cuh"
#include "cuda/experts/forced.h"
#include "cuda/gemm/select.h"
#include "cuda/gemm/tiles.h"
#include "regatta/gemm.h"

namespace regatta::cuda {
namespace {

// Not of a product in groups, whose ends are those of all rows.
GemmParams rows_of(const GemmParams& p, int64_t first, int64_t count) {
  GemmParams part = p;
  const auto behind = [&](const void* from, int64_t width, int64_t size) -> const void* {
    return from == nullptr ? nullptr : static_cast<const char*>(from) + first * width * size;
  };
  const int64_t width = p.gated ? p.out_features / 2 : p.out_features;
  const int64_t size = dtype_size(p.dtype);
  part.x = behind(p.x, p.in_features, p.operands == GemmOperands::kW4A8 ? 1 : size);
  part.x_scale = static_cast<const float*>(behind(p.x_scale, 1, 4));
  part.residual = behind(p.residual, width, size);
  part.out = const_cast<void*>(behind(p.out, width, dtype_size(p.out_dtype)));
  part.num_rows = std::min(count, p.num_rows - first);
  return part;
}

Status packed_in_pieces(const GemmParams& p, CUstream_st* stream) {
  // What its sums are split into is a function of the matrix.
  const int64_t piece = alike_packed_tokens(p.operands);
  for (int64_t row = 0; row < p.num_rows; row += piece) {
    REGATTA_RETURN_IF_ERROR(gemm_packed_sm90(rows_of(p, row, piece), stream));
  }
  return {};
}

// Of the current device, asked once: every product wants it.
GemmArchitecture current_architecture() {
  constexpr int kMaxDevices = 64;
  static GemmArchitecture known[kMaxDevices];
  static std::once_flag asked[kMaxDevices];
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMaxDevices) return {};
  std::call_once(asked[device], [&] {
    known[device] = {compute_capability(), num_multiprocessors(), max_shared_bytes()};
  });
  return known[device];
}

// Whose kernels may take p.
GemmArchitecture architecture_for(const GemmParams& p) {
  GemmArchitecture a = current_architecture();
  if (p.num_groups > 0) a.compute_capability = experts_capability(a.compute_capability);
  return a;
}

int64_t bytes_as_matrix(const GemmParams& p) {
  return p.in_features * p.out_features * dtype_size(p.dtype);
}

GemmProblem problem_of(const GemmParams& p, const GemmResources& resources) {
  GemmProblem problem(p);
  problem.is_batch_invariant = is_batch_invariant;
  problem.has_blas = resources.blas != nullptr;
  problem.has_matrix = resources.matrix_bytes >= bytes_as_matrix(p);
  return problem;
}

// What REGATTA_KERNEL forces ("linear=mma"), of quantized weights alone: dense ones are beside them
// in a model, and no kernel takes both.
std::string forced_quantized() { return forced_candidate("linear"); }

// The matrix that a packed weight stands for, and the product with it.
Status through_matrix(const GemmParams& p, const GemmResources& resources, CUstream_st* stream) {
  REGATTA_RETURN_IF_ERROR(unpack_weight(p, resources.matrix, stream));
  GemmParams dense = p;
  dense.operands = GemmOperands::kDense;
  dense.weight = resources.matrix;
  dense.weight_scale = nullptr;
  return gemm(dense, resources, nullptr, stream);
}

Status run(GemmKernel kernel, const GemmParams& p, const GemmResources& resources,
           CUstream_st* stream) {
  switch (kernel) {
    case GemmKernel::kVectorDense:
      return gemm_stream_sm80(p, false, stream);
    case GemmKernel::kVectorCodes:
      return gemm_stream_codes_sm90(p, nullptr, stream);
    case GemmKernel::kVectorPacked:
      return gemv_packed_sm90(p, stream);
    case GemmKernel::kSmallDense:
    case GemmKernel::kSmallCodes:
      return gemm_sm90(p, stream);
    case GemmKernel::kSmallPacked:
      // Tiles of groups have no more rows than a piece.
      return is_batch_invariant && p.num_groups == 0 ? packed_in_pieces(p, stream)
                                                     : gemm_packed_sm90(p, stream);
    case GemmKernel::kLargeDense:
    case GemmKernel::kLargeCodes:
      return gemm_tiles_sm90(p, stream);
    case GemmKernel::kLargePacked:
      return gemm_packed_tiles_sm90(p, stream);
    case GemmKernel::kBlas:
      return gemm_blas(p, resources, stream);
    case GemmKernel::kBlasCodes:
      // An algorithm chosen for about as many rows may refuse these.
      return gemm_blas_codes_sm90(p, resources, stream).ok() ? Status()
                                                             : gemm_tiles_sm90(p, stream);
    case GemmKernel::kBlasToCodes:
      return Status::error("gemm: what becomes codes is gemm_to_codes()'s");
    case GemmKernel::kMatrix:
      return through_matrix(p, resources, stream);
    case GemmKernel::kStream:
      return gemm_stream_sm80(p, true, stream);
    case GemmKernel::kPackedMma:
      return gemm_packed_mma(p, stream);
    case GemmKernel::kCodesMma:
      return gemm_codes_mma(p, stream);
    case GemmKernel::kGeneric:
      return gemm_generic(p, stream);
  }
  return Status::error("gemm: no such kernel");
}

}  // namespace

int64_t gemm_matrix_bytes(const GemmParams& p) {
  if (column_of(p.operands) != GemmColumn::kPacked || !forced_quantized().empty()) return 0;
  // Of a block that is not there: half of a layer is an operator, too.
  if (p.num_rows == 0 || p.in_features == 0 || p.out_features == 0) return 0;
  GemmProblem problem(p);
  problem.is_batch_invariant = is_batch_invariant;
  problem.has_weight_scale = p.operands == GemmOperands::kWeightInt8;
  problem.has_x_scale = p.operands == GemmOperands::kW4A8;
  problem.has_blas = problem.has_matrix = true;
  const GemmCandidate* chosen = select_gemm(problem, current_architecture());
  return chosen != nullptr && chosen->kernel == GemmKernel::kMatrix ? bytes_as_matrix(p) : 0;
}

bool gemm_makes_function(const GemmParams& p) {
  if (!forced_candidate("linear").empty()) return false;
  return select_gemm(problem_of(p, {}), architecture_for(p)) != nullptr;
}

Status gemm(const GemmParams& p, const GemmResources& resources, const char* force,
            CUstream_st* stream) {
  if (p.num_rows == 0) return {};
  if (p.num_groups > 0 && p.group_ends == nullptr) {
    return Status::error("gemm: " + std::to_string(p.num_groups) +
                         " groups of rows need group_ends, an int32 of the device for each");
  }
  const std::string forced = forced_quantized();
  if (force == nullptr && !forced.empty() && p.operands != GemmOperands::kDense) {
    force = forced.c_str();
  }
  const GemmProblem problem = problem_of(p, resources);
  const GemmArchitecture architecture = architecture_for(p);
  const GemmCandidate* chosen = select_gemm(problem, architecture, force);
  if (chosen != nullptr) return run(chosen->kernel, p, resources, stream);
  std::string reasons;
  select_gemm(problem, architecture, force, &reasons);
  const std::string groups =
      p.num_groups > 0 ? " in " + std::to_string(p.num_groups) + " groups" : "";
  return Status::error("gemm: no kernel for M " + std::to_string(p.num_rows) + groups + ", N " +
                       std::to_string(p.out_features) + ", K " + std::to_string(p.in_features) +
                       ", " + dtype_name(p.dtype) + " on sm_" +
                       std::to_string(architecture.compute_capability) + " (" + reasons + ")");
}

bool gemm_packed_scales_out(DType dtype, int64_t num_rows) {
  GemmProblem problem;
  problem.dtype = dtype;
  problem.num_rows = num_rows;
  problem.is_batch_invariant = is_batch_invariant;
  return gives_scaled_out(problem, current_architecture()) && forced_quantized().empty();
}

Status gemm_to_codes(const GemmParams& params, const QuantizeRowsParams& q,
                     const QuantizeRowsParams& next, const GemmResources& resources, bool* coded,
                     CUstream_st* stream) {
  GemmParams p = params;
  p.x = q.codes;
  p.x_scale = q.scale;
  REGATTA_RETURN_IF_ERROR(quantize_rows(q, stream));
  GemmProblem problem = problem_of(p, resources);
  problem.is_read_as_codes = true;
  const GemmCandidate* chosen =
      forced_quantized().empty() ? select_gemm(problem, current_architecture()) : nullptr;
  *coded = chosen != nullptr && chosen->kernel == GemmKernel::kBlasToCodes &&
           gemm_blas_unfolded_sm90(p, next, resources, stream).ok();
  return *coded ? Status() : gemm(p, resources, nullptr, stream);
}

Status gemm_quantized(const GemmParams& params, const QuantizeRowsParams& q,
                      const GemmResources& resources, CUstream_st* stream) {
  GemmParams p = params;
  p.x = q.codes;
  p.x_scale = q.scale;
  if (forced_quantized().empty() && gemm_stream_codes_sm90_quantizes(p, q)) {
    const GemmCandidate* chosen = select_gemm(problem_of(p, resources), current_architecture());
    if (chosen != nullptr && chosen->kernel == GemmKernel::kVectorCodes) {
      return gemm_stream_codes_sm90(p, &q, stream);
    }
  }
  const Status status = quantize_rows(q, stream);
  return status.ok() ? gemm(p, resources, nullptr, stream) : status;
}

}  // namespace regatta::cuda
