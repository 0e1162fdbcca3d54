// The composed operators of regatta/cuda_ops.h: the CPU's. Whenever one runs, it packs the weights
// for them, which lie in memory as a GPU stores them.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "blocks/attention/block.h"
#include "blocks/delta_net/block.h"
#include "blocks/experts/block.h"
#include "blocks/latent_attention/block.h"
#include "blocks/mlp/block.h"
#include "blocks/short_conv/block.h"
#include "cpu/thread_pool.h"
#include "launch.h"
#include "regatta/abi.h"
#include "regatta/linear.h"
#include "regatta/logits.h"
#include "regatta/pack_quantized.h"
#include "runtime/kinds.h"
#include "weights.h"

namespace regatta::cuda {
namespace {

using cpu::Scratch;

// A linear of an operator's params, which point to host memory of the caller.
struct Stored {
  LinearWeights& weights;
  SchemeId& scheme;
  int64_t in_features, out_features;
  int64_t num_parts = 1;        // of adapters
  int64_t num_experts = 0;      // 0: it is a single matrix
  NormWeights* norm = nullptr;  // of the norm ahead, if it may be folded into the weight

  int num_tensors() const { return scheme_info(scheme).num_tensors; }
};

// `num_experts` matrices [out, in] as pack_dense leaves them on a CPU; 0: one alone.
TensorView pack_matrices(const void* from, DType dtype, int64_t num_experts, int64_t out_features,
                         int64_t in_features) {
  constexpr int64_t kPanel = 32;
  const bool pairs = dtype == DType::kBFloat16;
  const int64_t count = std::max<int64_t>(num_experts, 1);
  const int64_t panels = ceil_div(out_features, kPanel);
  TensorView view;
  view.dtype = dtype;
  const auto add = [&](int64_t size) { view.shape[view.rank++] = size; };
  if (num_experts > 0) add(num_experts);
  add(panels);
  add(pairs ? ceil_div(in_features, 2) : in_features);
  add(kPanel);
  if (pairs) add(2);
  const int64_t size = dtype_size(dtype), stride = out_features * in_features * size;
  const int64_t bytes = panels * kPanel * (pairs ? round_up(in_features, 2) : in_features) * size;
  char* const packed = Scratch::mine().take<char>(count * bytes);
  view.data = packed;
  for (int64_t i = 0; i < count; ++i) {
    check(cpu::pack_dense({static_cast<const char*>(from) + i * stride, packed + i * bytes,
                           in_features, out_features, true, dtype, dtype}));
  }
  return view;
}

// The codes and scales of a GPU's weight: of `expert`, if there are more.
PackedWeight codes_of(const Stored& linear, int64_t expert) {
  const TensorView* const tensors = linear.weights.tensors;
  const int64_t size = linear.out_features * linear.in_features;
  const auto* const rows = static_cast<const float*>(tensors[1].data);
  PackedWeight weight;
  if (is_packed(scheme_info(linear.scheme).operands)) {
    const int64_t bytes = packed_weight_bytes(linear.out_features, linear.in_features,
                                              scheme_info(linear.scheme).operands, 0);
    weight = unpack(static_cast<const char*>(tensors[0].data) + expert * bytes, linear.out_features,
                    linear.in_features);
  } else {
    weight.codes = static_cast<const int8_t*>(tensors[0].data) + expert * size;
  }
  if (weight.num_groups > 0) return weight;
  weight.num_groups = 1;
  weight.scale = rows + expert * linear.out_features;
  return weight;
}

// Codes and scales as pack_quantized leaves them on a CPU -> views[0], views[1].
void pack_codes(const Stored& linear, TensorView* views) {
  const int64_t count = std::max<int64_t>(linear.num_experts, 1);
  std::vector<PackQuantizedParams> experts(count);
  bool has_zeros = false;
  for (int64_t i = 0; i < count; ++i) {
    const PackedWeight weight = codes_of(linear, i);
    PackQuantizedParams& p = experts[i];
    p.scheme = linear.scheme;
    p.codes = weight.codes;
    p.scale = weight.scale;
    p.zero = weight.zero;
    p.layout.in_features = linear.in_features;
    p.layout.out_features = linear.out_features;
    p.layout.num_groups = weight.num_groups;
    if (!check(cpu::plan_pack_quantized(p, &p.layout))) return;
    has_zeros = has_zeros || p.layout.has_zeros;
  }
  QuantizedLayout layout = experts[0].layout;
  layout.has_zeros = has_zeros;
  const int64_t bytes = layout.num_panels() * layout.panel_bytes();
  const int64_t num_scales = layout.num_panels() * layout.panel_scales();
  auto* const packed = Scratch::mine().take<uint8_t>(count * bytes);
  auto* const scales = Scratch::mine().take<float>(count * num_scales);
  for (int64_t i = 0; i < count; ++i) {
    experts[i].layout = layout;
    experts[i].packed = packed + i * bytes;
    experts[i].scales = scales + i * num_scales;
    check(cpu::pack_quantized(experts[i]));
  }
  int64_t shapes[2][4];
  layout.packed_shape(shapes[0]);
  layout.scales_shape(shapes[1]);
  views[0] = {packed, DType::kUInt8, 4};
  views[1] = {scales, DType::kFloat32, layout.rank_of_scales()};
  for (int which = 0; which < 2; ++which) {
    TensorView& view = views[which];
    const int leading = linear.num_experts > 0;
    std::copy_n(shapes[which], view.rank, view.shape + leading);
    if (leading) view.shape[0] = count;
    view.rank += leading;
  }
}

// [count, kPageRanks, width] with columns in groups, zeros behind the last.
template <class T>
const void* in_groups(const void* from, int64_t count, int64_t width, int64_t group) {
  const int64_t groups = ceil_div(width, group);
  T* const to = Scratch::mine().take<T>(count * kPageRanks * groups * group);
  std::fill_n(to, count * kPageRanks * groups * group, T());
  for (int64_t i = 0; i < count * kPageRanks * width; ++i) {
    const int64_t row = i / width, column = i % width, which = row / kPageRanks;
    const int64_t at = ((which * groups + column / group) * kPageRanks + row % kPageRanks) * group;
    to[at + column % group] = static_cast<const T*>(from)[i];
  }
  return to;
}

void pack_low_rank(const Stored& linear, DType dtype) {
  LowRankWeights& pages = linear.weights.low_rank;
  if (pages.a == nullptr) return;
  check(cpu::with_dtype(dtype, [&](auto like) {
    using T = decltype(like);
    pages.a =
        in_groups<T>(pages.a, pages.num_pages * linear.num_parts, linear.in_features, kPackedIn);
    pages.b = in_groups<T>(pages.b, pages.num_pages, linear.out_features, kPackedOut);
    return Status();
  }));
}

const void* ones(int64_t count, DType dtype) {
  void* const values = Scratch::mine().take<float>(count);
  write(Floats(count, 1.f), dtype, values);
  return values;
}

// Makes of a GPU's weights the CPU's. What is made lives in the thread's scratch.
void pack(const Stored& linear, DType dtype) {
  const SchemeInfo& info = scheme_info(linear.scheme);
  if (info.operands == GemmOperands::kFp8) {
    check(Status::error("the fake GPU has no products of e4m3"));
    return;
  }
  auto* const views = Scratch::mine().take<TensorView>(info.num_tensors);
  std::copy_n(linear.weights.tensors, info.num_tensors, views);
  if (info.operands == GemmOperands::kDense) {
    views[0] = pack_matrices(views[0].data, dtype, linear.num_experts, linear.out_features,
                             linear.in_features);
  } else {
    pack_codes(linear, views);
  }
  linear.weights.tensors = views;
  pack_low_rank(linear, dtype);
  if (linear.scheme != SchemeId::kDenseFolded) return;
  linear.scheme = SchemeId::kDense;
  if (linear.norm != nullptr) linear.norm->weight = ones(linear.in_features, dtype);
}

// fn(Stored) of each linear.
template <class Fn>
void for_linears(AttentionBlockParams& p, Fn&& fn) {
  AttentionBlock& b = p.block;
  fn(Stored{p.qkv, b.qkv, p.hidden_size, b.made_size(), 3, 0, &p.norm});
  fn(Stored{p.out, b.out, b.q_size(), p.hidden_size});
}

template <class Fn>
void for_linears(LatentAttentionBlockParams& p, Fn&& fn) {
  LatentAttentionBlock& b = p.block;
  fn(Stored{p.qkv_a, b.qkv_a, p.hidden_size, b.a_size(), 2, 0, &p.norm});
  if (b.q_lora_rank > 0) fn(Stored{p.q_b, b.q_b, b.q_lora_rank, b.q_size()});
  fn(Stored{p.out, b.out, b.mixed_size(), p.hidden_size});
}

template <class Fn>
void for_linears(MlpBlockParams& p, Fn&& fn) {
  MlpBlock& b = p.block;
  const int64_t parts = b.activation.gated ? 2 : 1;
  fn(Stored{p.gate_up, b.gate_up, p.hidden_size, b.up_size(), parts, 0, &p.norm});
  fn(Stored{p.down, b.down, b.intermediate_size, p.hidden_size});
}

template <class Fn>
void for_linears(ExpertBlockParams& p, Fn&& fn) {
  ExpertBlock& b = p.block;
  const int64_t count = b.router.num_experts;
  fn(Stored{p.gate_up, b.gate_up, p.hidden_size, b.up_size(), 1, count});
  fn(Stored{p.down, b.down, b.intermediate_size, p.hidden_size, 1, count});
  if (b.shared_size == 0) return;
  fn(Stored{p.shared_gate_up, b.shared_gate_up, p.hidden_size, b.shared_up_size()});
  fn(Stored{p.shared_down, b.shared_down, b.shared_size, p.hidden_size});
}

template <class Fn>
void for_linears(DeltaNetBlockParams& p, Fn&& fn) {
  DeltaNetBlock& b = p.block;
  const int64_t values = b.value_size();
  fn(Stored{p.qkvz, b.qkvz, p.hidden_size, b.conv_size() + values, b.second_size(values) ? 2 : 1});
  fn(Stored{p.ba, b.ba, p.hidden_size, b.gate_size(), b.second_size(b.second_gates()) ? 2 : 1});
  fn(Stored{p.out, b.out, b.value_size(), p.hidden_size});
}

template <class Fn>
void for_linears(ShortConvBlockParams& p, Fn&& fn) {
  ShortConvFields& b = p.block;
  fn(Stored{p.bcx, b.bcx, p.hidden_size, 3 * b.size});
  fn(Stored{p.out, b.out, b.size, p.hidden_size});
}

// fn(params) of the block's kind.
template <class Fn>
void with_kind(BlockParams& params, Fn&& fn) {
  const std::string kind = params.kind->name;
  if (kind == "attention") return fn(static_cast<AttentionBlockParams&>(params));
  if (kind == "latent_attention") return fn(static_cast<LatentAttentionBlockParams&>(params));
  if (kind == "delta_net") return fn(static_cast<DeltaNetBlockParams&>(params));
  if (kind == "short_conv") return fn(static_cast<ShortConvBlockParams&>(params));
  if (kind == "mlp") return fn(static_cast<MlpBlockParams&>(params));
  if (kind == "experts") return fn(static_cast<ExpertBlockParams&>(params));
  check(Status::error("the fake GPU has no blocks of kind " + kind));
}

// A block's params of any kind, and of the views that they point to, in the order of for_linears().
class Copy {
 public:
  explicit Copy(const BlockParams& params)
      : room_(params.kind->params_bytes / sizeof(std::max_align_t) + 1) {
    std::memcpy(room_.data(), &params, params.kind->params_bytes);
    with_kind(this->params(), [&](auto& p) {
      for_linears(p, [&](const Stored& linear) {
        const TensorView* const first = linear.weights.tensors;
        views_.emplace_back(first, first + linear.num_tensors());
      });
    });
  }

  BlockParams& params() { return *reinterpret_cast<BlockParams*>(room_.data()); }
  const std::vector<std::vector<TensorView>>& views() const { return views_; }

 private:
  std::vector<std::max_align_t> room_;
  std::vector<std::vector<TensorView>> views_;
};

// Whether lengths are those that the call was launched for.
bool check_limits(const AttentionBatch& batch, const AttentionLimits& limits) {
  for (int64_t b = 0; b < batch.num_seqs; ++b) {
    const int64_t span = batch.cu_seqlens_q[b + 1] - batch.cu_seqlens_q[b];
    if (span <= limits.max_query_len && batch.context_lens[b] <= limits.max_context_len) continue;
    return check(Status::error(
        "attention: request " + std::to_string(b) + " has " + std::to_string(span) +
        " tokens in a context of " + std::to_string(batch.context_lens[b]) + ", launched for " +
        std::to_string(limits.max_query_len) + " and " + std::to_string(limits.max_context_len)));
  }
  return true;
}

Status compute(AttentionBlockParams& p) { return cpu::attention_block(p); }

Status compute(LatentAttentionBlockParams& p) {
  for (TensorView* stacked : {&p.kv_b.key_up, &p.kv_b.value_up, &p.kv_b.key_absorb}) {
    const int64_t* const shape = stacked->shape;
    *stacked = pack_matrices(stacked->data, p.dtype, shape[0], shape[1], shape[2]);
  }
  return cpu::latent_attention_block(p);
}

Status compute(DeltaNetBlockParams& p) { return p.kind->run(p); }
Status compute(ShortConvBlockParams& p) { return p.kind->run(p); }

// Of a block that reads the step; where some rows are wanted, of all rows these.
template <class Reader>
void run(Reader& p, const AttentionLimits& limits) {
  if (!check_limits(p.batch, limits)) return;
  const int32_t* const rows = std::exchange(p.rows, nullptr);
  void* const out = p.hidden_out;
  if (rows != nullptr) {
    p.hidden_out = Scratch::mine().take<char>(p.num_tokens * p.hidden_size * dtype_size(p.dtype));
  }
  const bool done = check(compute(p));
  if (!done || rows == nullptr) return;
  gather({rows, p.hidden_out, out, p.num_rows, p.num_tokens, p.hidden_size, p.dtype});
}

void run(MlpBlockParams& p, const AttentionLimits&) {
  if (p.block.parallel && p.before_rows != nullptr) {
    void* const some =
        Scratch::mine().take<char>(p.num_tokens * p.hidden_size * dtype_size(p.dtype));
    gather({p.before_rows, p.before, some, p.num_tokens, p.num_before, p.hidden_size, p.dtype});
    p.before = some;
  }
  if (p.adapters.ids != nullptr && p.rows != nullptr) {
    auto* const ids = Scratch::mine().take<int32_t>(p.num_tokens);
    for (int64_t i = 0; i < p.num_tokens; ++i) ids[i] = p.adapters.ids[p.rows[i]];
    p.adapters.ids = ids;
  }
  check(cpu::mlp_block(p));
}

void run(ExpertBlockParams& p, const AttentionLimits&) { check(cpu::expert_block(p)); }

}  // namespace

Status blocks(const std::vector<BlockParams*>& params, const AttentionLimits& limits,
              const ResourcesFor&, const Launch& on) {
  std::vector<Copy> copies;
  for (const BlockParams* block : params) copies.emplace_back(*block);
  return queue(on.stream, "blocks", [copies, limits] {
    for (Copy block : copies) {
      Scratch::Scope scope(Scratch::mine());
      with_kind(block.params(), [&](auto& p) {
        size_t next = 0;
        for_linears(p, [&](const Stored& linear) {
          linear.weights.tensors = block.views()[next++].data();
          pack(linear, p.dtype);
        });
        run(p, limits);
      });
    }
  });
}

int64_t attention_scratch_bytes(const PagedAttentionParams&, const AttentionLimits&) { return 0; }

Status attention(const PagedAttentionParams& params, const AttentionLimits& limits,
                 const ComposedResources&, const Launch& on) {
  return queue(on.stream, "paged_attention", [params, limits] {
    if (check_limits(params.batch, limits)) check(cpu::paged_attention(params));
  });
}

int64_t linear_scratch_bytes(const LinearParams&) { return 0; }

Status linear(const LinearParams& params, const ComposedResources&, const Launch& on) {
  const std::vector<TensorView> views(params.weight, params.weight + params.num_weights);
  return queue(on.stream, "linear", [p = params, views]() mutable {
    Scratch::Scope scope(Scratch::mine());
    LinearParams own = p;
    LinearWeights weights = {views.data(), own.bias, own.low_rank};
    const auto parts =
        std::count_if(own.part_sizes, own.part_sizes + 3, [](int64_t size) { return size > 0; });
    pack({weights, own.scheme, own.in_features, own.out_features, parts}, own.dtype);
    own.weight = weights.tensors;
    own.low_rank = weights.low_rank;
    check(cpu::linear(own));
  });
}

int64_t logits_scratch_bytes(const LogitsParams&) { return 0; }

Status logits(const LogitsParams& params, const ComposedResources&, const Launch& on) {
  const std::vector<TensorView> views(params.head, params.head + params.num_head);
  return queue(on.stream, "logits", [p = params, views] {
    Scratch::Scope scope(Scratch::mine());
    LogitsParams own = p;
    LinearWeights head = {views.data()};
    pack({head, own.scheme, own.hidden_size, own.vocab_size}, own.dtype);
    own.head = head.tensors;
    if (own.logit_indices != nullptr) {
      // Unlike the CPU's, those of padding may be any.
      void* const rows =
          Scratch::mine().take<char>(own.num_logits * own.hidden_size * dtype_size(own.dtype));
      gather({own.logit_indices, own.hidden, rows, own.num_logits, own.num_tokens, own.hidden_size,
              own.dtype});
      own.hidden = rows;
      own.logit_indices = nullptr;
      own.num_tokens = own.num_logits;
    }
    check(cpu::logits(own));
  });
}

}  // namespace regatta::cuda

// No row's result depends on the others here.
REGATTA_EXPORT int regatta_set_batch_invariant(int on) {
  const bool before = regatta::cuda::is_batch_invariant;
  regatta::cuda::is_batch_invariant = on != 0;
  return before;
}
