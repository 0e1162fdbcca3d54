// regatta_logits(hidden [T, H], norm_weight? [H], head..., bias? [V], logit_indices? [L])
//                {scheme, vocab_size, epsilon, scale, softcap} -> logits [L, V] float32; of all
//                rows without indices
#include "regatta/logits.h"

#include "cuda_resources.h"

namespace regatta::binding {
namespace {

Tensors logits(const paddle::Tensor& hidden, const MaybeTensor& norm_weight, const Tensors& head,
               const MaybeTensor& bias, const MaybeTensor& logit_indices, const std::string& scheme,
               int64_t vocab_size, float epsilon, float scale, float softcap) {
  const Device device = head.empty() ? device_of(hidden, "hidden") : device_of(head[0], "head");
  const phi::Place& place = device.place;
  const TensorView hidden_view = view(hidden, "hidden", place);
  check_activation(hidden_view, "hidden");
  check_shape(hidden_view, "hidden", {-1, -1});
  const int64_t hidden_size = hidden_view.shape[1];
  const std::vector<TensorView> head_views = views(head, "head", place);
  const TensorView indices =
      optional_view(logit_indices, "logit_indices", DType::kInt32, {-1}, place);
  const int64_t num_logits = logit_indices ? indices.shape[0] : hidden_view.shape[0];
  paddle::Tensor out = device.empty({num_logits, vocab_size}, DType::kFloat32);
  LogitsParams params;
  params.hidden = hidden_view.data;
  params.norm_weight =
      optional_view(norm_weight, "norm_weight", hidden_view.dtype, {hidden_size}, place).data;
  params.head = head_views.data();
  params.num_head = static_cast<int>(head_views.size());
  params.logit_indices = static_cast<const int32_t*>(indices.data);
  params.logits = out.data<float>();
  params.num_tokens = hidden_view.shape[0];
  params.num_logits = num_logits;
  params.hidden_size = hidden_size;
  params.vocab_size = vocab_size;
  params.epsilon = epsilon;
  params.dtype = hidden_view.dtype;
  params.scheme = scheme_of(scheme);
  params.bias = optional_view(bias, "bias", hidden_view.dtype, {vocab_size}, place).data;
  params.scale = scale;
  params.softcap = softcap;
  if (device.is_cpu()) throw_if_error(cpu::logits(params));
#ifdef REGATTA_WITH_CUDA
  if (!device.is_cpu()) {
    const cuda::ComposedResources resources =
        resources_of(device, params.num_logits, cuda::logits_scratch_bytes(params));
    throw_if_error(cuda::logits(params, resources, launch_on(device)));
  }
#endif
  return {out};
}

std::vector<Shape> infer_shape(const Shape& hidden, const MaybeShape&, const std::vector<Shape>&,
                               const MaybeShape&, const MaybeShape& logit_indices,
                               const std::string&, int64_t vocab_size, float, float, float) {
  return {{logit_indices ? (*logit_indices)[0] : hidden[0], vocab_size}};
}

std::vector<Type> infer_dtype(const Type&, const MaybeType&, const std::vector<Type>&,
                              const MaybeType&, const MaybeType&) {
  return {Type::FLOAT32};
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_logits)
    .Inputs({"hidden", paddle::Optional("norm_weight"), paddle::Vec("head"),
             paddle::Optional("bias"), paddle::Optional("logit_indices")})
    .Outputs({"logits"})
    .Attrs({"scheme: std::string", "vocab_size: int64_t", "epsilon: float", "scale: float",
            "softcap: float"})
    .SetKernelFn(PD_KERNEL(regatta::binding::logits))
    .SetInferShapeFn(PD_INFER_SHAPE(regatta::binding::infer_shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(regatta::binding::infer_dtype));
