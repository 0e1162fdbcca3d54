// regatta_rope_and_cache_write(qkv [T, (Hq + 2 Hkv) D], positions [T], slot_mapping [T],
//     rope_cache? [P, R], query_rope_cache? [P, R], q_norm? [D], k_norm? [D], caches...,
//     block_positions? [T])
//     {num_heads, num_kv_heads, head_dim, epsilon, plus_one, whole, last, interleaved, kv_format}
//     -> q [T, Hq D], caches in place
// caches: of one layer, see regatta/kv_format.h. With `whole` q_norm is [Hq D], k_norm [Hkv D].
#include "attention_tensors.h"
#include "cuda_resources.h"

namespace regatta::binding {
namespace {

// Paddle itself returns the in-place outputs.
Tensors rope_and_cache_write(const paddle::Tensor& qkv, const paddle::Tensor& positions,
                             const paddle::Tensor& slot_mapping, const MaybeTensor& rope_cache,
                             const MaybeTensor& query_rope_cache, const MaybeTensor& q_norm,
                             const MaybeTensor& k_norm, Tensors& caches,
                             const MaybeTensor& block_positions, int64_t num_heads,
                             int64_t num_kv_heads, int64_t head_dim, float epsilon, bool plus_one,
                             bool whole, bool last, bool interleaved,
                             const std::string& kv_format) {
  const KvFormat format = kv_format_of(kv_format);
  check_num_caches(caches.size(), format);
  throw_if_error(runtime::check_heads(num_heads, num_kv_heads, head_dim));
  const Device device = device_of(caches[0], "key_cache");
  const phi::Place& place = device.place;
  const TensorView x = view(qkv, "qkv", place);
  check_activation(x, "qkv");
  check_shape(x, "qkv", {-1, (num_heads + 2 * num_kv_heads) * head_dim});
  const int64_t num_tokens = x.shape[0];
  paddle::Tensor q = device.empty({num_tokens, num_heads * head_dim}, x.dtype);
  RopeAndCacheWriteParams params;
  params.dtype = x.dtype;
  params.qkv = x.data;
  params.positions = data_of<int32_t>(positions, "positions", {num_tokens}, place);
  params.slot_mapping = data_of<int32_t>(slot_mapping, "slot_mapping", {num_tokens}, place);
  if (rope_cache) {
    const TensorView table =
        checked_view(*rope_cache, "rope_cache", DType::kFloat32, {-1, -1}, place);
    throw_if_error(runtime::set_rope_table(table, head_dim, &params));
    params.query_rope_cache = data_of<float>(query_rope_cache, "query_rope_cache",
                                             {table.shape[0], table.shape[1]}, place);
    params.block_positions =
        data_of<int32_t>(block_positions, "block_positions", {num_tokens}, place);
    if (params.block_positions && (interleaved || 2 * params.rotary_dim > head_dim)) {
      fail("block_positions with rope_cache of shape " + shape_string(table) +
           (interleaved ? ", interleaved" : "") +
           " (allowed: not interleaved, and twice its last " + "dimension at most head_dim, " +
           std::to_string(head_dim) + ")");
    }
  }
  if (last && (whole || params.block_positions)) {
    fail("norms behind the rotation with `whole` or block_positions (allowed: neither)");
  }
  const int64_t q_values = whole ? num_heads * head_dim : head_dim;
  const int64_t k_values = whole ? num_kv_heads * head_dim : head_dim;
  params.q_norm = optional_view(q_norm, "q_norm", x.dtype, {q_values}, place).data;
  params.k_norm = optional_view(k_norm, "k_norm", x.dtype, {k_values}, place).data;
  params.cache = cache_of(caches, format, x.dtype, num_kv_heads, head_dim, place);
  params.q_out = q.data();
  params.num_tokens = num_tokens;
  params.num_heads = num_heads;
  params.num_kv_heads = num_kv_heads;
  params.head_dim = head_dim;
  params.epsilon = epsilon;
  params.plus_one = plus_one;
  params.whole = whole;
  params.last = last;
  params.interleaved = interleaved;
  REGATTA_RUN(rope_and_cache_write, params, device);
  return {q};
}

std::vector<Shape> infer_shape(const Shape& qkv, const Shape&, const Shape&, const MaybeShape&,
                               const MaybeShape&, const MaybeShape&, const MaybeShape&,
                               const std::vector<Shape>& caches, const MaybeShape&,
                               int64_t num_heads, int64_t, int64_t head_dim, float, bool, bool,
                               bool, bool, const std::string&) {
  std::vector<Shape> result = {{qkv[0], num_heads * head_dim}};
  result.insert(result.end(), caches.begin(), caches.end());
  return result;
}

std::vector<Type> infer_dtype(const Type& qkv, const Type&, const Type&, const MaybeType&,
                              const MaybeType&, const MaybeType&, const MaybeType&,
                              const std::vector<Type>& caches, const MaybeType&) {
  std::vector<Type> result = {qkv};
  result.insert(result.end(), caches.begin(), caches.end());
  return result;
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_rope_and_cache_write)
    .Inputs({"qkv", "positions", "slot_mapping", paddle::Optional("rope_cache"),
             paddle::Optional("query_rope_cache"), paddle::Optional("q_norm"),
             paddle::Optional("k_norm"), paddle::Vec("caches"),
             paddle::Optional("block_positions")})
    .Outputs({"q", paddle::Vec("caches_out")})
    .SetInplaceMap({{paddle::Vec("caches"), paddle::Vec("caches_out")}})
    .Attrs({"num_heads: int64_t", "num_kv_heads: int64_t", "head_dim: int64_t", "epsilon: float",
            "plus_one: bool", "whole: bool", "last: bool", "interleaved: bool",
            "kv_format: std::string"})
    .SetKernelFn(PD_KERNEL(regatta::binding::rope_and_cache_write))
    .SetInferShapeFn(PD_INFER_SHAPE(regatta::binding::infer_shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(regatta::binding::infer_dtype));
