// The candidates for a product of activations and weights, best first, and the choice among them.
#include <algorithm>
#include <cstring>

#include "cuda/common.cuh"
#include "regatta/gemm.h"

namespace regatta::cuda {
namespace {

struct Candidate {
  const char* name;
  int min_arch, max_arch;      // compute capability * 10
  int64_t min_rows, max_rows;  // where it is the best choice; ignored when forced
  const char* (*refuses)(const GemmParams&);
  Status (*run)(const GemmParams&, const GemmResources&, CUstream_st*);
  bool is_alike = false;  // for any rows: these alone serve the batch-invariant mode
};

constexpr int64_t kAny = int64_t{1} << 62;

// What the sums of packed products are split into is a function of the matrix for up to so many
// rows. Of more than 32, scales of groups are applied elsewhere (gemm_packed_sm90.cu).
constexpr int64_t piece_rows(const GemmParams& p) {
  return p.operands == GemmOperands::kWeightInt4 || p.operands == GemmOperands::kWeightInt8Groups
             ? 32
             : 64;
}

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
  for (int64_t row = 0; row < p.num_rows; row += piece_rows(p)) {
    const Status status = gemm_packed_sm90(rows_of(p, row, piece_rows(p)), stream);
    if (!status.ok()) return status;
  }
  return {};
}

// Microseconds that blocks of gemm_packed_tiles_sm90 cost the launches around them, which wait:
// they take all of a multiprocessor's memory.
constexpr double kTilesAround = 6.;

// Rows: measured on an H200, see gemm_sm90.cu, gemm_tiles_sm90.cu and gemm_stream_sm80.cu. `stream`
// serves Hopper's single rows and the small batches of other architectures; beyond, its blocks
// re-read the weights.
constexpr Candidate kCandidates[] = {
    {"gemv", 80, 999, 1, 1, gemm_stream_sm80_refuses,
     [](const GemmParams& p, const GemmResources&, CUstream_st* s) {
       return gemm_stream_sm80(p, false, s);
     }},
    {"stream_codes", 90, 90, 1, 1, gemm_stream_codes_sm90_refuses,
     [](const GemmParams& p, const GemmResources&, CUstream_st* s) {
       return gemm_stream_codes_sm90(p, nullptr, s);
     }},
    {"sm90", 90, 90, 1, 128, gemm_sm90_refuses,
     [](const GemmParams& p, const GemmResources&, CUstream_st* s) { return gemm_sm90(p, s); }},
    {"packed", 90, 90, 1, 8, gemv_packed_sm90_refuses,
     [](const GemmParams& p, const GemmResources&, CUstream_st* s) {
       return gemv_packed_sm90(p, s);
     }},
    {"packed", 90, 90, 65, kAny,
     [](const GemmParams& p) {
       return !p.gated && p.num_rows <= 128 &&
                      gemm_packed_cost(p) < choose_packed_tiles(p).cost + kTilesAround
                  ? "blocks that share k are faster"
                  : gemm_packed_tiles_sm90_refuses(p);
     },
     [](const GemmParams& p, const GemmResources&, CUstream_st* s) {
       return gemm_packed_tiles_sm90(p, s);
     }},
    {"packed", 90, 90, 1, kAny, gemm_packed_sm90_refuses,
     [](const GemmParams& p, const GemmResources&, CUstream_st* s) {
       return is_batch_invariant ? packed_in_pieces(p, s) : gemm_packed_sm90(p, s);
     },
     true},
    {"blas_codes", 90, 90, kRowsBlasCodes, kAny,
     [](const GemmParams& p) {
       const char* reason = gemm_blas_codes_sm90_refuses(p);
       return reason != nullptr ? reason : gemm_tiles_sm90_refuses(p);
     },
     [](const GemmParams& p, const GemmResources& r, CUstream_st* s) {
       // An algorithm chosen for about as many rows may refuse these.
       const bool theirs = gemm_blas_codes_sm90_faster(p, r, s);
       return theirs && gemm_blas_codes_sm90(p, r, s).ok() ? Status() : gemm_tiles_sm90(p, s);
     }},
    {"tiles", 90, 90, 129, kAny,
     [](const GemmParams& p) {
       // cuBLASLt with a pass before and behind is as fast, but where it must fold gate and up.
       return p.gated || p.operands != GemmOperands::kDense ? gemm_tiles_sm90_refuses(p)
                                                            : "cuBLASLt is as fast";
     },
     [](const GemmParams& p, const GemmResources&, CUstream_st* s) {
       return gemm_tiles_sm90(p, s);
     }},
    {"stream", 80, 999, 1, 32, gemm_stream_sm80_refuses,
     [](const GemmParams& p, const GemmResources&, CUstream_st* s) {
       return gemm_stream_sm80(p, true, s);
     }},
    {"blas", 75, 999, 1, kAny, gemm_blas_refuses, gemm_blas},
    {"tiles", 90, 90, 129, kAny, gemm_tiles_sm90_refuses,
     [](const GemmParams& p, const GemmResources&, CUstream_st* s) {
       return gemm_tiles_sm90(p, s);
     }},
    {"sm90", 90, 90, 1, kAny, gemm_sm90_refuses,
     [](const GemmParams& p, const GemmResources&, CUstream_st* s) { return gemm_sm90(p, s); },
     true},
    {"stream", 80, 999, 1, kAny, gemm_stream_sm80_refuses,
     [](const GemmParams& p, const GemmResources&, CUstream_st* s) {
       return gemm_stream_sm80(p, true, s);
     },
     true},
    {"mma", 80, 999, 1, kAny, gemm_packed_mma_refuses,
     [](const GemmParams& p, const GemmResources&, CUstream_st* s) {
       return gemm_packed_mma(p, s);
     },
     true},
    {"mma", 75, 79, 1, kAny,
     [](const GemmParams& p) {
       return p.dtype == DType::kBFloat16 ? "bfloat16 needs sm_80" : gemm_packed_mma_refuses(p);
     },
     [](const GemmParams& p, const GemmResources&, CUstream_st* s) {
       return gemm_packed_mma(p, s);
     },
     true},
    {"mma", 89, 999, 1, kAny, gemm_codes_mma_refuses,
     [](const GemmParams& p, const GemmResources&, CUstream_st* s) { return gemm_codes_mma(p, s); },
     true},
    {"mma", 75, 88, 1, kAny,
     [](const GemmParams& p) {
       return p.operands == GemmOperands::kFp8 ? "float8 needs sm_89" : gemm_codes_mma_refuses(p);
     },
     [](const GemmParams& p, const GemmResources&, CUstream_st* s) { return gemm_codes_mma(p, s); },
     true},
    {"generic", 75, 999, 1, kAny, gemm_generic_refuses,
     [](const GemmParams& p, const GemmResources&, CUstream_st* s) { return gemm_generic(p, s); },
     true},
};

int compute_capability() {  // * 10
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return major * 10 + minor;
}

// What REGATTA_KERNEL forces ("linear=mma"), of quantized weights alone: dense ones are beside them
// in a model, and no kernel takes both.
std::string forced_quantized() { return forced_candidate("linear"); }

}  // namespace

Status gemm(const GemmParams& p, const GemmResources& resources, const char* force,
            CUstream_st* stream) {
  if (p.num_rows == 0) return {};
  const std::string forced = forced_quantized();
  if (force == nullptr && !forced.empty() && p.operands != GemmOperands::kDense) {
    force = forced.c_str();
  }
  const int arch = compute_capability();
  std::string reasons;
  for (const Candidate& c : kCandidates) {
    const char* reason = nullptr;
    if (force != nullptr && std::strcmp(force, c.name) != 0) {
      reason = "not the forced one";
    } else if (is_batch_invariant && !c.is_alike) {
      reason = "not batch-invariant";
    } else if (arch < c.min_arch || arch > c.max_arch) {
      reason = "not for this architecture";
    } else if (force == nullptr && (p.num_rows < c.min_rows || p.num_rows > c.max_rows)) {
      reason = "not for this number of rows";
    } else if (c.run == gemm_blas && resources.blas == nullptr) {
      reason = "no cuBLASLt handle";
    } else if (c.run == gemm_blas && p.dtype == DType::kBFloat16 && arch < 80) {
      reason = "bfloat16 needs sm_80";
    } else {
      reason = c.refuses(p);
    }
    if (reason == nullptr) return c.run(p, resources, stream);
    reasons += std::string(reasons.empty() ? "" : "; ") + c.name + ": " + reason;
  }
  return Status::error("gemm: no kernel for M " + std::to_string(p.num_rows) + ", N " +
                       std::to_string(p.out_features) + ", K " + std::to_string(p.in_features) +
                       ", " + dtype_name(p.dtype) + " on sm_" + std::to_string(arch) + " (" +
                       reasons + ")");
}

bool gemm_packed_scales_out(DType dtype, int64_t num_rows) {
  return dtype == DType::kBFloat16 && num_rows <= 64 && compute_capability() == 90 &&
         !is_batch_invariant && forced_quantized().empty();
}

Status gemm_to_codes(const GemmParams& params, const QuantizeRowsParams& q,
                     const QuantizeRowsParams& next, const GemmResources& resources, bool* coded,
                     CUstream_st* stream) {
  GemmParams p = params;
  p.x = q.codes;
  p.x_scale = q.scale;
  const Status status = quantize_rows(q, stream);
  if (!status.ok()) return status;
  *coded = p.num_rows >= kRowsBlasCodes && compute_capability() == 90 && !is_batch_invariant &&
           gemm_blas_unfolded_sm90_faster(p, next, resources, stream) &&
           gemm_blas_unfolded_sm90(p, next, resources, stream).ok();
  return *coded ? Status() : gemm(p, resources, nullptr, stream);
}

Status gemm_quantized(const GemmParams& params, const QuantizeRowsParams& q,
                      const GemmResources& resources, CUstream_st* stream) {
  GemmParams p = params;
  p.x = q.codes;
  p.x_scale = q.scale;
  if (compute_capability() == 90 && !is_batch_invariant && forced_quantized().empty() &&
      gemm_stream_codes_sm90_quantizes(p, q)) {
    return gemm_stream_codes_sm90(p, &q, stream);
  }
  const Status status = quantize_rows(q, stream);
  return status.ok() ? gemm(p, resources, nullptr, stream) : status;
}

}  // namespace regatta::cuda
