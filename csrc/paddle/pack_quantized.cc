// regatta_pack_quantized(codes [N, K] int8, scale [N] | [N, G], zero? [N, G]) {scheme, dtype}
//     -> packed uint8, scales float32, as the kernels of the codes' device read them
//
// w = (codes - zero) * scale; without zero it is 0, of 4-bit codes 8. Of e2m1 codes w is their
// value times scale, without zero. `dtype`: of the activations; the CPU's layout is the same for
// all (regatta/pack_quantized.h).
#include "regatta/pack_quantized.h"

#include <algorithm>

#include "cuda_resources.h"

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

#ifdef REGATTA_WITH_CUDA
// As csrc/cuda/gemm/ reads them: of 8-bit activations the codes themselves and scales [N], or, of
// blocks of 128 columns, as they are; of 16-bit ones, and with 4 bits, packed [ceil(N/16),
// ceil(K/128), bytes of a unit], and where groups have no scales in there scales [N].
Tensors pack_on_gpu(const Device& device, const paddle::Tensor& codes, const paddle::Tensor& scale,
                    const MaybeTensor& zero, SchemeId scheme, const std::string& dtype) {
  const SchemeInfo& info = scheme_info(scheme);
  GemmOperands operands = info.operands;
  if (operands == GemmOperands::kDense) {
    fail("scheme '" + std::string(info.name) + "' is not one that a GPU packs (allowed: " +
         scheme_names([](const SchemeInfo& each) { return each.code_bits != 0; }) + ")");
  }
  make_current(device);
  const TensorView codes_view = view(codes, "codes", device.place);
  if (codes_view.dtype != DType::kInt8 && codes_view.dtype != DType::kUInt8) {
    fail("codes must be int8 or uint8, got " + std::string(dtype_name(codes_view.dtype)));
  }
  check_shape(codes_view, "codes", {-1, -1});
  const int64_t rows = codes_view.shape[0], columns = codes_view.shape[1];
  const TensorView scale_view = view(scale, "scale", device.place);
  throw_if_error(runtime::check_dtype(scale_view, "scale", DType::kFloat32));
  const int64_t groups = scale_view.rank == 2 ? scale_view.shape[1] : 1;
  const bool per_row = groups == 1 && (scale_view.shape[0] == rows || scale_view.shape[0] == 1);
  const TensorView zero_view =
      optional_view(zero, "zero", DType::kFloat32, {rows, groups}, device.place);
  if (operands == GemmOperands::kWeightInt8 && (!per_row || zero_view.data != nullptr)) {
    operands = GemmOperands::kWeightInt8Groups;
  }
  const bool is_codes = !is_packed(operands), is_fp8 = operands == GemmOperands::kFp8;
  const bool in_groups = !is_codes && operands != GemmOperands::kWeightInt8;
  const bool blocks = is_fp8 && scale_view.rank == 2 && !per_row &&
                      groups == (columns + 127) / 128 &&
                      (scale_view.shape[0] == rows || scale_view.shape[0] == (rows + 127) / 128);
  if (!in_groups && !per_row && !blocks) {
    fail("scheme '" + std::string(info.name) +
         "' on a GPU takes one scale per output feature or one for all" +
         (is_fp8 ? ", or one per 128 x 128" : "") + ", got " + shape_string(scale_view) + " for " +
         std::to_string(rows) + " output features");
  }
  if (in_groups &&
      (scale_view.shape[0] != rows || cuda::packed_group_size(operands, columns, groups) == 0)) {
    fail("scheme '" + std::string(info.name) + "' on a GPU takes groups of " +
         (info.is_mxfp4 ? "32 columns"
                        : std::string(operands == GemmOperands::kWeightInt4 ? "32 columns, " : "") +
                              "64 columns, of a multiple of 128, or one group") +
         "; got scales " + shape_string(scale_view) + " for codes " + shape_string(codes_view));
  }
  if (info.is_mxfp4 && zero_view.data != nullptr) {
    fail("scheme '" + std::string(info.name) + "' takes no zero points");
  }
  if (info.activations != Activations::kFloat && columns % 16 != 0) {
    fail("scheme '" + std::string(info.name) +
         "' on a GPU needs a multiple of 16 input features, got " + std::to_string(columns));
  }
  const std::vector<int64_t> shape = blocks ? std::vector<int64_t>{scale_view.shape[0], groups}
                                            : std::vector<int64_t>{in_groups ? 1 : rows};
  paddle::Tensor scales = device.empty(shape, DType::kFloat32);
  const int64_t count = blocks ? shape[0] * groups : shape[0];
  throw_if_error(cuda::repeat_scale(static_cast<const float*>(scale_view.data),
                                    scale_view.shape[0] == 1 && !blocks ? 1 : count,
                                    scales.data<float>(), count, device.stream));
  if (is_codes) {
    paddle::Tensor packed = device.empty({rows, columns}, DType::kUInt8);
    throw_if_error(
        cuda::copy_bytes(packed.data<uint8_t>(), codes_view.data, rows * columns, device.stream));
    return {packed, scales};
  }
  const int64_t group = in_groups ? cuda::packed_group_size(operands, columns, groups) : 128;
  const int64_t tiles = cuda::packed_tiles(rows), units = cuda::packed_units(columns);
  const int64_t bytes = cuda::packed_weight_bytes(rows, columns, operands, group);
  paddle::Tensor packed =
      device.empty({tiles, units, bytes / std::max<int64_t>(1, tiles * units)}, DType::kUInt8);
  PackWeightParams params;
  params.codes = static_cast<const int8_t*>(codes_view.data);
  params.scale = static_cast<const float*>(scale_view.data);
  params.zero = static_cast<const float*>(zero_view.data);
  params.packed = packed.data<uint8_t>();
  params.out_features = rows;
  params.in_features = columns;
  params.num_groups = in_groups ? groups : 1;
  params.operands = operands;
  params.dtype = dtype == "float16" ? DType::kFloat16 : DType::kBFloat16;
  if (dtype != "float16" && dtype != "bfloat16") {
    fail("dtype " + dtype +
         " is not supported with quantized weights on a GPU (allowed: bfloat16, "
         "float16)");
  }
  throw_if_error(cuda::pack_weight(params, device.stream));
  return {packed, scales};
}
#endif

Tensors pack_quantized(const paddle::Tensor& codes, const paddle::Tensor& scale,
                       const MaybeTensor& zero, const std::string& name, const std::string& dtype) {
  const SchemeId scheme = scheme_of(name);
#ifdef REGATTA_WITH_CUDA
  const Device device = device_of(codes, "codes");
  if (!device.is_cpu()) return pack_on_gpu(device, codes, scale, zero, scheme, dtype);
#endif
  const TensorView codes_view = checked_view(codes, "codes", DType::kInt8, {-1, -1});
  const TensorView scale_view = view(scale, "scale");
  throw_if_error(runtime::check_dtype(scale_view, "scale", DType::kFloat32));
  const int64_t num_outputs = codes_view.shape[0];
  check_shape(scale_view, "scale",
              scale_view.rank == 1 ? std::vector<int64_t>{num_outputs}
                                   : std::vector<int64_t>{num_outputs, -1});
  PackQuantizedParams params;
  params.scheme = scheme;
  params.layout = layout_of({num_outputs, codes_view.shape[1]},
                            {scale_view.shape, scale_view.shape + scale_view.rank});
  const TensorView zero_view =
      optional_view(zero, "zero", DType::kFloat32, {num_outputs, params.layout.num_groups});
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

std::vector<Shape> infer_shape(const Shape& codes, const Shape& scale, const MaybeShape& zero,
                               const std::string& scheme, const std::string&) {
  QuantizedLayout layout = layout_of(codes, scale);
  layout.bits = quantized_bits(scheme_info(scheme_of(scheme)));
  layout.has_zeros = zero.is_initialized();
  return {packed_dims(layout), scales_dims(layout)};
}

std::vector<Type> infer_dtype(const Type&, const Type&, const MaybeType&, const std::string&,
                              const std::string&) {
  return {Type::UINT8, Type::FLOAT32};
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
