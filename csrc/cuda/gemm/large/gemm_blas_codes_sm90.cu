// y = epilogue(x w^T) of e4m3 codes for many rows through cuBLASLt, and the choice between that and
// gemm_tiles_sm90().
//
// Input: as GemmParams says, kFp8: scales per row and output feature (cuBLASLt's "outer vectors"),
// or of blocks of 128 x 128 where the rows are a multiple of 128 and the blocks of a row one of 4:
// then both lie as cuBLASLt wants them. Architectures: sm_90 (cuBLASLt has these scales there
// alone). Algorithm: scales, bias and residual are cuBLASLt's own. A gated product goes to scratch
// and is folded by one pass, or by the one that quantizes it for the next product
// (quantize_rows.cu). What runs is what was faster when a number of rows like this one came first:
// both are timed then, and inside a graph capture, where that cannot be, ours runs. Source:
// cuBLASLt's documentation. Bound: tensor cores.
#include <algorithm>

#include "gemm_blas.cuh"

namespace regatta::cuda {

const char* gemm_blas_codes_sm90_refuses(const GemmParams& p) {
  if (p.operands != GemmOperands::kFp8) return "x and weight must be e4m3 codes";
#ifndef REGATTA_CUBLASLT
  return "built without cuBLASLt";
#else
  if (const char* reason = blas_dtypes_refused(p)) return reason;
  if (p.x_scale == nullptr || p.weight_scale == nullptr || p.sumsq != nullptr) {
    return "codes need x_scale and weight_scale, and no sumsq";
  }
  if (p.sumsq_out != nullptr) return "it gives no sumsq";
  if (p.gated && p.residual != nullptr) return "a gated product takes no residual";
  if (p.residual != nullptr && p.residual == p.out) return "its residual is not its output";
  if (p.in_features % 16 != 0) return "in_features must be a multiple of 16";
  const int64_t width = p.gated ? p.out_features / 2 : p.out_features;
  if (p.out_features % 8 != 0 || width % 8 != 0)
    return "the output's width must be a multiple of 8";
  if (p.scale_rows != 0 && p.scale_rows != kScaleBlock) {
    return "scales must be of whole blocks of 128 rows";
  }
  if (p.scale_rows != 0 &&
      (p.num_rows % 128 != 0 || ceil_div(p.in_features, kScaleBlock) % 4 != 0)) {
    return "with scales of blocks, rows must be a multiple of 128 and blocks of a row one of 4";
  }
  for (const void* pointer :
       {p.x, p.weight, p.bias, p.residual, static_cast<const void*>(p.out),
        static_cast<const void*>(p.x_scale), static_cast<const void*>(p.weight_scale)}) {
    if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) {
      return "x, weight, scales, bias, residual and out must be aligned to 16 bytes";
    }
  }
  return nullptr;
#endif
}

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
  if (const char* reason = gemm_blas_codes_sm90_refuses(p)) {
    return Status::error(std::string("gemm_blas_codes_sm90: ") + reason);
  }
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

// The choice kept in `choices`, or theirs_faster()'s when it can be made now.
template <class Compare>
bool choose(Blas* blas, std::map<BlasKey, bool>& choices, const GemmParams& p, bool can_compare,
            const Compare& theirs_faster) {
  const BlasKey key = blas_key(p, rows_like(p.num_rows));
  {
    const std::lock_guard<std::mutex> lock(blas->mutex);
    const auto found = choices.find(key);
    if (found != choices.end()) return found->second;
  }
  if (!can_compare) return false;
  const bool faster = theirs_faster();
  const std::lock_guard<std::mutex> lock(blas->mutex);
  return choices.emplace(key, faster).first->second;
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

bool gemm_blas_codes_sm90_faster(const GemmParams& p, const GemmResources& resources,
                                 CUstream_st* stream) {
  if (!check(p, resources).ok() || gemm_tiles_sm90_refuses(p) != nullptr) return false;
  auto* blas = static_cast<Blas*>(resources.blas);
  return choose(blas, blas->faster, p, can_time(stream), [&] {
    const float theirs =
        timed_ms(stream, [&] { return gemm_blas_codes_sm90(p, resources, stream).ok(); });
    return theirs < timed_ms(stream, [&] { return gemm_tiles_sm90(p, stream).ok(); });
  });
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

bool gemm_blas_unfolded_sm90_faster(const GemmParams& p, const QuantizeRowsParams& next,
                                    const GemmResources& resources, CUstream_st* stream) {
  if (!check(p, resources).ok() || gemm_tiles_sm90_refuses(p) != nullptr) return false;
  auto* blas = static_cast<Blas*>(resources.blas);
  return choose(blas, blas->faster_unfolded, p, can_time(stream), [&] {
    const float theirs =
        timed_ms(stream, [&] { return gemm_blas_unfolded_sm90(p, next, resources, stream).ok(); });
    return theirs <
           timed_ms(
               stream,
               [&] { return gemm_tiles_sm90(p, stream).ok() && quantize_rows(next, stream).ok(); });
  });
}
#else
Status gemm_blas_codes_sm90(const GemmParams&, const GemmResources&, CUstream_st*) {
  return Status::error("gemm_blas_codes_sm90: built without cuBLASLt");
}
bool gemm_blas_codes_sm90_faster(const GemmParams&, const GemmResources&, CUstream_st*) {
  return false;
}
Status gemm_blas_unfolded_sm90(const GemmParams&, const QuantizeRowsParams&, const GemmResources&,
                               CUstream_st*) {
  return Status::error("gemm_blas_unfolded_sm90: built without cuBLASLt");
}
bool gemm_blas_unfolded_sm90_faster(const GemmParams&, const QuantizeRowsParams&,
                                    const GemmResources&, CUstream_st*) {
  return false;
}
#endif

}  // namespace regatta::cuda
