// regatta_logits(hidden [T, H], norm_weight? [H], head..., bias? [V], logit_indices? [L])
//                {scheme, vocab_size, epsilon, scale, softcap} -> logits [L, V] float32; of all
//                rows without indices
#include "cuda_resources.h"
#include "runtime/operators.h"

namespace regatta::binding {
namespace {

Tensors logits(const paddle::Tensor& hidden, const MaybeTensor& norm_weight, const Tensors& head,
               const MaybeTensor& bias, const MaybeTensor& logit_indices, const std::string& scheme,
               int64_t vocab_size, float epsilon, float scale, float softcap) {
  const Device device = head.empty() ? device_of(hidden, "hidden") : device_of(head[0], "head");
  const phi::Place& place = device.place;
  const std::vector<TensorView> stored = views(head, "head", place);
  LogitsParams params = {};
  params.vocab_size = vocab_size;
  params.epsilon = epsilon;
  params.scheme = scheme_of(scheme);
  params.scale = scale;
  params.softcap = softcap;
  throw_if_error(runtime::logits({view(hidden, "hidden", place),
                                  view(norm_weight, "norm_weight", place),
                                  {stored.data(), stored.size()},
                                  view(bias, "bias", place),
                                  view(logit_indices, "logit_indices", place)},
                                 &params));
  paddle::Tensor out = device.empty({params.num_logits, vocab_size}, DType::kFloat32);
  params.logits = out.data<float>();
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
