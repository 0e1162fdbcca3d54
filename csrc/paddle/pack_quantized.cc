// regatta_pack_quantized(codes [N, K] int8, scale [N] | [N, G], zero? [N, G]) {scheme, dtype}
//     -> packed uint8, scales float32, as the kernels of the codes' device read them
//
// w = (codes - zero) * scale; without zero it is 0, of 4-bit codes 8. `dtype`: of the activations;
// the CPU's layout is the same for all (regatta/pack_quantized.h).
#include "regatta/pack_quantized.h"

#include "common.h"

namespace regatta::binding {
namespace {

QuantizedLayout layout_of(const std::vector<int64_t>& codes, const std::vector<int64_t>& scale) {
  QuantizedLayout layout;
  layout.in_features = codes[1];
  layout.out_features = codes[0];
  layout.num_groups = scale.size() > 1 ? scale[1] : 1;
  return layout;
}

std::vector<int64_t> packed_dims(const QuantizedLayout& layout) {
  int64_t shape[4];
  layout.packed_shape(shape);
  return {shape, shape + 4};
}

std::vector<int64_t> scales_dims(const QuantizedLayout& layout) {
  int64_t shape[4];
  layout.scales_shape(shape);
  return {shape, shape + layout.rank_of_scales()};
}

std::vector<paddle::Tensor> pack_quantized(const paddle::Tensor& codes, const paddle::Tensor& scale,
                                           const paddle::optional<paddle::Tensor>& zero,
                                           const std::string& scheme, const std::string& dtype) {
  const TensorView codes_view = checked_view(codes, "codes", DType::kInt8, {-1, -1});
  const TensorView scale_view = view(scale, "scale");
  check_dtype(scale_view, "scale", DType::kFloat32);
  const int64_t num_outputs = codes_view.shape[0];
  check_shape(scale_view, "scale",
              scale_view.rank == 1 ? std::vector<int64_t>{num_outputs}
                                   : std::vector<int64_t>{num_outputs, -1});
  PackQuantizedParams params;
  params.scheme = scheme;
  params.layout = layout_of({num_outputs, codes_view.shape[1]},
                            {scale_view.shape, scale_view.shape + scale_view.rank});
  const TensorView zero_view = optional_view(zero, "zero", DType::kFloat32,
                                             {num_outputs, params.layout.num_groups});
  params.codes = static_cast<const int8_t*>(codes_view.data);
  params.scale = static_cast<const float*>(scale_view.data);
  params.zero = static_cast<const float*>(zero_view.data);
  throw_if_error(cpu::plan_pack_quantized(params, &params.layout));
  paddle::Tensor packed = empty(packed_dims(params.layout), DType::kUInt8);
  paddle::Tensor scales = empty(scales_dims(params.layout), DType::kFloat32);
  params.packed = packed.data<uint8_t>();
  params.scales = scales.data<float>();
  throw_if_error(cpu::pack_quantized(params));
  return {packed, scales};
}

std::vector<std::vector<int64_t>> infer_shape(const std::vector<int64_t>& codes,
                                              const std::vector<int64_t>& scale,
                                              const paddle::optional<std::vector<int64_t>>& zero,
                                              const std::string& scheme, const std::string&) {
  QuantizedLayout layout = layout_of(codes, scale);
  layout.bits = quantized_bits(scheme);
  layout.has_zeros = zero.is_initialized();
  return {packed_dims(layout), scales_dims(layout)};
}

std::vector<paddle::DataType> infer_dtype(const paddle::DataType&, const paddle::DataType&,
                                          const paddle::optional<paddle::DataType>&,
                                          const std::string&, const std::string&) {
  return {paddle::DataType::UINT8, paddle::DataType::FLOAT32};
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_pack_quantized)
    .Inputs({"codes", "scale", paddle::Optional("zero")})
    .Outputs({"packed", "scales"})
    .Attrs({"scheme: std::string", "dtype: std::string"})
    .SetKernelFn(PD_KERNEL(regatta::binding::pack_quantized))
    .SetInferShapeFn(PD_INFER_SHAPE(regatta::binding::infer_shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(regatta::binding::infer_dtype));
