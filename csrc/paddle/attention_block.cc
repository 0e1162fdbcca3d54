// regatta_attention_block(hidden [T, H], norm_weight [H], qkv..., qkv_bias? [(Hq + 2 Hkv) D],
//     q_norm? [D], k_norm? [D], out..., out_bias? [H], caches..., rope_cache [P, R],
//     positions [T], slot_mapping [T], cu_seqlens_q [B + 1], context_lens [B],
//     block_tables [B, M], max_lens [2], tree_mask? [T, words], rows? [L])
//     {scheme, num_heads, num_kv_heads, head_dim, epsilon, softmax_scale, window, kv_format}
//     -> hidden_out [T, H], or with rows [L, H], caches in place
// caches: of this layer, see regatta/kv_format.h.
#include "attention_tensors.h"
#include "cuda_resources.h"

namespace regatta::binding {
namespace {

// Paddle itself returns the in-place outputs.
std::vector<paddle::Tensor> attention_block(
    const paddle::Tensor& hidden, const paddle::Tensor& norm_weight,
    const std::vector<paddle::Tensor>& qkv, const paddle::optional<paddle::Tensor>& qkv_bias,
    const paddle::optional<paddle::Tensor>& q_norm, const paddle::optional<paddle::Tensor>& k_norm,
    const std::vector<paddle::Tensor>& out, const paddle::optional<paddle::Tensor>& out_bias,
    std::vector<paddle::Tensor>& caches, const paddle::Tensor& rope_cache,
    const paddle::Tensor& positions, const paddle::Tensor& slot_mapping,
    const paddle::Tensor& cu_seqlens_q, const paddle::Tensor& context_lens,
    const paddle::Tensor& block_tables, const paddle::Tensor& max_lens,
    const paddle::optional<paddle::Tensor>& tree_mask, const paddle::optional<paddle::Tensor>& rows,
    const std::string& scheme, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
    float epsilon, float softmax_scale, int64_t window, const std::string& kv_format) {
  const KvFormat format = kv_format_of(kv_format);
  check_num_caches(caches.size(), 1, format);
  check_heads({num_heads, num_kv_heads, head_dim});
  check_softmax_scale(softmax_scale);
  const Device device = device_of(norm_weight, "norm_weight");
  const phi::Place& place = device.place;
  const TensorView x = view(hidden, "hidden", place);
  check_activation(x, "hidden");
  check_shape(x, "hidden", {-1, -1});
  const DType dtype = x.dtype;
  const int64_t num_tokens = x.shape[0], hidden_size = x.shape[1];
  const std::vector<TensorView> qkv_views = views(qkv, "qkv", place);
  const std::vector<TensorView> out_views = views(out, "out", place);
  const TensorView table = rope_table(rope_cache, head_dim, place);
  AttentionBlockParams params;
  params.dtype = dtype;
  params.hidden = x.data;
  params.norm_weight = checked_view(norm_weight, "norm_weight", dtype, {hidden_size}, place).data;
  params.scheme = scheme;
  params.qkv = qkv_views.data();
  params.num_qkv = static_cast<int>(qkv_views.size());
  params.qkv_bias =
      optional_view(qkv_bias, "qkv_bias", dtype, {(num_heads + 2 * num_kv_heads) * head_dim}, place)
          .data;
  params.q_norm = optional_view(q_norm, "q_norm", dtype, {head_dim}, place).data;
  params.k_norm = optional_view(k_norm, "k_norm", dtype, {head_dim}, place).data;
  params.out = out_views.data();
  params.num_out = static_cast<int>(out_views.size());
  params.out_bias = optional_view(out_bias, "out_bias", dtype, {hidden_size}, place).data;
  params.cache =
      cache_of(views(caches, "caches", place).data(), format, dtype, num_kv_heads, head_dim);
  params.positions = static_cast<const int32_t*>(
      checked_view(positions, "positions", DType::kInt32, {num_tokens}, place).data);
  params.slot_mapping = static_cast<const int32_t*>(
      checked_view(slot_mapping, "slot_mapping", DType::kInt32, {num_tokens}, place).data);
  params.rope_cache = static_cast<const float*>(table.data);
  params.batch =
      batch_of(cu_seqlens_q, context_lens, block_tables, max_lens, tree_mask, num_tokens, place);
  int64_t num_rows = num_tokens;
  if (rows) {
    if (device.is_cpu()) throw_if_error(Status::error("attention_block: rows is for GPUs"));
    const TensorView wanted = checked_view(*rows, "rows", DType::kInt32, {-1}, place);
    num_rows = params.num_rows = wanted.shape[0];
    params.rows = static_cast<const int32_t*>(wanted.data);
  }
  paddle::Tensor hidden_out = device.empty({num_rows, hidden_size}, dtype);
  params.hidden_out = hidden_out.data();
  params.hidden_size = hidden_size;
  params.num_heads = num_heads;
  params.num_kv_heads = num_kv_heads;
  params.head_dim = head_dim;
  params.rotary_dim = table.shape[1];
  params.num_positions = table.shape[0];
  params.epsilon = epsilon;
  params.softmax_scale = softmax_scale;
  params.window = window;
  if (device.is_cpu()) throw_if_error(cpu::attention_block(params));
#ifdef REGATTA_WITH_CUDA
  if (!device.is_cpu()) {
    const cuda::AttentionLimits limits = limits_of(max_lens);
    const CudaResources resources =
        resources_of(device, num_tokens, cuda::attention_block_scratch_bytes(params, limits));
    throw_if_error(cuda::attention_block(params, limits, resources.composed, launch_on(device)));
  }
#endif
  return {hidden_out};
}

using Shape = std::vector<int64_t>;
using MaybeShape = paddle::optional<Shape>;

std::vector<Shape> infer_shape(const Shape& hidden, const Shape&, const std::vector<Shape>&,
                               const MaybeShape&, const MaybeShape&, const MaybeShape&,
                               const std::vector<Shape>&, const MaybeShape&,
                               const std::vector<Shape>& caches, const Shape&, const Shape&,
                               const Shape&, const Shape&, const Shape&, const Shape&, const Shape&,
                               const MaybeShape&, const MaybeShape& rows, const std::string&,
                               int64_t, int64_t, int64_t, float, float, int64_t,
                               const std::string&) {
  std::vector<Shape> result = {rows ? Shape{(*rows)[0], hidden[1]} : hidden};
  result.insert(result.end(), caches.begin(), caches.end());
  return result;
}

using Type = paddle::DataType;
using MaybeType = paddle::optional<Type>;

std::vector<Type> infer_dtype(const Type& hidden, const Type&, const std::vector<Type>&,
                              const MaybeType&, const MaybeType&, const MaybeType&,
                              const std::vector<Type>&, const MaybeType&,
                              const std::vector<Type>& caches, const Type&, const Type&,
                              const Type&, const Type&, const Type&, const Type&, const Type&,
                              const MaybeType&, const MaybeType&) {
  std::vector<Type> result = {hidden};
  result.insert(result.end(), caches.begin(), caches.end());
  return result;
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_attention_block)
    .Inputs({"hidden", "norm_weight", paddle::Vec("qkv"), paddle::Optional("qkv_bias"),
             paddle::Optional("q_norm"), paddle::Optional("k_norm"), paddle::Vec("out"),
             paddle::Optional("out_bias"), paddle::Vec("caches"), "rope_cache", "positions",
             "slot_mapping", "cu_seqlens_q", "context_lens", "block_tables", "max_lens",
             paddle::Optional("tree_mask"), paddle::Optional("rows")})
    .Outputs({"hidden_out", paddle::Vec("caches_out")})
    .SetInplaceMap({{paddle::Vec("caches"), paddle::Vec("caches_out")}})
    .Attrs({"scheme: std::string", "num_heads: int64_t", "num_kv_heads: int64_t",
            "head_dim: int64_t", "epsilon: float", "softmax_scale: float", "window: int64_t",
            "kv_format: std::string"})
    .SetKernelFn(PD_KERNEL(regatta::binding::attention_block))
    .SetInferShapeFn(PD_INFER_SHAPE(regatta::binding::infer_shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(regatta::binding::infer_dtype));
