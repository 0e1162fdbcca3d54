// regatta_linear(x [T, K], weight..., bias? [N]) {scheme, out_features} -> [T, N]
// regatta_adapted_linear(x [T, K], weight..., bias? [N], a, b, adapter_ids [T],
//     adapter_pages [S, kNumAdapted, R]) {scheme, part_sizes, which} -> [T, N]
//
// The second adds what adapters do (regatta/adapters.h). a, b: LowRankWeights'. part_sizes: columns
// of each part; which: the row of adapter_pages.
#include <functional>
#include <numeric>

#include "cuda_resources.h"
#include "runtime/operators.h"

namespace regatta::binding {
namespace {

// Of the operators' tensors; `adapted` takes what adapters add, or is null.
using Adapt = std::function<Status(const Device&, LinearParams*)>;
Tensors multiply(const paddle::Tensor& x, const Tensors& weight, const MaybeTensor& bias,
                 const std::string& scheme, int64_t out_features, const Adapt& adapted = nullptr) {
  const Device device = weight.empty() ? device_of(x, "x") : device_of(weight[0], "weight");
  const std::vector<TensorView> stored = views(weight, "weight", device.place);
  LinearParams params = {};
  params.out_features = out_features;
  params.scheme = scheme_of(scheme);
  throw_if_error(runtime::linear(view(x, "x", device.place), {stored.data(), stored.size()},
                                 view(bias, "bias", device.place), &params));
  if (adapted) throw_if_error(adapted(device, &params));
  paddle::Tensor out = device.empty({params.num_tokens, out_features}, params.dtype);
  params.out = out.data();
  if (device.is_cpu()) throw_if_error(cpu::linear(params));
#ifdef REGATTA_WITH_CUDA
  if (!device.is_cpu()) {
    const cuda::ComposedResources resources =
        resources_of(device, params.num_tokens, cuda::linear_scratch_bytes(params));
    throw_if_error(cuda::linear(params, resources, launch_on(device)));
  }
#endif
  return {out};
}

Tensors linear(const paddle::Tensor& x, const Tensors& weight, const MaybeTensor& bias,
               const std::string& scheme, int64_t out_features) {
  return multiply(x, weight, bias, scheme, out_features);
}

int64_t sum_of(const std::vector<int>& part_sizes) {
  return std::accumulate(part_sizes.begin(), part_sizes.end(), int64_t{0});
}

Tensors adapted_linear(const paddle::Tensor& x, const Tensors& weight, const MaybeTensor& bias,
                       const paddle::Tensor& a, const paddle::Tensor& b,
                       const paddle::Tensor& adapter_ids, const paddle::Tensor& adapter_pages,
                       const std::string& scheme, const std::vector<int>& part_sizes,
                       int64_t which) {
  throw_if_error(runtime::check_adapted(part_sizes, which));
  const auto adapted = [&](const Device& device, LinearParams* params) {
    const phi::Place& place = device.place;
    return runtime::adapted_linear(
        {view(a, "a", place), view(b, "b", place), view(adapter_ids, "adapter_ids", place),
         view(adapter_pages, "adapter_pages", place)},
        part_sizes, which, device.is_cpu(), params);
  };
  return multiply(x, weight, bias, scheme, sum_of(part_sizes), adapted);
}

std::vector<Shape> infer_shape(const Shape& x, const std::vector<Shape>&, const MaybeShape&,
                               const std::string&, int64_t out_features) {
  return {{x[0], out_features}};
}

// part_sizes is of ints: Paddle takes a list of int64_t here for the shape of one more input.
std::vector<Shape> infer_adapted_shape(const Shape& x, const std::vector<Shape>&, const MaybeShape&,
                                       const Shape&, const Shape&, const Shape&, const Shape&,
                                       const std::string&, const std::vector<int>& part_sizes,
                                       int64_t) {
  return {{x[0], sum_of(part_sizes)}};
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_linear)
    .Inputs({"x", paddle::Vec("weight"), paddle::Optional("bias")})
    .Outputs({"out"})
    .Attrs({"scheme: std::string", "out_features: int64_t"})
    .SetKernelFn(PD_KERNEL(regatta::binding::linear))
    .SetInferShapeFn(PD_INFER_SHAPE(regatta::binding::infer_shape))
    .SetInferDtypeFn(regatta::binding::types_of<0>);

PD_BUILD_OP(regatta_adapted_linear)
    .Inputs({"x", paddle::Vec("weight"), paddle::Optional("bias"), "a", "b", "adapter_ids",
             "adapter_pages"})
    .Outputs({"out"})
    .Attrs({"scheme: std::string", "part_sizes: std::vector<int>", "which: int64_t"})
    .SetKernelFn(PD_KERNEL(regatta::binding::adapted_linear))
    .SetInferShapeFn(PD_INFER_SHAPE(regatta::binding::infer_adapted_shape))
    .SetInferDtypeFn(regatta::binding::types_of<0>);
