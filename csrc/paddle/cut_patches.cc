// regatta_cut_patches(pixels [N] uint8, origins [P], strides [P])
//     {side, width, factor, mean, std, dtype} -> [P, width]
// See regatta/cut_patches.h.
#include "regatta/cut_patches.h"

#include "activation_type.h"
#include "cuda_resources.h"

namespace regatta::binding {
namespace {

Tensors cut_patches(const paddle::Tensor& pixels, const paddle::Tensor& origins,
                    const paddle::Tensor& strides, int64_t side, int64_t width, float factor,
                    const std::vector<float>& mean, const std::vector<float>& std,
                    const std::string& dtype) {
  const Device device = device_of(pixels, "pixels");
  const TensorView bytes = checked_view(pixels, "pixels", DType::kUInt8, {-1}, device.place);
  const TensorView from = checked_view(origins, "origins", DType::kInt32, {-1}, device.place);
  if (side < 1 || width < kNumChannels * side * side) {
    fail("width " + std::to_string(width) + " of patches of " + std::to_string(side) + " pixels");
  }
  if (mean.size() != kNumChannels || std.size() != kNumChannels) {
    fail("mean and std have " + std::to_string(mean.size()) + " and " + std::to_string(std.size()) +
         " values (allowed: 3 each)");
  }
  CutPatchesParams params;
  params.pixels = static_cast<const uint8_t*>(bytes.data);
  params.origins = static_cast<const int32_t*>(from.data);
  params.num_bytes = bytes.shape[0];
  params.num_patches = from.shape[0];
  params.strides = data_of<int32_t>(strides, "strides", {params.num_patches}, device.place);
  params.side = side;
  params.width = width;
  params.factor = factor;
  std::copy(mean.begin(), mean.end(), params.mean);
  std::copy(std.begin(), std.end(), params.std);
  params.dtype = activation_type(dtype);
  paddle::Tensor out = device.empty({params.num_patches, width}, params.dtype);
  params.out = out.data();
  REGATTA_RUN(cut_patches, params, device);
  return {out};
}

std::vector<Shape> infer_shape(const Shape&, const Shape& origins, const Shape&, int64_t,
                               int64_t width, float, const std::vector<float>&,
                               const std::vector<float>&, const std::string&) {
  return {{origins[0], width}};
}

std::vector<Type> infer_dtype(const Type&, const Type&, const Type&, int64_t, int64_t, float,
                              const std::vector<float>&, const std::vector<float>&,
                              const std::string& dtype) {
  return {paddle_dtype(activation_type(dtype))};
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_cut_patches)
    .Inputs({"pixels", "origins", "strides"})
    .Outputs({"out"})
    .Attrs({"side: int64_t", "width: int64_t", "factor: float", "mean: std::vector<float>",
            "std: std::vector<float>", "dtype: std::string"})
    .SetKernelFn(PD_KERNEL(regatta::binding::cut_patches))
    .SetInferShapeFn(PD_INFER_SHAPE(regatta::binding::infer_shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(regatta::binding::infer_dtype));
