// regatta_decoder_layers(hidden [T, H], weights..., caches..., rope_cache [P, R], positions [T],
//     slot_mapping [T], cu_seqlens_q [B + 1], context_lens [B], block_tables [B, M], max_lens [2],
//     tree_mask? [T, words])
//     {scheme, num_heads, num_kv_heads, head_dim, intermediate_size, epsilon, softmax_scale,
//      windows, tensors_per_linear, qkv_bias, qk_norm, out_bias, mlp_bias, kv_format}
//     -> hidden_out [T, H], caches in place
//
// All layers in one call: attention block, then MLP block, of layer after layer. A call costs the
// host about 0.5 us per tensor and 5 us besides, which over two calls per layer is several percent
// of a small model's decode step; behind a step that has pushed Paddle's code and its tensors out
// of the CPU's caches it is three times as much. So `weights` and `caches` may each be one tensor,
//
// regatta_views(tensors...) -> views uint8 [N, sizeof(TensorView)]
//
// which says where those tensors lie. It keeps none of them: they have to outlive it.
//
// weights: layer after layer
//     norm [H], qkv x n, qkv bias?, q norm [D] and k norm [D]?, out x n, out bias?,
//     mlp norm [H], gate_up x n, gate_up bias?, down x n, down bias?
// with n = tensors_per_linear; those with "?" are there when their flag says so. `scheme` is one
// for all linears, or "qkv's,out's,gate_up's,down's": then n is what each of these takes. caches:
// of layer after layer, as regatta/kv_format.h has them.
#include <algorithm>
#include <cstring>
#include <utility>

#include "attention_tensors.h"
#include "cuda_resources.h"
#include "regatta/mlp_block.h"

namespace regatta::binding {
namespace {

// The tensors of a list as kernels see them.
class Views {
 public:
  Views(const std::vector<paddle::Tensor>& tensors, const char* name, const phi::Place& place) {
    if (tensors.size() == 1) {
      const TensorView list = checked_view(tensors[0], name, DType::kUInt8,
                                           {-1, static_cast<int64_t>(sizeof(TensorView))});
      data_ = static_cast<const TensorView*>(list.data);
      size_ = static_cast<size_t>(list.shape[0]);
    } else {
      own_ = views(tensors, name, place);
      data_ = own_.data();
      size_ = own_.size();
    }
  }
  Views(const Views&) = delete;
  Views& operator=(const Views&) = delete;
  const TensorView* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  std::vector<TensorView> own_;
  const TensorView* data_;
  size_t size_;
};

// Takes tensors off the list of weights, one after another.
class Weights {
 public:
  Weights(const Views& views, DType dtype) : views_(views), dtype_(dtype) {}

  // A vector of `size` elements of the activations' dtype; null when it is not there.
  const void* vector(const char* name, int64_t size, bool there = true) {
    if (!there) return nullptr;
    const TensorView& view = *take(name, 1);
    check(view, name, dtype_, {size});
    return view.data;
  }

  const TensorView* linear(const char* name, int64_t num_tensors) {
    return take(name, static_cast<size_t>(num_tensors));
  }

  size_t num_left() const { return views_.size() - next_; }

 private:
  const TensorView* take(const char* name, size_t count) {
    if (num_left() < count) {
      fail("weights holds " + std::to_string(views_.size()) + " tensors, and " + name +
           " is missing");
    }
    next_ += count;
    return views_.data() + next_ - count;
  }

  const Views& views_;
  DType dtype_;
  size_t next_ = 0;
};

// Tensors of a linear, by its scheme (predict/schemes).
int64_t num_scheme_tensors(const std::string& scheme) {
  static const std::pair<const char*, int64_t> kCounts[] = {
      {"dense", 1}, {"weight_only_int8", 4}, {"weight_only_int4", 4}, {"w4a8", 4},
      {"a8w8", 5},  {"a8w8_fp8", 3}};
  std::string known;
  for (const auto& [name, count] : kCounts) {
    if (scheme == name) return count;
    known += (known.empty() ? "" : ", ") + std::string(name);
  }
  fail("scheme '" + scheme + "' is not known (known: " + known + ")");
}

// The schemes of a layer's linears: in the order qkv, out, gate_up, down.
struct LayerSchemes {
  std::string attention, mlp;  // as the blocks take them
  int64_t num_tensors[4];
};

LayerSchemes layer_schemes(const std::string& scheme, int64_t tensors_per_linear) {
  std::vector<std::string> names;
  for (size_t begin = 0; begin <= scheme.size();) {
    const size_t end = std::min(scheme.find(',', begin), scheme.size());
    names.push_back(scheme.substr(begin, end - begin));
    begin = end + 1;
  }
  const int64_t n = tensors_per_linear;
  if (names.size() == 1) return {scheme, scheme, {n, n, n, n}};
  if (names.size() != 4) {
    fail("scheme '" + scheme + "' has " + std::to_string(names.size()) +
         " names (allowed: one for all linears, or those of qkv,out,gate_up,down)");
  }
  LayerSchemes result = {names[0] + "," + names[1], names[2] + "," + names[3], {}};
  for (int i = 0; i < 4; ++i) result.num_tensors[i] = num_scheme_tensors(names[i]);
  return result;
}

std::vector<paddle::Tensor> decoder_layers(
    const paddle::Tensor& hidden, const std::vector<paddle::Tensor>& weights,
    std::vector<paddle::Tensor>& caches, const paddle::Tensor& rope_cache,
    const paddle::Tensor& positions, const paddle::Tensor& slot_mapping,
    const paddle::Tensor& cu_seqlens_q, const paddle::Tensor& context_lens,
    const paddle::Tensor& block_tables, const paddle::Tensor& max_lens,
    const paddle::optional<paddle::Tensor>& tree_mask, const std::string& scheme, int64_t num_heads,
    int64_t num_kv_heads, int64_t head_dim, int64_t intermediate_size, float epsilon,
    float softmax_scale, const std::vector<int>& windows, int64_t tensors_per_linear, bool qkv_bias,
    bool qk_norm, bool out_bias, bool mlp_bias, const std::string& kv_format) {
  check_heads({num_heads, num_kv_heads, head_dim});
  check_softmax_scale(softmax_scale);
  const Device device = device_of(rope_cache, "rope_cache");
  const phi::Place& place = device.place;
  const TensorView x = view(hidden, "hidden", place);
  check_activation(x, "hidden");
  check_shape(x, "hidden", {-1, -1});
  const KvFormat format = kv_format_of(kv_format);
  const Views cache_views(caches, "caches", place);
  check_num_caches(cache_views.size(), windows.size(), format);
  const DType dtype = x.dtype;
  const int64_t num_tokens = x.shape[0], hidden_size = x.shape[1];
  const TensorView table = rope_table(rope_cache, head_dim, place);

  const LayerSchemes schemes = layer_schemes(scheme, tensors_per_linear);
  AttentionBlockParams attention;
  attention.dtype = dtype;
  attention.scheme = schemes.attention;
  attention.positions = static_cast<const int32_t*>(
      checked_view(positions, "positions", DType::kInt32, {num_tokens}, place).data);
  attention.slot_mapping = static_cast<const int32_t*>(
      checked_view(slot_mapping, "slot_mapping", DType::kInt32, {num_tokens}, place).data);
  attention.rope_cache = static_cast<const float*>(table.data);
  attention.batch =
      batch_of(cu_seqlens_q, context_lens, block_tables, max_lens, tree_mask, num_tokens, place);
  attention.hidden_size = hidden_size;
  attention.num_heads = num_heads;
  attention.num_kv_heads = num_kv_heads;
  attention.head_dim = head_dim;
  attention.rotary_dim = table.shape[1];
  attention.num_positions = table.shape[0];
  attention.epsilon = epsilon;
  attention.softmax_scale = softmax_scale;

  MlpBlockParams mlp;
  mlp.num_tokens = num_tokens;
  mlp.hidden_size = hidden_size;
  mlp.intermediate_size = intermediate_size;
  mlp.epsilon = epsilon;
  mlp.dtype = dtype;
  mlp.scheme = schemes.mlp;

  paddle::Tensor hidden_out = device.empty({num_tokens, hidden_size}, dtype);
  // hidden -> middle -> hidden_out -> middle -> hidden_out ...
  paddle::Tensor middle = device.empty({num_tokens, hidden_size}, dtype);
  const void* input = x.data;
  const Views weight_views(weights, "weights", place);
  Weights list(weight_views, dtype);
#ifdef REGATTA_WITH_CUDA
  cuda::AttentionLimits limits;
  CudaResources cuda_resources;
#endif
  const void* norm_weight = windows.empty() ? nullptr : list.vector("norm", hidden_size);
  for (size_t layer = 0; layer < windows.size(); ++layer) {
    attention.hidden = input;
    attention.norm_weight = norm_weight;
    attention.qkv = list.linear("qkv", schemes.num_tensors[0]);
    attention.num_qkv = static_cast<int>(schemes.num_tensors[0]);
    attention.qkv_bias =
        list.vector("qkv bias", (num_heads + 2 * num_kv_heads) * head_dim, qkv_bias);
    attention.q_norm = list.vector("q norm", head_dim, qk_norm);
    attention.k_norm = list.vector("k norm", head_dim, qk_norm);
    attention.out = list.linear("out", schemes.num_tensors[1]);
    attention.num_out = static_cast<int>(schemes.num_tensors[1]);
    attention.out_bias = list.vector("out bias", hidden_size, out_bias);
    attention.cache = cache_of(cache_views.data() + layer * kv_tensors_per_layer(format), format,
                               dtype, num_kv_heads, head_dim);
    attention.window = windows[layer];
    attention.hidden_out = middle.data();
    if (device.is_cpu()) throw_if_error(cpu::attention_block(attention));

    mlp.hidden = middle.data();
    mlp.norm_weight = list.vector("mlp norm", hidden_size);
    mlp.gate_up = list.linear("gate_up", schemes.num_tensors[2]);
    mlp.num_gate_up = static_cast<int>(schemes.num_tensors[2]);
    mlp.gate_up_bias = list.vector("gate_up bias", 2 * intermediate_size, mlp_bias);
    mlp.down = list.linear("down", schemes.num_tensors[3]);
    mlp.num_down = static_cast<int>(schemes.num_tensors[3]);
    mlp.down_bias = list.vector("down bias", hidden_size, mlp_bias);
    mlp.out = hidden_out.data();
    const bool is_last = layer + 1 == windows.size();
    norm_weight = is_last ? nullptr : list.vector("norm", hidden_size);
    if (device.is_cpu()) throw_if_error(cpu::mlp_block(mlp));
#ifdef REGATTA_WITH_CUDA
    if (!device.is_cpu()) {
      if (layer == 0) {
        limits = limits_of(max_lens);
        cuda_resources =
            resources_of(device, num_tokens, cuda::layers_scratch_bytes(attention, mlp, limits));
        throw_if_error(
            cuda::begin_layers(attention, mlp, limits, cuda_resources.composed, launch_on(device)));
      }
      throw_if_error(cuda::layer(attention, mlp, limits, layer == 0, norm_weight,
                                 cuda_resources.composed, launch_on(device)));
    }
#endif
    input = hidden_out.data();
  }
  if (list.num_left() != 0) {
    fail("weights holds " + std::to_string(list.num_left()) + " tensors more than " +
         std::to_string(windows.size()) + " layers need");
  }
  return {hidden_out};
}

std::vector<paddle::Tensor> views_tensor(const std::vector<paddle::Tensor>& tensors) {
  if (tensors.empty()) fail("tensors is empty (allowed: one and more)");
  const std::vector<TensorView> list = views(tensors, "tensors", tensors[0].place());
  const int64_t row = sizeof(TensorView);
  paddle::Tensor out = empty({static_cast<int64_t>(list.size()), row}, DType::kUInt8);
  std::memcpy(out.data(), list.data(), list.size() * sizeof(TensorView));
  return {out};
}

std::vector<std::vector<int64_t>> views_shape(const std::vector<std::vector<int64_t>>& tensors) {
  return {{static_cast<int64_t>(tensors.size()), static_cast<int64_t>(sizeof(TensorView))}};
}

std::vector<paddle::DataType> views_dtype(const std::vector<paddle::DataType>&) {
  return {paddle::DataType::UINT8};
}

// windows are ints: Paddle takes a list of int64_t here for the shape of one more input.
using Shape = std::vector<int64_t>;

std::vector<Shape> infer_shape(const Shape& hidden, const std::vector<Shape>&,
                               const std::vector<Shape>& caches, const Shape&, const Shape&,
                               const Shape&, const Shape&, const Shape&, const Shape&, const Shape&,
                               const paddle::optional<Shape>&, const std::string&, int64_t, int64_t,
                               int64_t, int64_t, float, float, const std::vector<int>&, int64_t,
                               bool, bool, bool, bool, const std::string&) {
  std::vector<Shape> result = {hidden};
  result.insert(result.end(), caches.begin(), caches.end());
  return result;
}

using Type = paddle::DataType;

std::vector<Type> infer_dtype(const Type& hidden, const std::vector<Type>&,
                              const std::vector<Type>& caches, const Type&, const Type&,
                              const Type&, const Type&, const Type&, const Type&, const Type&,
                              const paddle::optional<Type>&) {
  std::vector<Type> result = {hidden};
  result.insert(result.end(), caches.begin(), caches.end());
  return result;
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_decoder_layers)
    .Inputs({"hidden", paddle::Vec("weights"), paddle::Vec("caches"), "rope_cache", "positions",
             "slot_mapping", "cu_seqlens_q", "context_lens", "block_tables", "max_lens",
             paddle::Optional("tree_mask")})
    .Outputs({"hidden_out", paddle::Vec("caches_out")})
    .SetInplaceMap({{paddle::Vec("caches"), paddle::Vec("caches_out")}})
    .Attrs({"scheme: std::string", "num_heads: int64_t", "num_kv_heads: int64_t",
            "head_dim: int64_t", "intermediate_size: int64_t", "epsilon: float",
            "softmax_scale: float", "windows: std::vector<int>", "tensors_per_linear: int64_t",
            "qkv_bias: bool", "qk_norm: bool", "out_bias: bool", "mlp_bias: bool",
            "kv_format: std::string"})
    .SetKernelFn(PD_KERNEL(regatta::binding::decoder_layers))
    .SetInferShapeFn(PD_INFER_SHAPE(regatta::binding::infer_shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(regatta::binding::infer_dtype));

PD_BUILD_OP(regatta_views)
    .Inputs({paddle::Vec("tensors")})
    .Outputs({"views"})
    .SetKernelFn(PD_KERNEL(regatta::binding::views_tensor))
    .SetInferShapeFn(PD_INFER_SHAPE(regatta::binding::views_shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(regatta::binding::views_dtype));
