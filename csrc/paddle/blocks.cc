// regatta_blocks(hidden [T, H], weights..., caches..., step..., tree_mask? [T, words], rows? [L])
//     {blocks, order} -> hidden_out [T, H], or with rows [L, H], caches in place
//
// Blocks of a decoder, one after the other, in one call. blocks: their records (block_records.h);
// order: which record each block has. weights: block after block, in the record's order
//     norm [H] (and its bias), qkv's tensors, qkv bias?, q norm and k norm?, out's tensors, out
//     bias?, sinks [Hq]?, post norm?, slopes [Hq] of ALiBi, or the rotary table [P, R] and the one
//     of queries?
//     norm, qkv_a's tensors, qkv_a bias?, q_a norm and q_b's tensors?, kv_a norm, of all heads
//     key_up, value_up and key_absorb, out's tensors, out bias?, post norm?, the rotary
//     table
//     norm, gate_up's tensors, gate_up bias?, down's tensors, down bias?, post norm?
//     norm, router [E, H], its bias [E]?, correction [E]?, of E experts gate_up's tensors, gate_up
//     bias?, down's tensors, down bias?; the shared MLP's gate_up's and down's tensors?, its gate
//     [1, H]?, post norm?
// A block with adapters has behind the bias of each linear A and B of all adapters
// (LowRankWeights of regatta/adapters.h); step then ends in adapter_ids [T]
// and adapter_pages [S, kNumAdapted, R], or has neither where no request has an adapter.
// caches: of attention block after attention block, as regatta/kv_format.h has them. step: the
// tensors of predict.nn.inputs.FIELDS. Without attention nothing reads either: both may be empty,
// or hold what a traced program has in place of an empty list. rows: these alone are the output of
// the only attention block, and of what follows it.
//
// A call costs the host about 0.5 us per tensor and 5 us besides, which over two calls per layer is
// several percent of a small model's decode step; behind a step that has pushed Paddle's code and
// its tensors out of the CPU's caches it is three times as much. So `weights` and `caches` may each
// be one tensor of regatta_views().
#include <algorithm>
#include <utility>

#include "adapter_tensors.h"
#include "attention_tensors.h"
#include "block_records.h"
#include "cuda_resources.h"
#include "regatta/embedding.h"

namespace regatta::binding {
namespace {

// Whether a list is one tensor of regatta_views().
bool are_views(const Tensors& tensors) {
  return tensors.size() == 1 && tensors[0].dtype() == paddle::DataType::UINT8;
}

// The tensors of a list as kernels see them.
class Views {
 public:
  Views(const Tensors& tensors, const char* name, const phi::Place& place) : name_(name) {
    if (are_views(tensors)) {
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

  // The next `count` of them.
  const TensorView* take(const char* what, size_t count) {
    if (size_ - next_ < count) {
      fail(std::string(name_) + " holds " + std::to_string(size_) + " tensors, and " + what +
           " is missing");
    }
    next_ += count;
    return data_ + next_ - count;
  }

  void check_all_taken() const {
    if (next_ == size_) return;
    fail(std::string(name_) + " holds " + std::to_string(size_ - next_) +
         " tensors more than the blocks need");
  }

 private:
  const char* name_;
  std::vector<TensorView> own_;
  const TensorView* data_;
  size_t size_, next_ = 0;
};

// Takes a block's tensors off the list of weights.
class Weights {
 public:
  Weights(Views& views, DType dtype, bool on_cpu) : views_(views), dtype_(dtype), on_cpu_(on_cpu) {}

  const void* vector(const char* name, int64_t size, bool is_there = true) {
    if (!is_there) return nullptr;
    const TensorView& view = *views_.take(name, 1);
    check(view, name, dtype_, {size});
    return view.data;
  }

  NormWeights norm(const char* name, const Norm& norm, int64_t size) {
    NormWeights weights;
    weights.weight = vector(name, size, norm.is_there);
    weights.bias = vector(name, size, norm.is_there && norm.bias);
    return weights;
  }

  LinearWeights linear(const char* name, SchemeId scheme, int64_t out_features, bool has_bias) {
    LinearWeights weights;
    weights.tensors = views_.take(name, scheme_info(scheme).num_tensors);
    weights.bias = vector(name, out_features, has_bias);
    return weights;
  }

  // What adapters add to a linear of so many parts.
  LowRankWeights low_rank(const char* name, int64_t parts, int64_t in_features,
                          int64_t out_features, bool is_there) {
    LowRankWeights weights;
    if (!is_there) return weights;
    const TensorView* const pair = views_.take(name, 2);
    weights =
        low_rank_weights(pair[0], pair[1], name, parts, in_features, out_features, dtype_, on_cpu_);
    if (num_pages_ >= 0 && num_pages_ != weights.num_pages) {
      fail(std::string(name) + " has " + std::to_string(weights.num_pages) +
           " pages of adapters, and the linears before it " + std::to_string(num_pages_));
    }
    num_pages_ = weights.num_pages;
    return weights;
  }

  // Of adapters; below 0 without.
  int64_t num_pages() const { return num_pages_; }

  // Of so many experts: all tensors have one more dimension, the first.
  LinearWeights experts(const char* name, SchemeId scheme, int64_t num_experts,
                        int64_t out_features, bool has_bias) {
    LinearWeights weights;
    const int count = scheme_info(scheme).num_tensors;
    weights.tensors = views_.take(name, count);
    for (int i = 0; i < count; ++i) {
      const TensorView& tensor = weights.tensors[i];
      if (tensor.rank >= 2 && tensor.shape[0] == num_experts) continue;
      fail(std::string(name) + " is " + shape_string(tensor) + " (expected: [" +
           std::to_string(num_experts) + ", ...], one for each expert)");
    }
    if (has_bias) weights.bias = matrix(name, {num_experts, out_features}).data;
    return weights;
  }

  // Of heads, [rows, columns] each: packed on the CPU, which checks shapes itself.
  TensorView by_head(const char* name, int64_t num_heads, int64_t rows, int64_t columns) {
    const TensorView& view = *views_.take(name, 1);
    if (!on_cpu_) check(view, name, dtype_, {num_heads, rows, columns});
    if (view.dtype == dtype_ && view.rank >= 3 && view.shape[0] == num_heads) return view;
    fail(std::string(name) + " is " + shape_string(view) + " of " + dtype_name(view.dtype) +
         " (expected: [" + std::to_string(num_heads) + ", ...] of " + dtype_name(dtype_) +
         ", one for each head)");
  }

  HeadMatrices by_heads(const LatentAttentionBlock& block) {
    const int64_t heads = block.num_heads, rank = block.kv_lora_rank;
    HeadMatrices matrices;
    matrices.key_up = by_head("key_up", heads, block.qk_nope_head_dim, rank);
    matrices.value_up = by_head("value_up", heads, block.v_head_dim, rank);
    matrices.key_absorb = by_head("key_absorb", heads, rank, block.qk_nope_head_dim);
    return matrices;
  }

  const TensorView& matrix(const char* name, const std::vector<int64_t>& shape) {
    const TensorView& view = *views_.take(name, 1);
    check(view, name, dtype_, shape);
    return view;
  }

  const TensorView& table(const char* name, const std::vector<int64_t>& shape) {
    const TensorView& view = *views_.take(name, 1);
    check(view, name, DType::kFloat32, shape);
    return view;
  }

 private:
  Views& views_;
  DType dtype_;
  bool on_cpu_;
  int64_t num_pages_ = -1;
};

AttentionBlockParams attention_params(const AttentionBlock& block, int64_t hidden_size, DType dtype,
                                      Weights& weights, Views& caches) {
  AttentionBlockParams p;
  p.block = block;
  p.dtype = dtype;
  p.hidden_size = hidden_size;
  p.norm = weights.norm("norm", block.norm, hidden_size);
  p.qkv = weights.linear("qkv", block.qkv, block.qkv_size(), block.qkv_bias);
  p.qkv.low_rank =
      weights.low_rank("qkv's adapters", 3, hidden_size, block.qkv_size(), block.adapters);
  const bool whole = block.qk_norm_whole;
  p.q_norm = weights.norm("q norm", block.qk_norm, whole ? block.q_size() : block.head_dim);
  p.k_norm = weights.norm("k norm", block.qk_norm, whole ? block.kv_size() : block.head_dim);
  p.out = weights.linear("out", block.out, hidden_size, block.out_bias);
  p.out.low_rank =
      weights.low_rank("out's adapters", 1, block.q_size(), hidden_size, block.adapters);
  if (block.sinks) {
    p.sinks = static_cast<const float*>(weights.table("sinks", {block.num_heads}).data);
  }
  p.post_norm = weights.norm("post norm", block.post_norm, hidden_size);
  if (block.positions.kind == PositionKind::kAlibi) {
    p.slopes = static_cast<const float*>(weights.table("slopes", {block.num_heads}).data);
  } else if (block.positions.kind == PositionKind::kRotary) {
    const TensorView& table = weights.table("rope_cache", {-1, -1});
    set_rope_table(p, table, block.head_dim);
    if (block.positions.query_table >= 0) {
      p.query_rope_cache = static_cast<const float*>(
          weights.table("query_rope_cache", {table.shape[0], table.shape[1]}).data);
    }
  }
  const size_t per_block = num_kv_tensors(block.kv_format, 2);
  p.cache = cache_of(caches.take("a cache", per_block), block.kv_format, dtype, block.num_kv_heads,
                     block.head_dim);
  return p;
}

LatentAttentionBlockParams latent_attention_params(const LatentAttentionBlock& block,
                                                   int64_t hidden_size, DType dtype,
                                                   Weights& weights, Views& caches) {
  LatentAttentionBlockParams p;
  p.block = block;
  p.dtype = dtype;
  p.hidden_size = hidden_size;
  p.norm = weights.norm("norm", block.norm, hidden_size);
  p.qkv_a = weights.linear("qkv_a", block.qkv_a, block.a_size(), block.a_bias);
  p.qkv_a.low_rank =
      weights.low_rank("qkv_a's adapters", 2, hidden_size, block.a_size(), block.adapters);
  p.q_a_norm = weights.norm("q_a norm", block.q_a_norm, block.q_lora_rank);
  if (block.q_lora_rank > 0) {
    p.q_b = weights.linear("q_b", block.q_b, block.q_size(), false);
    p.q_b.low_rank =
        weights.low_rank("q_b's adapters", 1, block.q_lora_rank, block.q_size(), block.adapters);
  }
  p.kv_a_norm = weights.norm("kv_a norm", block.kv_a_norm, block.kv_lora_rank);
  p.kv_b = weights.by_heads(block);
  p.out = weights.linear("out", block.out, hidden_size, block.out_bias);
  p.out.low_rank =
      weights.low_rank("out's adapters", 1, block.mixed_size(), hidden_size, block.adapters);
  p.post_norm = weights.norm("post norm", block.post_norm, hidden_size);
  const TensorView& table = weights.table("rope_cache", {-1, -1});
  set_rope_table(p, table, block.qk_rope_head_dim);
  p.cache = latent_cache_of(caches.take("a cache", num_latent_tensors(block.kv_format)),
                            block.kv_format, dtype, block.kv_lora_rank, block.qk_rope_head_dim);
  return p;
}

MlpBlockParams mlp_params(const MlpBlock& block, int64_t hidden_size, DType dtype,
                          Weights& weights) {
  MlpBlockParams p;
  p.block = block;
  p.dtype = dtype;
  p.hidden_size = hidden_size;
  p.norm = weights.norm("norm", block.norm, hidden_size);
  p.gate_up = weights.linear("gate_up", block.gate_up, block.up_size(), block.up_bias);
  p.gate_up.low_rank = weights.low_rank("gate_up's adapters", block.activation.gated ? 2 : 1,
                                        hidden_size, block.up_size(), block.adapters);
  p.down = weights.linear("down", block.down, hidden_size, block.down_bias);
  p.down.low_rank =
      weights.low_rank("down's adapters", 1, block.intermediate_size, hidden_size, block.adapters);
  p.post_norm = weights.norm("post norm", block.post_norm, hidden_size);
  return p;
}

ExpertBlockParams expert_params(const ExpertBlock& block, int64_t hidden_size, DType dtype,
                                Weights& weights) {
  const Router& router = block.router;
  const int64_t count = router.num_experts;
  const auto terms = [&](const char* name, bool is_there) {
    return is_there ? static_cast<const float*>(weights.table(name, {count}).data) : nullptr;
  };
  ExpertBlockParams p;
  p.block = block;
  p.dtype = dtype;
  p.hidden_size = hidden_size;
  p.norm = weights.norm("norm", block.norm, hidden_size);
  p.router = weights.matrix("router", {count, hidden_size}).data;
  p.router_bias = terms("router_bias", router.bias);
  p.correction = terms("correction", router.correction);
  p.gate_up = weights.experts("gate_up", block.gate_up, count, block.up_size(), block.up_bias);
  p.down = weights.experts("down", block.down, count, hidden_size, block.down_bias);
  if (block.shared_size > 0) {
    p.shared_gate_up =
        weights.linear("shared_gate_up", block.shared_gate_up, block.shared_up_size(), false);
    p.shared_down = weights.linear("shared_down", block.shared_down, hidden_size, false);
    if (block.shared_gate) p.shared_gate = weights.matrix("shared_gate", {1, hidden_size}).data;
  }
  p.post_norm = weights.norm("post norm", block.post_norm, hidden_size);
  return p;
}

// A step's tensors that attention reads; one for all blocks of a call.
struct Step {
  const int32_t* positions = nullptr;
  const int32_t* slot_mapping = nullptr;
  AttentionBatch batch;

  Step() = default;
  Step(const Tensors& step, const MaybeTensor& tree_mask, int64_t num_tokens,
       const phi::Place& place) {
    check_step(step);
    positions = data_of<int32_t>(step[kPositions], "positions", {num_tokens}, place);
    slot_mapping = data_of<int32_t>(step[kSlotMapping], "slot_mapping", {num_tokens}, place);
    batch = batch_of(step[kCuSeqlensQ], step[kContextLens], step[kBlockTables], step[kMaxLens],
                     tree_mask, num_tokens, place);
  }
};

// The blocks' params, with all but their inputs and outputs.
std::vector<BlockParams> params_of(const std::string& text, const std::vector<int>& order,
                                   int64_t hidden_size, DType dtype, Weights& weights,
                                   Views& caches) {
  const std::vector<BlockRecord>& records = block_records(text);
  std::vector<BlockParams> params;
  params.reserve(order.size());
  for (const int index : order) {
    if (index < 0 || index >= static_cast<int>(records.size())) {
      fail("order has " + std::to_string(index) + ", and blocks has " +
           std::to_string(records.size()) + " records (allowed: 0 and more, less than that)");
    }
    const BlockRecord& record = records[index];
    if (const auto* attention = std::get_if<AttentionBlock>(&record)) {
      params.push_back(attention_params(*attention, hidden_size, dtype, weights, caches));
    } else if (const auto* latents = std::get_if<LatentAttentionBlock>(&record)) {
      params.push_back(latent_attention_params(*latents, hidden_size, dtype, weights, caches));
    } else if (const auto* experts = std::get_if<ExpertBlock>(&record)) {
      params.push_back(expert_params(*experts, hidden_size, dtype, weights));
    } else {
      params.push_back(mlp_params(std::get<MlpBlock>(record), hidden_size, dtype, weights));
    }
  }
  return params;
}

// fn(params of an attention of either kind), which is called for no other block. Whether it was.
template <class Params, class Fn>
bool with_attention(Params& params, Fn&& fn) {
  if (auto* attention = std::get_if<AttentionBlockParams>(&params)) {
    fn(*attention);
    return true;
  }
  auto* latents = std::get_if<LatentAttentionBlockParams>(&params);
  if (latents != nullptr) fn(*latents);
  return latents != nullptr;
}

bool is_attention(const BlockParams& params) {
  return with_attention(params, [](const auto&) {});
}

Status run_attention(const AttentionBlockParams& params) { return cpu::attention_block(params); }
Status run_attention(const LatentAttentionBlockParams& params) {
  return cpu::latent_attention_block(params);
}

// out [L, width] = the rows `ids` of x [num_rows, width].
void take_rows(const TensorView& ids, const void* x, int64_t num_rows, int64_t width, DType dtype,
               void* out) {
  EmbeddingParams p = {};
  p.token_ids = static_cast<const int32_t*>(ids.data);
  p.weight = x;
  p.out = out;
  p.num_tokens = ids.shape[0];
  p.vocab_size = num_rows;
  p.hidden_size = width;
  p.dtype = dtype;
  throw_if_error(cpu::embedding(p));
}

bool narrows(const AttentionBlockParams& params) { return cpu::narrows(params); }
bool narrows(const LatentAttentionBlockParams&) { return false; }

// An attention of either kind, and of its rows those that are wanted.
template <class Params>
void attention_on_cpu(Params& params, const TensorView& wanted, int64_t width) {
  if (params.rows == nullptr || narrows(params)) return throw_if_error(run_attention(params));
  const int64_t num_tokens = params.batch.num_tokens;
  paddle::Tensor all = empty({num_tokens, width}, params.dtype);
  void* const out = std::exchange(params.hidden_out, all.data());
  params.rows = nullptr;
  throw_if_error(run_attention(params));
  take_rows(wanted, all.data(), num_tokens, width, params.dtype, out);
}

void run_on_cpu(std::vector<BlockParams>& params, const TensorView& wanted, int64_t width,
                DType dtype) {
  std::vector<int32_t> wanted_ids;  // of the wanted rows' adapters
  for (BlockParams& block : params) {
    if (with_attention(block, [&](auto& p) { attention_on_cpu(p, wanted, width); })) continue;
    if (auto* experts = std::get_if<ExpertBlockParams>(&block)) {
      throw_if_error(cpu::expert_block(*experts));
    } else {
      auto& mlp = std::get<MlpBlockParams>(block);
      paddle::Tensor before;
      if (mlp.before_rows != nullptr && mlp.block.parallel) {
        before = empty({wanted.shape[0], width}, dtype);
        take_rows(wanted, mlp.before, mlp.num_before, width, dtype, before.data());
        mlp.before = before.data();
      }
      if (mlp.adapters.ids != nullptr && wanted.data != nullptr) {
        wanted_ids.resize(mlp.num_tokens);
        const auto* const rows = static_cast<const int32_t*>(wanted.data);
        for (int64_t i = 0; i < mlp.num_tokens; ++i) wanted_ids[i] = mlp.adapters.ids[rows[i]];
        mlp.adapters.ids = wanted_ids.data();
      }
      throw_if_error(cpu::mlp_block(mlp));
    }
  }
}

// Three pieces of memory take turns between blocks: what a block read stays for a parallel one
// behind it.
class Turns {
 public:
  Turns(const Device& device, int64_t num_rows, int64_t width, DType dtype, size_t num_blocks,
        const paddle::Tensor& out)
      : left_(num_blocks) {
    pieces_[0] = out;
    for (size_t i = 1; i < std::min<size_t>(num_blocks, 3); ++i) {
      pieces_[i] = device.empty({num_rows, width}, dtype);
    }
  }

  // Where the next block writes; the last one to `out`.
  void* next() { return pieces_[--left_ % 3].data(); }

 private:
  paddle::Tensor pieces_[3];
  size_t left_;
};

void check_rows(const std::vector<BlockParams>& params) {
  const auto count = std::count_if(params.begin(), params.end(), is_attention);
  if (count == 1 && is_attention(params[0])) return;
  fail("with rows the blocks have " + std::to_string(count) + " attention blocks among " +
       std::to_string(params.size()) + " (allowed: one, which is the first)");
}

#ifdef REGATTA_WITH_CUDA
void check_kind(cuda::StepRows kind, int64_t num_rows, int64_t num_tokens, int64_t num_seqs) {
  const bool last = kind == cuda::StepRows::kLast;
  if (kind == cuda::StepRows::kListed || num_rows == (last ? num_seqs : num_tokens)) return;
  fail("rows has " + std::to_string(num_rows) + " entries, which max_lens calls " +
       (last ? "the last token of each of " + std::to_string(num_seqs) + " requests"
             : "all of " + std::to_string(num_tokens) + " tokens"));
}
#endif

Tensors blocks(const paddle::Tensor& hidden, const Tensors& weights, Tensors& caches,
               const Tensors& step, const MaybeTensor& tree_mask, const MaybeTensor& rows,
               const std::string& text, const std::vector<int>& order) {
  if (weights.empty()) fail("weights is empty (allowed: those of one block and more)");
  const Device device = device_of(hidden, "hidden");  // lists may be views
  if (!are_views(weights)) check_device(hidden, "hidden", device_of(weights[0], "weights"));
  const phi::Place& place = device.place;
  const TensorView x = view(hidden, "hidden", place);
  check_activation(x, "hidden");
  check_shape(x, "hidden", {-1, -1});
  const DType dtype = x.dtype;
  const int64_t num_tokens = x.shape[0], width = x.shape[1];
  Views weight_views(weights, "weights", place), cache_views(caches, "caches", place);
  Weights list(weight_views, dtype, device.is_cpu());
  std::vector<BlockParams> params = params_of(text, order, width, dtype, list, cache_views);
  weight_views.check_all_taken();
  Step inputs;
  if (std::any_of(params.begin(), params.end(), is_attention)) {
    cache_views.check_all_taken();
    inputs = Step(step, tree_mask, num_tokens, place);
  }
  AdapterRows adapters;
  if (list.num_pages() >= 0 && step.size() >= kNumStepFields + 2) {
    adapters =
        adapter_rows(step[kAdapterIds], step[kAdapterPages], list.num_pages(), num_tokens, device);
  }
  TensorView wanted;
  if (rows) {
    check_rows(params);
    wanted = checked_view(*rows, "rows", DType::kInt32, {-1}, place);
  }
  const int64_t num_rows = rows ? wanted.shape[0] : num_tokens;
  paddle::Tensor out = device.empty({num_rows, width}, dtype);
  Turns turns(device, std::max(num_rows, num_tokens), width, dtype, params.size(), out);
  const void *input = x.data, *before = nullptr;
  for (BlockParams& block : params) {
    void* const output = turns.next();
    const auto set_attention = [&](auto& attention) {
      attention.positions = inputs.positions;
      attention.slot_mapping = inputs.slot_mapping;
      attention.batch = inputs.batch;
      attention.adapters = adapters;
      attention.hidden = input;
      attention.hidden_out = output;
      attention.rows = static_cast<const int32_t*>(wanted.data);
      attention.num_rows = num_rows;
    };
    const bool is_set = with_attention(block, set_attention);
    if (auto* experts = std::get_if<ExpertBlockParams>(&block)) {
      experts->num_tokens = num_rows;
      experts->hidden = input;
      experts->out = output;
    } else if (!is_set) {
      auto& mlp = std::get<MlpBlockParams>(block);
      mlp.num_tokens = num_rows;
      mlp.hidden = input;
      mlp.before = before;
      mlp.before_rows = before == x.data ? static_cast<const int32_t*>(wanted.data) : nullptr;
      mlp.num_before = num_tokens;
      mlp.adapters = adapters;
      mlp.out = output;
    }
    before = std::exchange(input, output);
  }
  if (device.is_cpu()) {
    run_on_cpu(params, wanted, width, dtype);
  }
#ifdef REGATTA_WITH_CUDA
  if (!device.is_cpu()) {
    cuda::AttentionLimits limits;
    if (inputs.positions != nullptr) limits = limits_of(step[kMaxLens]);
    if (rows) check_kind(limits.rows, num_rows, num_tokens, inputs.batch.num_seqs);
    const int64_t most_rows = std::max(num_tokens, limits.num_long_tokens);  // of a product
    const auto resources = [&](int64_t bytes) { return resources_of(device, most_rows, bytes); };
    throw_if_error(cuda::blocks(params, limits, resources, launch_on(device)));
  }
#endif
  return {out};
}

// order is of ints: Paddle takes a list of int64_t here for the shape of one more input.
std::vector<Shape> infer_shape(const Shape& hidden, const std::vector<Shape>&,
                               const std::vector<Shape>& caches, const std::vector<Shape>&,
                               const MaybeShape&, const MaybeShape& rows, const std::string&,
                               const std::vector<int>&) {
  std::vector<Shape> result = {rows ? Shape{(*rows)[0], hidden[1]} : hidden};
  result.insert(result.end(), caches.begin(), caches.end());
  return result;
}

std::vector<Type> infer_dtype(const Type& hidden, const std::vector<Type>&,
                              const std::vector<Type>& caches, const std::vector<Type>&,
                              const MaybeType&, const MaybeType&) {
  std::vector<Type> result = {hidden};
  result.insert(result.end(), caches.begin(), caches.end());
  return result;
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_blocks)
    .Inputs({"hidden", paddle::Vec("weights"), paddle::Vec("caches"), paddle::Vec("step"),
             paddle::Optional("tree_mask"), paddle::Optional("rows")})
    .Outputs({"hidden_out", paddle::Vec("caches_out")})
    .SetInplaceMap({{paddle::Vec("caches"), paddle::Vec("caches_out")}})
    .Attrs({"blocks: std::string", "order: std::vector<int>"})
    .SetKernelFn(PD_KERNEL(regatta::binding::blocks))
    .SetInferShapeFn(PD_INFER_SHAPE(regatta::binding::infer_shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(regatta::binding::infer_dtype));
