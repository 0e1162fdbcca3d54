// regatta_paged_attention(q [T, Hq D], caches..., cu_seqlens_q [B + 1], context_lens [B],
//     block_tables [B, M], max_lens [5], tree_mask? [T, words], slopes? [Hq] float32,
//     prefix_lens? [B], sinks? [Hq] float32)
//     {num_heads, softmax_scale, window, softcap, kv_format} -> out [T, Hq D]
// caches: of one layer, see regatta/kv_format.h.
#include <algorithm>

#include "attention_tensors.h"
#include "cuda_resources.h"

namespace regatta::binding {
namespace {

Tensors paged_attention(const paddle::Tensor& q, const Tensors& caches,
                        const paddle::Tensor& cu_seqlens_q, const paddle::Tensor& context_lens,
                        const paddle::Tensor& block_tables, const paddle::Tensor& max_lens,
                        const MaybeTensor& tree_mask, const MaybeTensor& slopes,
                        const MaybeTensor& prefix_lens, const MaybeTensor& sinks, int64_t num_heads,
                        float softmax_scale, int64_t window, float softcap,
                        const std::string& kv_format) {
  const KvFormat format = kv_format_of(kv_format);
  check_num_caches(caches.size(), format);
  const Device device = device_of(caches[0], "key_cache");
  const phi::Place& place = device.place;
  const TensorView x = view(q, "q", place);
  check_activation(x, "q");
  check_shape(x, "q", {-1, -1});
  throw_if_error(runtime::check_softmax_scale(softmax_scale));
  const TensorView keys = view(caches[0], "key_cache", place);
  check_shape(keys, "key_cache", {-1, -1, -1, -1});
  PagedAttentionParams params;
  params.dtype = x.dtype;
  params.q = x.data;
  params.num_heads = num_heads;
  params.num_kv_heads = keys.shape[1];
  // Two codes to a byte do not tell an odd row.
  const bool halves = kv_format_info(format).code_bits == 4;
  params.head_dim = halves ? x.shape[1] / std::max<int64_t>(num_heads, 1) : keys.shape[3];
  throw_if_error(runtime::check_heads(num_heads, params.num_kv_heads, params.head_dim));
  check_shape(x, "q", {-1, num_heads * params.head_dim});
  params.cache = cache_of(caches, format, x.dtype, params.num_kv_heads, params.head_dim, place);
  TensorView mask;
  if (tree_mask) mask = view(*tree_mask, "tree_mask", place);
  throw_if_error(runtime::batch_of(
      view(cu_seqlens_q, "cu_seqlens_q", place), view(context_lens, "context_lens", place),
      view(block_tables, "block_tables", place), mask, x.shape[0], &params.batch));
  cuda::AttentionLimits limits;
  throw_if_error(runtime::limits_of(view(max_lens, "max_lens"), &limits));
  paddle::Tensor out = device.empty({x.shape[0], x.shape[1]}, x.dtype);
  params.out = out.data();
  params.softmax_scale = softmax_scale;
  params.window = window;
  params.softcap = softcap;
  params.slopes = data_of<float>(slopes, "slopes", {num_heads}, place);
  params.sinks = data_of<float>(sinks, "sinks", {num_heads}, place);
  params.batch.prefix_lens =
      data_of<int32_t>(prefix_lens, "prefix_lens", {params.batch.num_seqs}, place);
  if (params.batch.prefix_lens && (tree_mask || slopes)) {
    fail("prefix_lens goes with no tree_mask and no slopes; leave one out");
  }
  if (device.is_cpu()) throw_if_error(cpu::paged_attention(params));
#ifdef REGATTA_WITH_CUDA
  if (!device.is_cpu()) {
    const cuda::ComposedResources resources =
        resources_of(device, 0, cuda::attention_scratch_bytes(params, limits));
    throw_if_error(cuda::attention(params, limits, resources, launch_on(device)));
  }
#endif
  return {out};
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_paged_attention)
    .Inputs({"q", paddle::Vec("caches"), "cu_seqlens_q", "context_lens", "block_tables", "max_lens",
             paddle::Optional("tree_mask"), paddle::Optional("slopes"),
             paddle::Optional("prefix_lens"), paddle::Optional("sinks")})
    .Outputs({"out"})
    .Attrs({"num_heads: int64_t", "softmax_scale: float", "window: int64_t", "softcap: float",
            "kv_format: std::string"})
    .SetKernelFn(PD_KERNEL(regatta::binding::paged_attention))
    .SetInferShapeFn(regatta::binding::shapes_of<0>)
    .SetInferDtypeFn(regatta::binding::types_of<0>);
