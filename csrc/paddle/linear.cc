// regatta_linear(x [T, K], weight..., bias? [N]) {scheme, out_features} -> [T, N]
// regatta_adapted_linear(x [T, K], weight..., bias? [N], a, b, adapter_ids [T],
//     adapter_pages [S, kNumAdapted, R]) {scheme, part_sizes, which} -> [T, N]
//
// The second adds what adapters do (regatta/adapters.h). a, b: LowRankWeights'. part_sizes: columns
// of each part; which: the row of adapter_pages.
#include "regatta/linear.h"

#include <numeric>

#include "cuda_resources.h"
#include "runtime/adapters.h"

namespace regatta::binding {
namespace {

// The product; set(params, device) says what else there is of it.
template <class Set>
Tensors multiply(const paddle::Tensor& x, const Tensors& weight, const MaybeTensor& bias,
                 const std::string& scheme, int64_t out_features, Set&& set) {
  const Device device = weight.empty() ? device_of(x, "x") : device_of(weight[0], "weight");
  const TensorView x_view = view(x, "x", device.place);
  check_activation(x_view, "x");
  check_shape(x_view, "x", {-1, -1});
  const std::vector<TensorView> weight_views = views(weight, "weight", device.place);
  paddle::Tensor out = device.empty({x_view.shape[0], out_features}, x_view.dtype);
  LinearParams params;
  params.x = x_view.data;
  params.weight = weight_views.data();
  params.num_weights = static_cast<int>(weight_views.size());
  params.bias = optional_view(bias, "bias", x_view.dtype, {out_features}, device.place).data;
  params.out = out.data();
  params.num_tokens = x_view.shape[0];
  params.in_features = x_view.shape[1];
  params.out_features = out_features;
  params.dtype = x_view.dtype;
  params.scheme = scheme_of(scheme);
  set(params, device);
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
  return multiply(x, weight, bias, scheme, out_features, [](LinearParams&, const Device&) {});
}

int64_t sum_of(const std::vector<int>& part_sizes) {
  return std::accumulate(part_sizes.begin(), part_sizes.end(), int64_t{0});
}

Tensors adapted_linear(const paddle::Tensor& x, const Tensors& weight, const MaybeTensor& bias,
                       const paddle::Tensor& a, const paddle::Tensor& b,
                       const paddle::Tensor& adapter_ids, const paddle::Tensor& adapter_pages,
                       const std::string& scheme, const std::vector<int>& part_sizes,
                       int64_t which) {
  const auto num_parts = static_cast<int64_t>(part_sizes.size());
  constexpr int64_t kMost = sizeof(LinearParams::part_sizes) / sizeof(int64_t);
  const bool are_sizes =
      std::all_of(part_sizes.begin(), part_sizes.end(), [](int size) { return size > 0; });
  if (num_parts < 1 || num_parts > kMost || !are_sizes) {
    fail("part_sizes has " + std::to_string(num_parts) + " sizes (allowed: 1 to " +
         std::to_string(kMost) + ", each above 0)");
  }
  if (which < 0 || which >= kNumAdapted) {
    fail("which is " + std::to_string(which) + " (allowed: 0 to " +
         std::to_string(kNumAdapted - 1) + ")");
  }
  const int64_t out_features = sum_of(part_sizes);
  const auto set = [&](LinearParams& p, const Device& device) {
    const phi::Place& place = device.place;
    throw_if_error(runtime::low_rank_weights(view(a, "a", place), view(b, "b", place), "adapters",
                                             num_parts, p.in_features, out_features, p.dtype,
                                             device.is_cpu(), &p.low_rank));
    throw_if_error(runtime::adapter_rows(
        view(adapter_ids, "adapter_ids", place), view(adapter_pages, "adapter_pages", place),
        p.low_rank.num_pages, p.num_tokens, device.is_cpu(), &p.adapters));
    p.which = static_cast<Adapted>(which);
    std::copy(part_sizes.begin(), part_sizes.end(), p.part_sizes);
  };
  return multiply(x, weight, bias, scheme, out_features, set);
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
