// regatta_round_weight(weight [N, K]) {rule, group_size}
//     -> codes [N, K] int8 (of e4m3 its bits, uint8), scale float32, zero float32
//
// What predict/schemes/_rounding.py makes of the matrix by `rule` (int8, int4, e4m3), bit for bit:
// scale [N] or [N, G], of e4m3 in blocks [ceil(N/128), ceil(K/128)]; zero [N, G] of int4, else
// nothing. GPUs only; what rounds on a host is NumPy.
#include "regatta/round_weight.h"

#include <algorithm>
#include <iterator>

#include "device.h"

namespace regatta::binding {
namespace {

constexpr int64_t kMaxColumns = int64_t{1} << 32;

constexpr const char* kRules[] = {"int8", "int4", "e4m3"};  // in RoundingRule's order

RoundingRule rule_of(const std::string& name) {
  std::string known;
  for (size_t i = 0; i < std::size(kRules); ++i) {
    if (name == kRules[i]) return static_cast<RoundingRule>(i);
    known += (i == 0 ? "" : ", ") + std::string(kRules[i]);
  }
  fail("rule '" + name + "' is not known (allowed: " + known + ")");
}

struct Shapes {
  RoundingRule rule;
  int64_t group_size, block_rows;
  std::vector<int64_t> scale, zero;
};

Shapes shapes_of(int64_t rows, int64_t columns, const std::string& rule, int64_t group_size) {
  if (group_size != -1 && group_size < 1) {
    fail("group_size " + std::to_string(group_size) + " is not supported (allowed: -1, 1, 2, ...)");
  }
  const int64_t size = group_size == -1 ? std::max<int64_t>(1, columns) : group_size;
  Shapes shapes = {rule_of(rule), size, 1, {rows}, {0}};
  if (shapes.rule == RoundingRule::kE4M3) {
    if (group_size == -1) return shapes;
    shapes.block_rows = size;
    shapes.scale = {(rows + size - 1) / size, (columns + size - 1) / size};
    return shapes;
  }
  if (columns % size != 0) {
    fail("group_size " + std::to_string(group_size) + " does not divide " +
         std::to_string(columns) + " columns");
  }
  const bool is_int4 = shapes.rule == RoundingRule::kInt4;
  if (group_size != -1 || is_int4) shapes.scale = {rows, columns / size};
  if (is_int4) shapes.zero = shapes.scale;
  return shapes;
}

Tensors round_weight(const paddle::Tensor& weight, const std::string& rule, int64_t group_size) {
  const Device device = gpu_of(weight, "weight");
  const TensorView matrix = view(weight, "weight", device.place);
  check_activation(matrix, "weight");
  check_shape(matrix, "weight", {-1, -1});
  if (matrix.shape[1] >= kMaxColumns) {
    fail("weight has " + std::to_string(matrix.shape[1]) + " columns (allowed: below 2^32)");
  }
  const Shapes shapes = shapes_of(matrix.shape[0], matrix.shape[1], rule, group_size);
  paddle::Tensor codes =
      device.empty({matrix.shape[0], matrix.shape[1]},
                   shapes.rule == RoundingRule::kE4M3 ? DType::kUInt8 : DType::kInt8);
  paddle::Tensor scale = device.empty(shapes.scale, DType::kFloat32);
  paddle::Tensor zero = device.empty(shapes.zero, DType::kFloat32);
#ifdef REGATTA_WITH_CUDA
  make_current(device);
  RoundWeightParams params;
  params.weight = matrix.data;
  params.codes = static_cast<uint8_t*>(codes.data());
  params.scale = scale.data<float>();
  params.zero = zero.data<float>();
  params.out_features = matrix.shape[0];
  params.in_features = matrix.shape[1];
  params.group_size = shapes.group_size;
  params.block_rows = shapes.block_rows;
  params.rule = shapes.rule;
  params.dtype = matrix.dtype;
  throw_if_error(cuda::round_weight(params, device.stream));
#endif
  return {codes, scale, zero};
}

std::vector<Shape> infer_shape(const Shape& weight, const std::string& rule, int64_t group_size) {
  const Shapes shapes = shapes_of(weight[0], weight[1], rule, group_size);
  return {weight, shapes.scale, shapes.zero};
}

std::vector<Type> infer_dtype(const Type&, const std::string& rule, int64_t) {
  return {rule_of(rule) == RoundingRule::kE4M3 ? Type::UINT8 : Type::INT8, Type::FLOAT32,
          Type::FLOAT32};
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_round_weight)
    .Inputs({"weight"})
    .Outputs({"codes", "scale", "zero"})
    .Attrs({"rule: std::string", "group_size: int64_t"})
    .SetKernelFn(PD_KERNEL(regatta::binding::round_weight))
    .SetInferShapeFn(PD_INFER_SHAPE(regatta::binding::infer_shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(regatta::binding::infer_dtype));
