// regatta_paged_attention(q [T, Hq D], key_cache, value_cache, cu_seqlens_q [B + 1],
//     context_lens [B], block_tables [B, M], max_lens [2]) {num_heads, softmax_scale, window}
//     -> out [T, Hq D]
#include "attention_tensors.h"
#include "cuda_resources.h"

namespace regatta::binding {
namespace {

std::vector<paddle::Tensor> paged_attention(
    const paddle::Tensor& q, const paddle::Tensor& key_cache, const paddle::Tensor& value_cache,
    const paddle::Tensor& cu_seqlens_q, const paddle::Tensor& context_lens,
    const paddle::Tensor& block_tables, const paddle::Tensor& max_lens, int64_t num_heads,
    float softmax_scale, int64_t window) {
  const Device device = device_of(key_cache, "key_cache");
  const phi::Place& place = device.place;
  const TensorView x = view(q, "q", place);
  check_activation(x, "q");
  check_softmax_scale(softmax_scale);
  PagedAttentionParams params;
  params.dtype = x.dtype;
  params.q = x.data;
  params.cache = cache_of(key_cache, value_cache, x.dtype, -1, -1, place);
  params.num_heads = num_heads;
  params.num_kv_heads = key_cache.dims()[1];
  params.head_dim = key_cache.dims()[3];
  check_heads({num_heads, params.num_kv_heads, params.head_dim});
  check_shape(x, "q", {-1, num_heads * params.head_dim});
  params.batch =
      batch_of(cu_seqlens_q, context_lens, block_tables, max_lens, x.shape[0], place);
  paddle::Tensor out = device.empty({x.shape[0], x.shape[1]}, x.dtype);
  params.out = out.data();
  params.softmax_scale = softmax_scale;
  params.window = window;
  if (device.is_cpu()) throw_if_error(cpu::paged_attention(params));
#ifdef REGATTA_WITH_CUDA
  if (!device.is_cpu()) {
    const cuda::AttentionLimits limits = limits_of(max_lens);
    const CudaResources resources =
        resources_of(device, 0, cuda::attention_scratch_bytes(params, limits));
    throw_if_error(cuda::attention(params, limits, resources.composed, launch_on(device)));
  }
#endif
  return {out};
}

using Shape = std::vector<int64_t>;

std::vector<Shape> infer_shape(const Shape& q, const Shape&, const Shape&, const Shape&,
                               const Shape&, const Shape&, const Shape&, int64_t, float, int64_t) {
  return {q};
}

using Type = paddle::DataType;

std::vector<Type> infer_dtype(const Type& q, const Type&, const Type&, const Type&, const Type&,
                              const Type&, const Type&) {
  return {q};
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_paged_attention)
    .Inputs({"q", "key_cache", "value_cache", "cu_seqlens_q", "context_lens", "block_tables",
             "max_lens"})
    .Outputs({"out"})
    .Attrs({"num_heads: int64_t", "softmax_scale: float", "window: int64_t"})
    .SetKernelFn(PD_KERNEL(regatta::binding::paged_attention))
    .SetInferShapeFn(PD_INFER_SHAPE(regatta::binding::infer_shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(regatta::binding::infer_dtype));
