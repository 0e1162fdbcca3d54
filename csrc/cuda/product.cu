#include "cuda/product.h"

namespace regatta::cuda {

void ProductScratch::count(SchemeId scheme, DType dtype, int64_t rows, int64_t in_features,
                           int64_t out_features, bool gated, bool reads_sumsq, int64_t num_groups) {
  GemmParams g;
  g.operands = operands_of(scheme);
  g.dtype = g.out_dtype = dtype;
  g.num_rows = rows;
  g.in_features = in_features;
  g.out_features = out_features;
  g.gated = gated;
  g.num_groups = num_groups;
  gemm_.matrix_bytes = std::max(gemm_.matrix_bytes, gemm_matrix_bytes(g));
  if (rows > kRowsWithoutScratch) {
    g.sumsq = reads_sumsq ? reinterpret_cast<const float*>(1) : nullptr;  // counted, not read
    gemm_.scratch_bytes = std::max(gemm_.scratch_bytes, gemm_scratch_bytes(g));
  }
  rows_ = std::max(rows_, rows);
  width_ = std::max(width_, in_features);
  has_codes_ = has_codes_ || is_quantized(scheme);
  has_fp8_ = has_fp8_ || g.operands == GemmOperands::kFp8;
  has_order_ = has_order_ || g.operands == GemmOperands::kW4A8;
}

void ProductScratch::take(Arena& arena, void* blas, bool matrices) {
  if (rows_ > kRowsWithoutScratch) {
    gemm_.scratch = arena.take(gemm_.scratch_bytes);
    gemm_.blas = blas;
  }
  if (has_codes_) {
    codes_ = arena.take(rows_ * width_ * 2);
    if (has_order_) ordered_codes_ = arena.take(rows_ * width_);
    const int64_t scale_bytes =
        has_fp8_ ? gemm_block_stride(rows_) * ceil_div(width_, kScaleBlock) * 4 : rows_ * 4;
    scale_ = static_cast<float*>(arena.take(scale_bytes));
    if (has_fp8_ && rows_ >= kRowsBlasCodes) {
      if (codes_ != nullptr) next_codes_ = static_cast<uint8_t*>(codes_) + rows_ * width_;
      next_scale_ = static_cast<float*>(arena.take(scale_bytes));
    }
  }
  if (!matrices) gemm_.matrix_bytes = 0;
  if (gemm_.matrix_bytes > 0) gemm_.matrix = arena.take(gemm_.matrix_bytes);
}

namespace {

GemmParams gemm_params(const Product& p, DType dtype, DType out_dtype) {
  GemmParams g = p;
  g.operands = operands_of(p.scheme);
  g.weight = p.tensors->data;
  g.dtype = dtype;
  g.out_dtype = out_dtype;
  return g;
}

// The norm ahead of `p`: p.x -> p.normed.
Status norm(const Product& p, DType dtype, const Launch& launch_on) {
  NormParams n = {};
  n.x = p.x;
  n.weight = p.norm_weight;
  n.out = p.normed;
  n.num_tokens = p.num_rows;
  n.hidden_size = p.in_features;
  n.epsilon = p.epsilon;
  n.dtype = dtype;
  return norm(n, launch_on);
}

Status check_dense(const Product& p, DType dtype) {
  if (p.tensors->rank == 2 && p.tensors->dtype == dtype && p.tensors->shape[0] == p.out_features &&
      p.tensors->shape[1] == p.in_features) {
    return {};
  }
  return Status::error(std::string(p.name) + ": the weight is " + dtype_name(p.tensors->dtype) +
                       " " + shape_string(*p.tensors) + ", expected " + dtype_name(dtype) + " [" +
                       std::to_string(p.out_features) + ", " + std::to_string(p.in_features) +
                       "]; a GPU takes matrices as checkpoints store them, not packed");
}

}  // namespace

QuantizeRowsParams quantization(const Product& p, const ProductScratch& scratch, DType dtype) {
  const GemmOperands operands = operands_of(p.scheme);
  const auto optional = [&](int index) {
    const bool given = index < scheme_info(p.scheme).num_tensors && p.tensors[index].shape[0] > 1;
    return given ? static_cast<const float*>(p.tensors[index].data) : nullptr;
  };
  QuantizeRowsParams q;
  q.x = p.x;
  q.norm_weight = p.norm_weight;
  if (operands != GemmOperands::kW4A8) {
    q.smooth = optional(3);
    q.shift = optional(4);
  }
  q.static_scale = static_cast<const float*>(p.tensors[2].data);
  q.codes = scratch.codes_;
  q.scale = scratch.scale_;
  q.num_rows = p.num_rows;
  q.width = p.in_features;
  q.epsilon = p.epsilon;
  q.normalize = p.norm_weight != nullptr;
  q.operands = operands == GemmOperands::kW4A8 ? GemmOperands::kInt8 : operands;
  q.blocks = p.tensors[1].rank == 2;
  q.dtype = dtype;
  return q;
}

Status run(const Product& p, DType dtype, DType out_dtype, const ProductScratch& scratch,
           const Launch& launch_on) {
  GemmParams g = gemm_params(p, dtype, out_dtype);
  if (takes_codes(p.scheme)) {
    g.weight_scale = static_cast<const float*>(p.tensors[1].data);
    if (p.tensors[1].rank == 2) {
      g.scale_rows = p.tensors[1].shape[0] == p.out_features ? 1 : kScaleBlock;
    }
    if (p.coded.codes != nullptr) {
      g.x = p.coded.codes;
      g.x_scale = p.coded.scale;
      return gemm(g, scratch.gemm_, nullptr, launch_on.stream);
    }
    const QuantizeRowsParams q = quantization(p, scratch, dtype);
    if (p.next == nullptr || p.num_groups != 0 || scratch.next_codes_ == nullptr ||
        g.operands != GemmOperands::kFp8 || p.next->scheme != p.scheme) {
      return gemm_quantized(g, q, scratch.gemm_, launch_on.stream);
    }
    QuantizeRowsParams next = quantization(*p.next, scratch, dtype);
    next.codes = scratch.next_codes_;
    next.scale = scratch.next_scale_;
    bool coded = false;
    const Status status = gemm_to_codes(g, q, next, scratch.gemm_, &coded, launch_on.stream);
    if (coded) p.next->coded = next;
    return status;
  }
  const bool ordered = is_packed(g.operands) && p.tensors[3].shape[0] > 1;
  const bool to_codes = g.operands == GemmOperands::kW4A8;
  if (p.norm_weight != nullptr && (!to_codes || ordered)) {
    REGATTA_RETURN_IF_ERROR(norm(p, dtype, launch_on));
    g.x = p.normed;
  }
  if (g.operands == GemmOperands::kDense) {
    REGATTA_RETURN_IF_ERROR(check_dense(p, dtype));
    return gemm(g, scratch.gemm_, nullptr, launch_on.stream);
  }
  const int64_t unit = p.tensors->shape[2];
  if (g.operands == GemmOperands::kWeightInt8 && !packed_unit_has_groups(unit)) {
    g.weight_scale = static_cast<const float*>(p.tensors[1].data);
  } else {
    if (g.operands == GemmOperands::kWeightInt8) g.operands = GemmOperands::kWeightInt8Groups;
    g.group_size = packed_unit_group_size(unit);
  }
  if (ordered) {
    REGATTA_RETURN_IF_ERROR(gather_columns(g.x, static_cast<const int32_t*>(p.tensors[3].data),
                                           scratch.codes_, p.num_rows, p.in_features,
                                           launch_on.stream));
    g.x = scratch.codes_;
  }
  if (to_codes) {
    QuantizeRowsParams q = quantization(p, scratch, dtype);
    if (ordered) {
      q.x = g.x;
      q.norm_weight = nullptr, q.normalize = false;
      q.codes = scratch.ordered_codes_;
    }
    return gemm_quantized(g, q, scratch.gemm_, launch_on.stream);
  }
  return gemm(g, scratch.gemm_, nullptr, launch_on.stream);
}

bool makes_function(const Product& p, DType dtype) {
  GemmParams g = gemm_params(p, dtype, dtype);
  const bool plain = p.gated && p.function == Function::kSilu;
  return plain || (g.operands == GemmOperands::kDense && gemm_makes_function(g));
}

Status check_scratch(int64_t needed, const ComposedResources& resources, const char* what) {
  if (needed == 0 || (resources.scratch != nullptr && resources.scratch_bytes >= needed)) return {};
  return Status::error(std::string(what) + ": scratch of " +
                       std::to_string(resources.scratch_bytes) + " bytes is too small (needs " +
                       std::to_string(needed) + ")");
}

}  // namespace regatta::cuda
