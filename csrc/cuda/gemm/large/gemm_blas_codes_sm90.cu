// y = epilogue(x w^T) of e4m3 codes for many rows through cuBLASLt.
//
// Input: as GemmParams says, kFp8: scales per row and output feature (cuBLASLt's "outer vectors"),
// or of blocks of 128 x 128 where the rows are a multiple of 128 and the blocks of a row one of 4:
// then both lie as cuBLASLt wants them. Architectures: sm_90 (cuBLASLt has these scales there
// alone). Algorithm: scales, bias and residual are cuBLASLt's own. A gated product goes to scratch
// and is folded by one pass, or by the one that quantizes it for the next product
// (quantize_rows.cu). Source: cuBLASLt's documentation. Bound: tensor cores.
#include <algorithm>

#include "cuda/gemm/select.h"
#include "gemm_blas.cuh"

namespace regatta::cuda {

#ifdef REGATTA_CUBLASLT
namespace {

// Row counts of one choice: those that round up to the same number, four of them from a power of
// two to the next.
int64_t rows_like(int64_t rows) {
  int64_t step = 64;
  while (step * 8 < rows) step *= 2;
  return round_up(rows, step);
}

char* behind_workspace(const GemmResources& resources) {
  return static_cast<char*>(resources.scratch) + kBlasWorkspaceBytes;
}

Status check(const GemmParams& p, const GemmResources& resources) {
  REGATTA_RETURN_IF_ERROR(refusal("gemm_blas_codes_sm90", gemm_blas_codes_sm90_refuses(p)));
  if (resources.blas == nullptr || resources.scratch_bytes < gemm_scratch_bytes(p)) {
    return Status::error("gemm_blas_codes_sm90: needs create_blas() and " +
                         std::to_string(gemm_scratch_bytes(p)) + " bytes of scratch, got " +
                         std::to_string(resources.scratch_bytes));
  }
  return {};
}

// out = the product with bias and residual; of a gated one both halves, side by side.
Status product(const GemmParams& p, const GemmResources& resources, void* out,
               cudaStream_t stream) {
  return blas_product(static_cast<Blas*>(resources.blas), blas_key(p, rows_like(p.num_rows)), p,
                      p.x, out, p.gated ? p.dtype : p.out_dtype, out, /*keep=*/false,
                      resources.scratch, stream);
}

}  // namespace

Status gemm_blas_codes_sm90(const GemmParams& p, const GemmResources& resources,
                            CUstream_st* stream) {
  Status status = check(p, resources);
  if (!status.ok() || p.num_rows == 0) return status;
  void* both = behind_workspace(resources);
  status = product(p, resources, p.gated ? both : p.out, stream);
  if (!status.ok() || !p.gated) return status;
  return fold_gate(both, p.out, p.dtype, p.num_rows, p.out_features / 2, stream);
}

Status gemm_blas_unfolded_sm90(const GemmParams& p, const QuantizeRowsParams& next,
                               const GemmResources& resources, CUstream_st* stream) {
  Status status = check(p, resources);
  if (!status.ok() || p.num_rows == 0) return status;
  void* both = behind_workspace(resources);
  status = product(p, resources, both, stream);
  if (!status.ok()) return status;
  QuantizeRowsParams q = next;
  q.x = both;
  q.gated = true;
  return quantize_rows(q, stream);
}

#else
Status gemm_blas_codes_sm90(const GemmParams&, const GemmResources&, CUstream_st*) {
  return Status::error("gemm_blas_codes_sm90: built without cuBLASLt");
}
Status gemm_blas_unfolded_sm90(const GemmParams&, const QuantizeRowsParams&, const GemmResources&,
                               CUstream_st*) {
  return Status::error("gemm_blas_unfolded_sm90: built without cuBLASLt");
}
#endif

}  // namespace regatta::cuda
