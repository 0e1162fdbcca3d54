#include "gemm_quantized.h"

#include <algorithm>

namespace regatta::cpu {
namespace {

std::string expected_shape(const std::string& name, const TensorView& got, DType dtype,
                           const int64_t* shape, int rank) {
  TensorView wanted;
  wanted.rank = rank;
  std::copy(shape, shape + rank, wanted.shape);
  return name + " is " + dtype_name(got.dtype) + " " + shape_string(got) + ", expected " +
         dtype_name(dtype) + " " + shape_string(wanted);
}

bool is(const TensorView& tensor, DType dtype, const int64_t* shape, int rank) {
  return tensor.dtype == dtype && tensor.rank == rank &&
         std::equal(shape, shape + rank, tensor.shape);
}

}  // namespace

QuantizedLayout quantized_layout(SchemeId scheme, const Weight& weight) {
  QuantizedLayout layout;
  layout.bits = quantized_bits(scheme_info(scheme));
  layout.in_features = weight.in_features;
  layout.out_features = weight.out_features;
  layout.num_groups = weight.tensors[1].shape[1];
  layout.has_zeros = weight.tensors[1].rank == 4;
  return layout;
}

Status check_quantized(SchemeId scheme, const Weight& weight) {
  const std::string name = scheme_info(scheme).name;
  const int num_tensors = scheme_info(scheme).num_tensors;
  if (weight.num_tensors != num_tensors) {
    return Status::error("scheme '" + name + "' takes " + std::to_string(num_tensors) +
                         " weight tensors, got " + std::to_string(weight.num_tensors));
  }
  const QuantizedLayout layout = quantized_layout(scheme, weight);
  const std::string advice = " for " + std::to_string(weight.in_features) + " inputs and " +
                             std::to_string(weight.out_features) +
                             " outputs; pack it with regatta_pack_quantized";
  int64_t shape[4];
  layout.packed_shape(shape);
  if (!is(weight.tensors[0], DType::kUInt8, shape, 4)) {
    return Status::error(
        expected_shape("packed " + name + " weight", weight.tensors[0], DType::kUInt8, shape, 4) +
        advice);
  }
  layout.scales_shape(shape);
  const TensorView& scales = weight.tensors[1];
  if (layout.group_size() == 0 || !is(scales, DType::kFloat32, shape, layout.rank_of_scales())) {
    return Status::error(expected_shape("scales of the " + name + " weight", scales,
                                        DType::kFloat32, shape, layout.rank_of_scales()) +
                         advice);
  }
  return {};
}

Status check_per_input(SchemeId scheme, const Weight& weight, int index, const char* name,
                       DType dtype) {
  const TensorView& tensor = weight.tensors[index];
  const bool fits = tensor.dtype == dtype && tensor.rank == 1 &&
                    (tensor.shape[0] == 1 || tensor.shape[0] == weight.in_features);
  if (fits) return {};
  return Status::error(std::string(name) + " of the " + scheme_info(scheme).name + " weight is " +
                       dtype_name(tensor.dtype) + " " + shape_string(tensor) + ", expected " +
                       dtype_name(dtype) + " [" + std::to_string(weight.in_features) +
                       "], or [1] for none");
}

}  // namespace regatta::cpu
