// A decoder's blocks (regatta/blocks.h) as sequences of the kernels beside this file. Host code.
//
// A decode step of a layer in Llama's form, bf16 or fp16 with folded norms, is five launches: qkv
// product, attention with rotary embedding and cache write, out product, gate and up product, down
// product. Folded norms are factors of rows: products leave sums of squares, the next one takes
// them. What passes from a block to the next is chosen from both records (Handed). What adapters
// add to a product is its residual, made by two launches ahead of it; to the first product of an
// MLP a launch behind it adds it, and applies the function. All but the first launch of a call may
// overlap the end of the one ahead (PDL, common.cuh).
#include <algorithm>
#include <initializer_list>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "cuda/adapters/adding.h"
#include "cuda/attention/latent/expanded.h"
#include "cuda/attention/latent/latent.h"
#include "cuda/experts/experts.h"
#include "cuda/norm/sum_norm.h"
#include "cuda/product.h"
#include "regatta/blocks.h"

namespace regatta::cuda {
namespace {

// From so many rows on, rows are normed ahead of a product whose weight has the norm's folded in:
// cuBLASLt neither leaves sums of squares nor takes them.
constexpr int64_t kRowsNormedAhead = 129;

// Up to so many rows a router's logits are made beside the norm, in as few blocks as there are
// multiprocessors.
constexpr int64_t kRowsRouted = 24;

// From so many rows on both are by tensor cores, where those take them.
constexpr int64_t kRowsOfStep = 3;

// Keys and values of so many bytes are made of latents at a time, of as many heads as that allows.
// On the host, predict/loading/memory.py has room for as much.
constexpr int64_t kMaxExpandedBytes = int64_t{256} << 20;

bool norms_ahead(int64_t rows) { return is_batch_invariant || rows >= kRowsNormedAhead; }

// Sums of squares of a row, of so many rows in all.
int64_t sumsq_per_row(int64_t width, int64_t rows) {
  return ceil_div(width, gemm_sumsq_columns(rows));
}

bool is_folded(SchemeId scheme) { return scheme == SchemeId::kDenseFolded; }

// Whether a linear takes its rows' norm as a factor of each row, x being times the norm's weight
// already, and leaves the same for the next.
bool carries_norm(SchemeId scheme, DType dtype, int64_t rows) {
  const GemmOperands operands = operands_of(scheme);
  return (operands == GemmOperands::kWeightInt8 || operands == GemmOperands::kWeightInt4) &&
         gemm_packed_scales_out(dtype, rows);
}

// Whether both products around attention are launches of one block per multiprocessor, which takes
// about half of its shared memory (packed_weight.cuh).
bool packed_by_halves(const AttentionBlock& block, int64_t rows) {
  return rows <= kRowsWithoutScratch && is_packed(block.qkv) && is_packed(block.out);
}

// Whether every product makes the function itself.
bool is_gates_silu(const Activation& activation) {
  return activation.gated && activation.function == Function::kSilu;
}

// What every block has, whatever its kind.
struct BlockView {
  const Norm& norm;
  const Norm& post_norm;
  Placement post_norm_of;
  const Residual& residual;
  const NormWeights& norm_weights;
  const NormWeights& post_weights;
  SchemeId first, last;  // of its products
  bool parallel;
  int64_t num_rows;         // of its first product
  bool of_experts = false;  // whose parts are summed behind the last product

  // Whether its last product's epilogue makes its output.
  bool ends_in_product() const {
    return !of_experts && !post_norm.is_there && residual.is_plain_sum();
  }
};

template <class Params>
BlockView view_of(const Params& p, SchemeId first, SchemeId last, int64_t num_rows,
                  bool parallel = false, bool of_experts = false) {
  const auto& b = p.block;
  return {b.norm, b.post_norm, b.post_norm_of, b.residual, p.norm,    p.post_norm,
          first,  last,        parallel,       num_rows,   of_experts};
}

BlockView view_of(const AttentionBlockParams& a) {
  return view_of(a, a.block.qkv, a.block.out, a.batch.num_tokens);
}
BlockView view_of(const LatentAttentionBlockParams& l) {
  return view_of(l, l.block.qkv_a, l.block.out, l.batch.num_tokens);
}
BlockView view_of(const MlpBlockParams& m) {
  return view_of(m, m.block.gate_up, m.block.down, m.num_tokens, m.block.parallel);
}
BlockView view_of(const ExpertBlockParams& e) {
  return view_of(e, e.block.gate_up, e.block.down, e.num_tokens, false, true);
}
BlockView view_of(const BlockParams& params) {
  return std::visit([](const auto& block) { return view_of(block); }, params);
}

PagedAttentionParams paged_attention_params(const AttentionBlockParams& p) {
  const AttentionBlock& block = p.block;
  PagedAttentionParams a;
  a.dtype = p.dtype;
  a.cache = p.cache;
  a.batch = p.batch;
  a.num_heads = block.num_heads;
  a.num_kv_heads = block.num_kv_heads;
  a.head_dim = block.head_dim;
  a.softmax_scale = block.softmax_scale;
  a.window = block.window;
  a.softcap = block.softcap;
  a.slopes = p.slopes;
  a.sinks = p.sinks;
  return a;
}

LatentAttentionParams latent_attention_params(const LatentAttentionBlockParams& l) {
  LatentAttentionParams a;
  a.dtype = l.dtype;
  a.cache = l.cache.key;
  a.tail = l.cache.tail;
  a.scales = l.cache.key_scale;
  a.num_blocks = l.cache.num_blocks;
  a.block_size = l.cache.block_size;
  a.batch = l.batch;
  a.num_heads = l.block.num_heads;
  a.latent_rank = l.block.kv_lora_rank;
  a.rope_size = l.block.qk_rope_head_dim;
  a.softmax_scale = l.block.softmax_scale;
  return a;
}

LatentSizes latent_sizes(const LatentAttentionBlock& block) {
  return {block.kv_lora_rank, block.qk_rope_head_dim, block.qk_nope_head_dim, block.v_head_dim};
}

// The spans that a block of latent attention expands in a step: the long ones, or none. The form
// "expanded" is as "cheaper" here: expanding short spans costs more.
struct Expansion {
  int64_t rows = 0;      // tokens of their contexts; 0: nothing
  int64_t heads = 0;     // at a time
  bool is_all = false;   // no other span is there
  AttentionLimits rest;  // of the spans that are absorbed

  static Expansion of(const LatentAttentionBlockParams& l, const AttentionLimits& limits) {
    const LatentAttentionBlock& block = l.block;
    Expansion none;
    none.rest = limits;
    if (is_batch_invariant || block.form == LatentForm::kAbsorbed || limits.num_long_tokens == 0 ||
        limits.max_short_len >= limits.max_query_len || l.batch.tree_mask != nullptr ||
        !expands_latents(latent_sizes(block), l.dtype)) {
      return none;
    }
    const int64_t row_bytes = limits.num_long_tokens * dtype_size(l.dtype);
    const int64_t left = kMaxExpandedBytes - row_bytes * block.latent_size();
    const int64_t most = left / (row_bytes * (block.qk_nope_head_dim + block.v_head_dim));
    if (left < 0 || most == 0) return none;  // contexts without end
    Expansion made;
    made.rows = limits.num_long_tokens;
    made.heads = ceil_div(block.num_heads, ceil_div(block.num_heads, most));
    made.is_all = limits.max_short_len == 0;
    made.rest = {std::max<int64_t>(limits.max_short_len, 1), limits.max_context_len};
    return made;
  }
};

// Attention's workspace; blocks of one shape share one (paged_attention_workspace_bytes()).
struct AttentionSpace {
  AttentionBlock shape;
  void* memory = nullptr;
  int64_t bytes = 0, zeroed_bytes = 0;

  bool serves(const AttentionBlock& block) const {
    return shape.num_heads == block.num_heads && shape.num_kv_heads == block.num_kv_heads &&
           shape.head_dim == block.head_dim && shape.kv_format == block.kv_format;
  }
};

// Device memory for the values of the block that needs most of them.
template <class T>
class Buffer {
 public:
  void need(int64_t count) { count_ = std::max(count_, count); }
  void take(Arena& arena, int64_t value_bytes) {
    if (count_ > 0) data_ = static_cast<T*>(arena.take(count_ * value_bytes));
  }
  T* data() const { return data_; }
  operator T*() const { return data_; }  // where a kernel takes it

 private:
  T* data_ = nullptr;
  int64_t count_ = 0;
};
using Values = Buffer<void>;  // of the activations' dtype
using Floats = Buffer<float>;
using Words = Buffer<int32_t>;

// Of expert blocks; P rows of tokens and their experts.
struct ExpertScratch {
  Values sorted;       // [P, H], then the experts' outputs
  Values inner;        // [P, I], or of a single token [S + K I]
  Values functions;    // [P, 2 I], ahead of a function that is a launch of its own
  Values shared;       // [T, H]
  Floats logits;       // [T, E]
  Floats shared_gate;  // [T]
  Floats shares;       // [T, K]
  Words ids;           // [T, K]
  Words places;        // [T, K]
  Words ends;          // [E]
  Words counts;        // sort_counts()
};

// Of latent attention; head-major tensors are [Hq, T, ...].
struct LatentScratch {
  Values made;       // [T, a_size()] by the first product
  Values q_normed;   // [T, q_lora_rank]
  Values q;          // [T, q_size()]
  Values q_nope;     // [Hq, T, N]
  Values q_rope;     // [Hq, T, R]
  Values q_latent;   // [Hq, T, L]
  Values mixed;      // [Hq, T, L]
  Values values;     // [Hq, T, V]
  Words ends;        // [Hq]
  Values workspace;  // bytes
  // Of long spans, S and Hg as in expanded.h.
  Values latents;             // [S, L]
  Values rope;                // [S, R]
  Values keys;                // [S, Hg, N]
  Values expanded;            // [S, Hg, V]: values
  Words first_rows;           // [B]
  Values expanded_workspace;  // bytes
};

struct BlocksScratch {
  Values normed;     // [T, H]
  Values qkv;        // [T, (Hq + 2 Hkv) D]
  Values q;          // [T, Hq D]
  Values mixed;      // [T, Hq D]
  Values inner;      // [T, I]
  Values functions;  // [T, I or 2 I], ahead of a function that is a launch of its own
  Values made;       // [T, H], by a last product that does not make the output
  Values some;       // [T, H], where some rows are the output
  Floats sumsq;      // [T, sumsq_per_row()]
  ExpertScratch experts;
  LatentScratch latent;
  AddingScratch adding;
  Words wanted_ids;  // [L] the adapters of the rows that are the output
  std::vector<AttentionSpace> attention;
  ProductScratch product;

  BlocksScratch(const std::vector<BlockParams>& blocks, const AttentionLimits& limits) {
    for (const BlockParams& params : blocks) {
      std::visit([&](const auto& block) { add(block, limits); }, params);
    }
  }

  // Lays everything into the scratch; the bytes that it takes. Without scratch it only counts.
  int64_t place(const ComposedResources& resources) {
    Arena arena(resources.scratch);
    for (AttentionSpace& space : attention) space.memory = arena.take(space.bytes);
    LatentScratch& l = latent;
    for (Values* values : {&normed,
                           &qkv,
                           &q,
                           &mixed,
                           &inner,
                           &functions,
                           &made,
                           &some,
                           &experts.sorted,
                           &experts.inner,
                           &experts.functions,
                           &experts.shared,
                           &l.made,
                           &l.q_normed,
                           &l.q,
                           &l.q_nope,
                           &l.q_rope,
                           &l.q_latent,
                           &l.mixed,
                           &l.values,
                           &l.latents,
                           &l.rope,
                           &l.keys,
                           &l.expanded}) {
      values->take(arena, dtype_size(dtype_));
    }
    for (Floats* floats : {&sumsq, &experts.logits, &experts.shared_gate, &experts.shares}) {
      floats->take(arena, 4);
    }
    for (Words* words : {&experts.ids, &experts.places, &experts.ends, &experts.counts, &l.ends,
                         &l.first_rows, &wanted_ids}) {
      words->take(arena, 4);
    }
    for (Values* bytes : {&l.workspace, &l.expanded_workspace}) bytes->take(arena, 1);
    adding.take(arena, dtype_);
    product.take(arena, resources.blas);
    return arena.used();
  }

  const AttentionSpace& space_of(const AttentionBlock& block) const {
    return *std::find_if(attention.begin(), attention.end(),
                         [&](const AttentionSpace& space) { return space.serves(block); });
  }

 private:
  DType dtype_ = DType::kFloat32;

  void add_rows(int64_t rows, int64_t hidden_size, DType dtype) {
    dtype_ = dtype;
    normed.need(rows * hidden_size);
    sumsq.need(rows * sumsq_per_row(hidden_size, rows));
  }

  template <class Block>
  void add_ending(const Block& block, int64_t values) {
    if (block.post_norm.is_there || !block.residual.is_plain_sum()) made.need(values);
  }

  // Of a linear of these rows; see AddingScratch::count().
  void add_adapters(const AdapterRows& rows, int64_t num_rows, int64_t in_features, int64_t parts,
                    int64_t residual) {
    if (rows.ids == nullptr) return;
    adding.count(rows, num_rows, in_features, parts, residual);
    wanted_ids.need(num_rows);
  }

  void add(const AttentionBlockParams& a, const AttentionLimits& limits) {
    const AttentionBlock& block = a.block;
    const int64_t rows = a.batch.num_tokens;
    add_rows(rows, a.hidden_size, a.dtype);
    qkv.need(rows * block.qkv_size());
    q.need(rows * block.q_size());
    mixed.need(rows * block.q_size());
    if (a.rows != nullptr) some.need(rows * a.hidden_size);
    add_ending(block, rows * a.hidden_size);
    product.count(block.qkv, a.dtype, rows, a.hidden_size, block.qkv_size(), false,
                  !norms_ahead(rows));
    product.count(block.out, a.dtype, rows, block.q_size(), a.hidden_size);
    add_adapters(a.adapters, rows, a.hidden_size, 3, block.qkv_size());
    add_adapters(a.adapters, rows, block.q_size(), 1, a.hidden_size);
    const bool known =
        std::any_of(attention.begin(), attention.end(),
                    [&](const AttentionSpace& space) { return space.serves(block); });
    if (known) return;
    const PagedAttentionParams attended = paged_attention_params(a);
    AttentionSpace space;
    space.shape = block;
    space.bytes = paged_attention_workspace_bytes(attended, limits);
    space.zeroed_bytes = paged_attention_zeroed_bytes(attended, limits);
    attention.push_back(space);
  }

  void add(const LatentAttentionBlockParams& l, const AttentionLimits& limits) {
    const LatentAttentionBlock& block = l.block;
    const Expansion expansion = Expansion::of(l, limits);
    const int64_t rows = l.batch.num_tokens, pairs = rows * block.num_heads;
    add_rows(rows, l.hidden_size, l.dtype);
    latent.made.need(rows * block.a_size());
    latent.q_nope.need(pairs * block.qk_nope_head_dim);
    latent.q_rope.need(pairs * block.qk_rope_head_dim);
    latent.ends.need(block.num_heads);
    mixed.need(rows * block.mixed_size());
    if (!expansion.is_all) add_absorbed(l, expansion.rest);
    if (expansion.rows > 0) add_expanded(l, expansion, limits);
    if (l.rows != nullptr) some.need(rows * l.hidden_size);
    add_ending(block, rows * l.hidden_size);
    product.count(block.qkv_a, l.dtype, rows, l.hidden_size, block.a_size());
    product.count(block.out, l.dtype, rows, block.mixed_size(), l.hidden_size);
    add_adapters(l.adapters, rows, l.hidden_size, 2, block.a_size());
    add_adapters(l.adapters, rows, block.mixed_size(), 1, l.hidden_size);
    if (block.q_lora_rank == 0) return;
    latent.q_normed.need(rows * block.q_lora_rank);
    latent.q.need(rows * block.q_size());
    product.count(block.q_b, l.dtype, rows, block.q_lora_rank, block.q_size());
    add_adapters(l.adapters, rows, block.q_lora_rank, 1, block.q_size());
  }

  void add_absorbed(const LatentAttentionBlockParams& l, const AttentionLimits& limits) {
    const LatentAttentionBlock& block = l.block;
    const int64_t heads = block.num_heads, pairs = l.batch.num_tokens * heads;
    latent.q_latent.need(pairs * block.kv_lora_rank);
    latent.mixed.need(pairs * block.kv_lora_rank);
    latent.values.need(pairs * block.v_head_dim);
    latent.workspace.need(latent_attention_workspace_bytes(latent_attention_params(l), limits));
    product.count(SchemeId::kDense, l.dtype, pairs, block.qk_nope_head_dim, block.kv_lora_rank,
                  false, false, heads);
    product.count(SchemeId::kDense, l.dtype, pairs, block.kv_lora_rank, block.v_head_dim, false,
                  false, heads);
  }

  void add_expanded(const LatentAttentionBlockParams& l, const Expansion& expansion,
                    const AttentionLimits& limits) {
    const LatentAttentionBlock& block = l.block;
    const int64_t rows = expansion.rows, rank = block.kv_lora_rank;
    const int64_t keys = expansion.heads * block.qk_nope_head_dim;
    const int64_t values = expansion.heads * block.v_head_dim;
    latent.latents.need(rows * rank);
    latent.rope.need(rows * block.qk_rope_head_dim);
    latent.keys.need(rows * keys);
    latent.expanded.need(rows * values);
    latent.first_rows.need(l.batch.num_seqs);
    latent.expanded_workspace.need(expanded_attention_workspace_bytes(latent_sizes(block), limits));
    product.count(SchemeId::kDense, l.dtype, rows, rank, keys);
    product.count(SchemeId::kDense, l.dtype, rows, rank, values);
  }

  void add(const ExpertBlockParams& e, const AttentionLimits&) {
    const ExpertBlock& block = e.block;
    const int64_t num_experts = block.router.num_experts;
    const int64_t rows = e.num_tokens, pairs = rows * block.router.top_k;
    add_rows(rows, e.hidden_size, e.dtype);
    experts.sorted.need(pairs * e.hidden_size);
    experts.inner.need(pairs * block.intermediate_size + rows * block.shared_size);
    const bool folds = is_gates_silu(block.activation) && block.activation.is_plain();
    if (!folds) {
      experts.functions.need(std::max(pairs * block.up_size(), rows * block.shared_up_size()));
    }
    experts.logits.need(rows * num_experts);
    experts.shared_gate.need(rows);
    experts.shares.need(pairs);
    experts.ids.need(pairs);
    experts.places.need(pairs);
    if (pairs > 0) experts.ends.need(kMaxExperts);
    experts.counts.need(sort_counts(pairs, num_experts));
    product.count(SchemeId::kDense, e.dtype, rows, e.hidden_size, num_experts);
    product.count(block.gate_up, e.dtype, pairs, e.hidden_size, block.up_size(), folds, false,
                  num_experts);
    product.count(block.down, e.dtype, pairs, block.intermediate_size, e.hidden_size, false, false,
                  num_experts);
    if (block.shared_size == 0) return;
    experts.shared.need(rows * e.hidden_size);
    product.count(block.shared_gate_up, e.dtype, rows, e.hidden_size, block.shared_up_size(),
                  folds);
    product.count(block.shared_down, e.dtype, rows, block.shared_size, e.hidden_size);
  }

  void add(const MlpBlockParams& m, const AttentionLimits&) {
    const MlpBlock& block = m.block;
    const int64_t rows = m.num_tokens;
    add_rows(rows, m.hidden_size, m.dtype);
    inner.need(rows * block.intermediate_size);
    const bool folds = is_gates_silu(block.activation) && m.adapters.ids == nullptr;
    if (!folds) functions.need(rows * block.up_size());
    add_adapters(m.adapters, rows, m.hidden_size, block.activation.gated ? 2 : 1, 0);
    add_adapters(m.adapters, rows, block.intermediate_size, 1, m.hidden_size);
    if (m.before_rows != nullptr) some.need(rows * m.hidden_size);
    add_ending(block, rows * m.hidden_size);
    product.count(block.gate_up, m.dtype, rows, m.hidden_size, block.up_size(), folds,
                  !norms_ahead(rows));
    product.count(block.down, m.dtype, rows, block.intermediate_size, m.hidden_size);
  }
};

// Of a linear of experts: the tensors of the first one.
class FirstExpert {
 public:
  FirstExpert(const LinearWeights& weights, SchemeId scheme) {
    for (int i = 0; i < scheme_info(scheme).num_tensors; ++i) {
      TensorView& view = views_[i];
      view = weights.tensors[i];
      --view.rank;
      std::copy(view.shape + 1, view.shape + 1 + view.rank, view.shape);
    }
  }
  const TensorView* data() const { return views_; }

 private:
  TensorView views_[5];
};

// What a block's last launch left in scratch of its output, for the next block's norm.
enum class Handed : uint8_t {
  kNothing,
  kSumsq,   // s.sumsq
  kScaled,  // s.sumsq, and s.normed is the output times the norm's weight
  kNormed,  // s.normed is the output behind the norm
};

// One call: its blocks in their order.
class Blocks {
 public:
  Blocks(const std::vector<BlockParams>& blocks, const AttentionLimits& limits,
         const BlocksScratch& scratch, const Launch& launch_on)
      : blocks_(blocks), limits_(limits), s_(scratch), launch_(launch_on) {}

  Status run() {
    for (size_t i = 0; i < blocks_.size(); ++i) {
      next_ = i + 1 < blocks_.size() ? &blocks_[i + 1] : nullptr;
      const BlockView view = view_of(blocks_[i]);
      if (view.num_rows == 0) continue;
      REGATTA_RETURN_IF_ERROR(
          std::visit([&](const auto& block) { return run(block, view); }, blocks_[i]));
    }
    return {};
  }

 private:
  // What a block of these rows may hand to the next.
  Handed hands(const BlockView& block, DType dtype, int64_t rows) const {
    return hands(block, dtype, rows, block.ends_in_product());
  }
  Handed hands(const BlockView& block, DType dtype, int64_t rows, bool ends_in_product) const {
    if (next_ == nullptr) return Handed::kNothing;
    const BlockView next = view_of(*next_);
    // A router's launch makes the norm itself.
    if (next.parallel || next.of_experts || !next.norm.is_there) return Handed::kNothing;
    if (!ends_in_product) return Handed::kNormed;
    if (!next.norm.is_plain_rms() || next.residual.source == Source::kNormed) {
      return Handed::kNothing;
    }
    if (is_folded(next.first)) return norms_ahead(rows) ? Handed::kNothing : Handed::kSumsq;
    const bool carries =
        carries_norm(block.last, dtype, rows) && carries_norm(next.first, dtype, rows);
    return carries ? Handed::kScaled : Handed::kNothing;
  }

  // Gives a block's first product its rows, `input` behind the norm.
  Status take_norm(Product& first, const BlockView& block, const void* input, DType dtype) {
    const Handed handed = block.parallel ? Handed::kNothing : handed_;
    first.x = input;
    first.epsilon = block.norm.epsilon;
    if (!block.norm.is_there) return {};
    const bool folded = is_folded(first.scheme);
    const bool carries = carries_norm(first.scheme, dtype, first.num_rows);
    if (handed == Handed::kNormed) {
      first.x = s_.normed;
      return {};
    }
    const bool plain = block.norm.is_plain_rms() && block.residual.source == Source::kInput;
    if (!plain || (folded && norms_ahead(first.num_rows))) {
      first.x = s_.normed;
      return norm_rows(block, input, first.num_rows, first.in_features, folded, dtype);
    }
    if (!folded && !carries) {  // by the product
      first.normed = s_.normed;
      first.norm_weight = block.norm_weights.weight;
      return {};
    }
    first.sumsq = s_.sumsq;
    first.num_sumsq = sumsq_per_row(first.in_features, first.num_rows);
    if (carries) first.x = s_.normed;
    if (handed != Handed::kNothing) return {};
    RowSumsqParams p;
    p.x = input;
    p.sums = s_.sumsq;
    if (carries) {
      p.norm_weight = block.norm_weights.weight;
      p.scaled = s_.normed;
    }
    p.num_rows = first.num_rows;
    p.width = first.in_features;
    p.columns = gemm_sumsq_columns(first.num_rows);
    p.dtype = dtype;
    return row_sumsq(p, launch_.stream);
  }

  // A block's input -> s.normed. folded: the norm's weight is in the product's.
  Status norm_rows(const BlockView& block, const void* input, int64_t rows, int64_t width,
                   bool folded, DType dtype) {
    NormParams p;
    p.x = input;
    p.weight = folded ? nullptr : block.norm_weights.weight;
    p.bias = block.norm_weights.bias;
    p.out = s_.normed;
    p.num_tokens = rows;
    p.hidden_size = width;
    p.epsilon = block.norm.epsilon;
    p.dtype = dtype;
    p.kind = block.norm.kind;
    p.plus_one = block.norm.plus_one;
    return norm(p, launch_);
  }

  // Whether no launch shortly ahead writes the rows' adapters. Behind attention of another operator
  // they may be those of some rows.
  bool are_inputs(const AdapterRows& rows) const {
    return !std::holds_alternative<MlpBlockParams>(blocks_[0]) && rows.ids != s_.wanted_ids;
  }

  // Of `product`, whose x is there; see cuda::adding_to(). Its rows are sorted by their adapters
  // here. Of few rows shrink() makes its codes.
  Status adding_to(Product& product, const LowRankWeights& weights, const AdapterRows& rows,
                   Adapted which, std::initializer_list<int64_t> part_sizes, const void* x,
                   const void* norm_weight, DType dtype, Adding* adding) {
    *adding = cuda::adding_to(product, weights, rows, which, part_sizes, x, norm_weight,
                              are_inputs(rows), dtype, s_.adding);
    if (takes_codes(product.scheme)) {
      const QuantizeRowsParams codes = quantization(product, s_.product, dtype);
      if (shrink_quantizes(adding->down, codes)) adding->down.quantize = product.coded = codes;
    }
    if (!takes_tiles(dtype, product.num_rows) || sorted_ids_ == rows.ids) return {};
    sorted_ids_ = rows.ids;
    return sort_rows({rows, product.num_rows, s_.adding.sorted}, launch_);
  }

  // The same of a block's first product, behind take_norm(). Whatever was handed, rows of a plain
  // norm are the input's: what is handed depends on where a step's layers are cut into calls.
  Status adding_to_first(Product& first, const LowRankWeights& weights, const AdapterRows& rows,
                         Adapted which, std::initializer_list<int64_t> part_sizes,
                         const BlockView& block, const void* input, DType dtype, Adding* adding) {
    const bool by_factor = block.norm.is_plain_rms();
    const void* const x = !block.norm.is_there || by_factor ? input : s_.normed;
    const void* const norm_weight = by_factor ? block.norm_weights.weight : nullptr;
    return adding_to(first, weights, rows, which, part_sizes, x, norm_weight, dtype, adding);
  }

  Status add_ahead(Product& product, Adding& adding, const void* residual) {
    return cuda::add_ahead(product, adding, residual, s_.adding, launch_);
  }

  Status multiply(const Product& product, DType dtype) {
    return cuda::run(product, dtype, dtype, s_.product, launch_);
  }

  // The first product of attention, of `input` behind the norm, with what adapters add.
  Status multiply_first(Product& first, const LinearWeights& weights, const AdapterRows& adapters,
                        std::initializer_list<int64_t> part_sizes, const BlockView& block,
                        const void* input, DType dtype) {
    REGATTA_RETURN_IF_ERROR(take_norm(first, block, input, dtype));
    if (adapters.ids != nullptr) {
      Adding adding;
      REGATTA_RETURN_IF_ERROR(adding_to_first(first, weights.low_rank, adapters, Adapted::kQkv,
                                              part_sizes, block, input, dtype, &adding));
      REGATTA_RETURN_IF_ERROR(add_ahead(first, adding, nullptr));
    }
    return multiply(first, dtype);
  }

  // Whether some of attention's rows are the output, for what follows it; their adapters are kept.
  template <class Attention>
  Status keep_wanted(const Attention& a, bool some) {
    are_wanted_ = some;
    if (!some || a.adapters.ids == nullptr) return {};
    return gather_rows(
        {a.rows, a.adapters.ids, s_.wanted_ids, a.num_rows, a.batch.num_tokens, 1, DType::kFloat32},
        launch_);
  }

  // The adapters of the rows that are the output of attention ahead.
  AdapterRows of_wanted(AdapterRows rows) const {
    if (are_wanted_) rows.ids = s_.wanted_ids;
    return rows;
  }

  // Runs a block's last product, whose `out` is the block's output, and what follows it. source:
  // the residual's rows. hands: whether the next block may have its norm from here.
  Status end_block(Product& last, const BlockView& block, const void* source, bool hands_norm,
                   DType dtype, const AdapterRows& rows, Adapted which,
                   const LowRankWeights& low_rank) {
    if (rows.ids != nullptr) {
      Adding adding;
      REGATTA_RETURN_IF_ERROR(adding_to(last, low_rank, rows, which, {last.out_features}, last.x,
                                        nullptr, dtype, &adding));
      REGATTA_RETURN_IF_ERROR(add_ahead(last, adding, block.ends_in_product() ? source : nullptr));
    }
    const Handed handed = hands_norm ? hands(block, dtype, last.num_rows) : Handed::kNothing;
    handed_ = handed;
    if (block.ends_in_product()) {
      if (rows.ids == nullptr) last.residual = source;
      if (handed == Handed::kSumsq || handed == Handed::kScaled) last.sumsq_out = s_.sumsq;
      if (handed == Handed::kScaled) {
        last.scaled_out = s_.normed;
        last.next_norm_weight = view_of(*next_).norm_weights.weight;
      }
      return multiply(last, dtype);
    }
    SumNormParams p;
    p.made = s_.made;
    void* const out = std::exchange(last.out, s_.made);
    REGATTA_RETURN_IF_ERROR(multiply(last, dtype));
    return sum(p, block, source, out, last.num_rows, last.out_features, dtype);
  }

  // Makes a block's output `out` of p.made, and what `handed_` says of the next block's norm.
  Status sum(SumNormParams& p, const BlockView& block, const void* source, void* out, int64_t rows,
             int64_t width, DType dtype) {
    p.source = source;
    p.source_scale = block.residual.input_scale;
    p.made_scale = block.residual.output_scale;
    p.post_norm = block.post_norm;
    p.post_weights = block.post_weights;
    p.post_norm_of = block.post_norm_of;
    p.out = out;
    if (handed_ == Handed::kNormed) {
      const BlockView next = view_of(*next_);
      p.next_norm = next.norm;
      p.next_weights = next.norm_weights;
      p.normed = s_.normed;
    }
    p.num_rows = rows;
    p.width = width;
    p.dtype = dtype;
    return sum_norm(p, launch_);
  }

  // Attention behind the cache write, of the last row of each span alone, each a span of its own
  // that sees what is in the cache; their `source` to s.some. s.qkv and s.sumsq are free by then.
  Status attend_last_rows(const AttentionBlockParams& a, PagedAttentionParams attended,
                          const AttentionSpace& space, const void* source) {
    const int64_t rows = a.batch.num_seqs, tokens = a.batch.num_tokens;
    REGATTA_RETURN_IF_ERROR(
        gather_rows({a.rows, s_.q, s_.qkv, rows, tokens, a.block.q_size(), a.dtype}, launch_));
    REGATTA_RETURN_IF_ERROR(
        gather_rows({a.rows, source, s_.some, rows, tokens, a.hidden_size, a.dtype}, launch_));
    auto* borders = reinterpret_cast<int32_t*>(s_.sumsq.data());
    REGATTA_RETURN_IF_ERROR(count_up(borders, rows + 1, launch_));
    attended.q = s_.qkv;
    attended.batch.cu_seqlens_q = borders;
    attended.batch.num_tokens = rows;
    return paged_attention(attended, {1, limits_.max_context_len}, space.memory, space.bytes,
                           launch_);
  }

  RopeAndCacheWriteParams rope_params(const AttentionBlockParams& a) const {
    const AttentionBlock& block = a.block;
    RopeAndCacheWriteParams rope;
    rope.dtype = a.dtype;
    rope.qkv = s_.qkv;
    rope.positions = a.positions;
    rope.slot_mapping = a.slot_mapping;
    rope.rope_cache = a.rope_cache;
    rope.query_rope_cache = a.query_rope_cache;
    rope.q_norm = a.q_norm.weight;
    rope.k_norm = a.k_norm.weight;
    rope.cache = a.cache;
    rope.q_out = s_.q;
    rope.num_tokens = a.batch.num_tokens;
    rope.num_heads = block.num_heads;
    rope.num_kv_heads = block.num_kv_heads;
    rope.head_dim = block.head_dim;
    rope.rotary_dim = a.rotary_dim;
    rope.num_positions = a.num_positions;
    rope.epsilon = block.qk_norm.epsilon;
    rope.plus_one = block.qk_norm.plus_one;
    rope.whole = block.qk_norm_whole;
    rope.last = block.qk_norm_last;
    rope.interleaved = block.positions.interleaved;
    return rope;
  }

  // a.hidden -> a.hidden_out.
  Status run(const AttentionBlockParams& a, const BlockView& view) {
    const AttentionBlock& block = a.block;
    const int64_t rows = a.batch.num_tokens;
    Product qkv("qkv", block.qkv, a.qkv, a.hidden, s_.qkv, rows, a.hidden_size, block.qkv_size());
    REGATTA_RETURN_IF_ERROR(multiply_first(qkv, a.qkv, a.adapters,
                                           {block.q_size(), block.kv_size(), block.kv_size()}, view,
                                           a.hidden, a.dtype));

    const RopeAndCacheWriteParams rope = rope_params(a);
    const AttentionSpace& space = s_.space_of(block);
    PagedAttentionParams attended = paged_attention_params(a);
    attended.q = s_.q;
    attended.out = s_.mixed;
    const void* source = block.residual.source == Source::kNormed ? s_.normed : a.hidden;
    const bool some = a.rows != nullptr && limits_.rows != StepRows::kAll;
    const bool lasts = some && limits_.rows == StepRows::kLast && a.batch.tree_mask == nullptr;
    if (lasts) {
      REGATTA_RETURN_IF_ERROR(rope_and_cache_write(rope, launch_));
      REGATTA_RETURN_IF_ERROR(attend_last_rows(a, attended, space, source));
      source = s_.some;
    } else {
      Launch between = launch_;
      between.between_halves = packed_by_halves(block, rows);
      REGATTA_RETURN_IF_ERROR(
          rope_and_paged_attention(rope, attended, limits_, space.memory, space.bytes, between));
    }
    REGATTA_RETURN_IF_ERROR(keep_wanted(a, some));

    Product out("out", block.out, a.out, s_.mixed, some && !lasts ? s_.some : a.hidden_out,
                lasts ? a.num_rows : rows, block.q_size(), a.hidden_size);
    const Status status =
        end_block(out, view, source, !some, a.dtype, lasts ? of_wanted(a.adapters) : a.adapters,
                  Adapted::kOut, a.out.low_rank);
    if (!status.ok() || !some || lasts) return status;
    return gather_rows({a.rows, s_.some, a.hidden_out, a.num_rows, rows, a.hidden_size, a.dtype},
                       launch_);
  }

  // l.hidden -> l.hidden_out.
  Status run(const LatentAttentionBlockParams& l, const BlockView& view) {
    const LatentAttentionBlock& block = l.block;
    const int64_t rows = l.batch.num_tokens;
    Product first("qkv_a", block.qkv_a, l.qkv_a, l.hidden, s_.latent.made, rows, l.hidden_size,
                  block.a_size());
    REGATTA_RETURN_IF_ERROR(multiply_first(first, l.qkv_a, l.adapters,
                                           {block.q_a_size(), block.latent_size()}, view, l.hidden,
                                           l.dtype));
    if (block.q_lora_rank > 0) REGATTA_RETURN_IF_ERROR(make_queries(l));
    REGATTA_RETURN_IF_ERROR(attend(l));
    const bool some = l.rows != nullptr && limits_.rows != StepRows::kAll;
    Product out("out", block.out, l.out, s_.mixed, some ? s_.some : l.hidden_out, rows,
                block.mixed_size(), l.hidden_size);
    const void* source = block.residual.source == Source::kNormed ? s_.normed : l.hidden;
    REGATTA_RETURN_IF_ERROR(keep_wanted(l, some));
    const Status status =
        end_block(out, view, source, !some, l.dtype, l.adapters, Adapted::kOut, l.out.low_rank);
    if (!status.ok() || !some) return status;
    return gather_rows({l.rows, s_.some, l.hidden_out, l.num_rows, rows, l.hidden_size, l.dtype},
                       launch_);
  }

  // What the first products made -> the cache and s.mixed.
  Status attend(const LatentAttentionBlockParams& l) {
    const Expansion expansion = Expansion::of(l, limits_);
    const LatentWriteParams write = latent_write_params(l);
    if (expansion.rows == 0 && takes_head_products(l, write)) return attend_few(l, write);
    REGATTA_RETURN_IF_ERROR(latent_write(write, launch_));
    if (!expansion.is_all) REGATTA_RETURN_IF_ERROR(attend_absorbed(l, expansion));
    return expansion.rows > 0 ? attend_expanded(l, expansion) : Status();
  }

  // Whether a step is one of few tokens, whose products by each head's matrix have a kernel. Not in
  // the batch-invariant mode, where tokens are added up as they are in a prompt.
  bool takes_head_products(const LatentAttentionBlockParams& l,
                           const LatentWriteParams& write) const {
    return !is_batch_invariant && l.batch.num_tokens <= kHeadProductTokens &&
           l.kv_b.key_absorb.dtype == l.dtype && l.kv_b.value_up.dtype == l.dtype &&
           takes_queries(write, queries_product(l, write)) && takes_head_product(values_product(l));
  }

  // Queries as the first product left them -> x.q_latent.
  HeadProductParams queries_product(const LatentAttentionBlockParams& l,
                                    const LatentWriteParams& write) const {
    HeadProductParams p = head_product_params(l, l.kv_b.key_absorb);
    p.x = write.q;
    p.x_token_stride = write.q_stride;
    p.x_head_stride = write.nope_size + write.rope_size;
    p.out = s_.latent.q_latent;
    p.out_token_stride = p.out_features;
    p.out_head_stride = p.num_tokens * p.out_features;
    return p;
  }

  // x.mixed -> s.mixed, whose rows have the heads side by side.
  HeadProductParams values_product(const LatentAttentionBlockParams& l) const {
    HeadProductParams p = head_product_params(l, l.kv_b.value_up);
    p.x = s_.latent.mixed;
    p.x_token_stride = p.in_features;
    p.x_head_stride = p.num_tokens * p.in_features;
    p.out = s_.mixed;
    p.out_token_stride = p.num_heads * p.out_features;
    p.out_head_stride = p.out_features;
    return p;
  }

  HeadProductParams head_product_params(const LatentAttentionBlockParams& l,
                                        const TensorView& matrices) const {
    HeadProductParams p;
    p.dtype = l.dtype;
    p.weight = matrices.data;
    p.num_tokens = l.batch.num_tokens;
    p.num_heads = l.block.num_heads;
    p.in_features = matrices.shape[2];
    p.out_features = matrices.shape[1];
    return p;
  }

  // attend() of few tokens: three launches, or four where attention has two.
  Status attend_few(const LatentAttentionBlockParams& l, const LatentWriteParams& write) {
    REGATTA_RETURN_IF_ERROR(latent_write_and_queries(write, queries_product(l, write), launch_));
    REGATTA_RETURN_IF_ERROR(attend_latents(l, limits_));
    return head_product(values_product(l), launch_);
  }

  // x.q_latent, x.q_rope and the cache -> x.mixed.
  Status attend_latents(const LatentAttentionBlockParams& l, const AttentionLimits& limits) {
    LatentAttentionParams attended = latent_attention_params(l);
    attended.q_latent = s_.latent.q_latent;
    attended.q_rope = s_.latent.q_rope;
    attended.out = s_.latent.mixed;
    return latent_attention(attended, limits, s_.latent.workspace, launch_);
  }

  // x.q_nope, x.q_rope and the cache -> s.mixed, of spans that are not expanded: queries and
  // outputs go through each head's matrix.
  Status attend_absorbed(const LatentAttentionBlockParams& l, const Expansion& expansion) {
    const LatentAttentionBlock& block = l.block;
    const LatentScratch& x = s_.latent;
    REGATTA_RETURN_IF_ERROR(multiply_heads(l, l.kv_b.key_absorb, x.q_nope, x.q_latent));
    REGATTA_RETURN_IF_ERROR(attend_latents(l, expansion.rest));
    const bool alone = l.batch.num_tokens == 1;  // whose heads are a row already
    const Status status = multiply_heads(l, l.kv_b.value_up, x.mixed, alone ? s_.mixed : x.values);
    if (!status.ok() || alone) return status;
    HeadsToRowsParams rows;
    rows.x = x.values;
    rows.out = s_.mixed;
    rows.num_tokens = l.batch.num_tokens;
    rows.num_heads = block.num_heads;
    rows.width = block.v_head_dim;
    rows.dtype = l.dtype;
    if (expansion.rows > 0) rows.cu_seqlens_q = l.batch.cu_seqlens_q;
    rows.num_seqs = l.batch.num_seqs;
    rows.max_span_len = limits_.max_short_len;
    return heads_to_rows(rows, launch_);
  }

  // The same of long spans: keys and values of their contexts, of some heads after others.
  Status attend_expanded(const LatentAttentionBlockParams& l, const Expansion& expansion) {
    const LatentAttentionBlock& block = l.block;
    const LatentScratch& x = s_.latent;
    GatherLatentsParams gathered;
    static_cast<LatentCache&>(gathered) = latent_attention_params(l);
    gathered.max_short_len = limits_.max_short_len;
    gathered.num_long_tokens = expansion.rows;
    gathered.latents = x.latents;
    gathered.rope = x.rope;
    gathered.first_rows = x.first_rows;
    REGATTA_RETURN_IF_ERROR(gather_latents(gathered, launch_));
    ExpandedAttentionParams attended;
    attended.dtype = l.dtype;
    attended.q_nope = x.q_nope;
    attended.q_rope = x.q_rope;
    attended.keys = x.keys;
    attended.values = x.expanded;
    attended.rope = x.rope;
    attended.first_rows = x.first_rows;
    attended.batch = l.batch;
    attended.out = s_.mixed;
    attended.num_heads = block.num_heads;
    attended.sizes = latent_sizes(block);
    attended.softmax_scale = block.softmax_scale;
    for (int64_t first = 0; first < block.num_heads; first += expansion.heads) {
      const int64_t count = std::min(expansion.heads, block.num_heads - first);
      REGATTA_RETURN_IF_ERROR(expand_heads(l, expansion.rows, l.kv_b.key_up, first, count, x.keys));
      REGATTA_RETURN_IF_ERROR(
          expand_heads(l, expansion.rows, l.kv_b.value_up, first, count, x.expanded));
      attended.first_head = first;
      attended.num_expanded_heads = count;
      REGATTA_RETURN_IF_ERROR(expanded_attention(attended, limits_, x.expanded_workspace, launch_));
    }
    return {};
  }

  // x.latents [S, L] by the matrices [heads, out, L] of some heads -> out [S, count, out].
  Status expand_heads(const LatentAttentionBlockParams& l, int64_t rows, const TensorView& matrices,
                      int64_t first, int64_t count, void* out) {
    const int64_t width = matrices.shape[1], rank = matrices.shape[2];
    TensorView some = matrices;
    some.data =
        static_cast<const char*>(matrices.data) + first * width * rank * dtype_size(l.dtype);
    some.rank = 2;
    some.shape[0] = count * width;
    some.shape[1] = rank;
    return multiply(
        {"expanded", SchemeId::kDense, {&some}, s_.latent.latents, out, rows, rank, count * width},
        l.dtype);
  }

  // The first columns of what the first product made, normed -> the queries.
  Status make_queries(const LatentAttentionBlockParams& l) {
    const LatentAttentionBlock& block = l.block;
    const LatentScratch& x = s_.latent;
    const int64_t rows = l.batch.num_tokens;
    REGATTA_RETURN_IF_ERROR(
        norm_columns({x.made, l.q_a_norm.weight, x.q_normed, rows, block.q_lora_rank,
                      block.a_size(), block.q_a_norm.epsilon, l.dtype},
                     launch_));
    Product q("q_b", block.q_b, l.q_b, x.q_normed, x.q, rows, block.q_lora_rank, block.q_size());
    if (l.adapters.ids != nullptr) {
      Adding adding;
      REGATTA_RETURN_IF_ERROR(adding_to(q, l.q_b.low_rank, l.adapters, Adapted::kQkv,
                                        {q.out_features}, q.x, nullptr, l.dtype, &adding));
      REGATTA_RETURN_IF_ERROR(add_ahead(q, adding, nullptr));
    }
    return multiply(q, l.dtype);
  }

  LatentWriteParams latent_write_params(const LatentAttentionBlockParams& l) const {
    const LatentAttentionBlock& block = l.block;
    const LatentScratch& x = s_.latent;
    const int64_t first = block.a_size() - block.latent_size();  // columns ahead of the latent
    LatentWriteParams p;
    p.dtype = l.dtype;
    p.q = block.q_lora_rank > 0 ? x.q : x.made;
    p.q_stride = block.q_lora_rank > 0 ? block.q_size() : block.a_size();
    p.latents = static_cast<const char*>(x.made.data()) + first * dtype_size(l.dtype);
    p.latent_stride = block.a_size();
    p.norm_weight = l.kv_a_norm.weight;
    p.rope_cache = l.rope_cache;
    p.positions = l.positions;
    p.slot_mapping = l.slot_mapping;
    p.cache = l.cache.key;
    p.tail = l.cache.tail;
    p.scales = l.cache.key_scale;
    p.q_nope = x.q_nope;
    p.q_rope = x.q_rope;
    p.head_ends = x.ends;
    p.num_tokens = l.batch.num_tokens;
    p.num_heads = block.num_heads;
    p.latent_rank = block.kv_lora_rank;
    p.rope_size = block.qk_rope_head_dim;
    p.nope_size = block.qk_nope_head_dim;
    p.num_positions = l.num_positions;
    p.epsilon = block.kv_a_norm.epsilon;
    p.interleaved = block.positions.interleaved;
    return p;
  }

  // from [Hq, T, in] by each head's matrix [Hq, out, in] -> to [Hq, T, out].
  Status multiply_heads(const LatentAttentionBlockParams& l, const TensorView& matrices,
                        const void* from, void* to) {
    TensorView first = matrices;
    first.rank = 2;
    std::copy(matrices.shape + 1, matrices.shape + 3, first.shape);
    Product p("heads", SchemeId::kDense, {&first}, from, to, l.batch.num_tokens * l.block.num_heads,
              first.shape[1], first.shape[0]);
    p.num_groups = l.block.num_heads;
    p.group_ends = s_.latent.ends;
    p.group_ends_ready = from == s_.latent.mixed;  // attention came between
    return multiply(p, l.dtype);
  }

  // m.hidden -> m.out.
  Status run(const MlpBlockParams& m, const BlockView& view) {
    const MlpBlock& block = m.block;
    const int64_t rows = m.num_tokens;
    const void* input = m.input();
    if (block.parallel && m.before_rows != nullptr) {
      REGATTA_RETURN_IF_ERROR(gather_rows(
          {m.before_rows, input, s_.some, rows, m.num_before, m.hidden_size, m.dtype}, launch_));
      input = s_.some;
    }
    Product gate_up("gate_up", block.gate_up, m.gate_up, input, s_.inner, rows, m.hidden_size,
                    block.up_size());
    REGATTA_RETURN_IF_ERROR(take_norm(gate_up, view, input, m.dtype));
    Product down("down", block.down, m.down, s_.inner, m.out, rows, block.intermediate_size,
                 m.hidden_size);
    const AdapterRows adapters = of_wanted(m.adapters);
    if (adapters.ids != nullptr) {
      REGATTA_RETURN_IF_ERROR(run_adapted_up(gate_up, m, adapters, view, input));
    } else {
      if (is_gates_silu(block.activation)) gate_up.next = &down;
      REGATTA_RETURN_IF_ERROR(run_up(gate_up, block.activation, s_.functions, m.dtype));
    }
    const void* source = block.residual.source == Source::kNormed ? s_.normed : m.hidden;
    return end_block(down, view, source, true, m.dtype, adapters, Adapted::kDown, m.down.low_rank);
  }

  // e.hidden -> e.out.
  Status run(const ExpertBlockParams& e, const BlockView& view) {
    const ExpertBlock& block = e.block;
    const Router& router = block.router;
    const ExpertScratch& x = s_.experts;
    RouteParams route;
    route.x = e.hidden;
    route.norm = block.norm;
    route.norm_weights = e.norm;
    route.normed = s_.normed;
    route.weight = e.router;
    route.shared_gate = e.shared_gate;
    route.logits = x.logits;
    route.shared_gate_out = x.shared_gate;
    route.num_tokens = e.num_tokens;
    route.hidden_size = e.hidden_size;
    route.dtype = e.dtype;
    route.num_experts = router.num_experts;
    const bool is_step =
        e.num_tokens >= kRowsOfStep && !is_batch_invariant && takes_route_step(route);
    const bool by_product = !is_step && e.num_tokens > kRowsRouted && !is_batch_invariant;
    if (is_step) {
      REGATTA_RETURN_IF_ERROR(route_step(route, launch_));
    } else if (by_product && block.norm.is_there && e.shared_gate == nullptr) {
      REGATTA_RETURN_IF_ERROR(
          norm_rows(view, e.hidden, e.num_tokens, e.hidden_size, false, e.dtype));
    } else {
      if (by_product) route.logits = nullptr;
      REGATTA_RETURN_IF_ERROR(cuda::route(route, launch_));
    }
    if (by_product) REGATTA_RETURN_IF_ERROR(multiply_router(e));
    if (!is_batch_invariant && !block.post_norm.is_there) {
      std::optional<OneTokenParams> one = one_token_params(e);
      if (one && takes_one_token(*one)) {
        handed_ = hands(view, e.dtype, e.num_tokens, true);
        if (handed_ == Handed::kSumsq) one->sumsq_out = s_.sumsq;
        return one_token(*one, launch_);
      }
    }
    if (block.shared_size > 0) REGATTA_RETURN_IF_ERROR(run_shared(e));
    ChooseAndSortParams sort;
    sort.choose = choose_args(e);
    sort.choose.ids = x.ids;
    sort.choose.shares = x.shares;
    sort.x = s_.normed;
    sort.sorted = x.sorted;
    sort.ends = x.ends;
    sort.places = x.places;
    sort.counts = x.counts;
    sort.hidden_size = e.hidden_size;
    sort.dtype = e.dtype;
    REGATTA_RETURN_IF_ERROR(choose_and_sort(sort, launch_));
    REGATTA_RETURN_IF_ERROR(run_experts(e));
    handed_ = hands(view, e.dtype, e.num_tokens);
    SumNormParams p;
    p.made = x.sorted;
    p.parts.places = x.places;
    p.parts.shares = x.shares;
    p.parts.top_k = router.top_k;
    p.parts.ready = true;  // both products came between
    if (block.shared_size > 0) p.parts.shared = x.shared;
    if (block.shared_gate) p.parts.shared_gate = x.shared_gate;
    const void* source = block.residual.source == Source::kNormed ? s_.normed : e.hidden;
    return sum(p, view, source, e.out, e.num_tokens, e.hidden_size, e.dtype);
  }

  ChooseArgs choose_args(const ExpertBlockParams& e) const {
    ChooseArgs choose;
    choose.router = e.block.router;
    choose.logits = s_.experts.logits;
    choose.bias = e.router_bias;
    choose.correction = e.correction;
    choose.num_tokens = static_cast<int>(e.num_tokens);
    return choose;
  }

  // What one_token() needs; nothing where the block's weights are not its kind.
  std::optional<OneTokenParams> one_token_params(const ExpertBlockParams& e) const {
    const ExpertBlock& block = e.block;
    const auto all_are = [&](SchemeId scheme) {
      const bool shared = block.shared_gate_up == scheme && block.shared_down == scheme;
      return block.gate_up == scheme && block.down == scheme && (block.shared_size == 0 || shared);
    };
    const bool codes = all_are(SchemeId::kA8W8Fp8);
    if (!codes && !all_are(SchemeId::kDense)) return {};
    OneTokenParams p;
    p.choose = choose_args(e);
    p.x = s_.normed;
    p.gate_up = e.gate_up.tensors[0].data;
    p.gate_up_bias = e.gate_up.bias;
    p.down = e.down.tensors[0].data;
    p.down_bias = e.down.bias;
    if (codes) {
      const auto set = [](const LinearWeights& weights, const float** scale, const float** act) {
        *scale = static_cast<const float*>(weights.tensors[1].data);
        *act = static_cast<const float*>(weights.tensors[2].data);
      };
      // Scales of blocks have a dimension more.
      if (e.gate_up.tensors[1].rank != 2 || e.down.tensors[1].rank != 2) return {};
      set(e.gate_up, &p.gate_up_scale, &p.gate_up_act);
      set(e.down, &p.down_scale, &p.down_act);
    }
    if (block.shared_size > 0) {
      p.shared_gate_up = e.shared_gate_up.tensors[0].data;
      p.shared_down = e.shared_down.tensors[0].data;
    }
    if (block.shared_gate) p.shared_gate = s_.experts.shared_gate;
    p.inner = s_.experts.inner;
    p.source = block.residual.source == Source::kNormed ? s_.normed : e.hidden;
    p.out = e.out;
    p.source_scale = block.residual.input_scale;
    p.made_scale = block.residual.output_scale;
    p.hidden_size = e.hidden_size;
    p.intermediate_size = block.intermediate_size;
    p.shared_size = block.shared_size;
    p.activation = block.activation;
    p.dtype = e.dtype;
    return p;
  }

  // The sorted rows -> what each pair's expert makes of it, in their place.
  Status run_experts(const ExpertBlockParams& e) {
    const ExpertBlock& block = e.block;
    const ExpertScratch& x = s_.experts;
    const FirstExpert up(e.gate_up, block.gate_up), down_weight(e.down, block.down);
    const int64_t pairs = e.num_tokens * block.router.top_k;
    Product gate_up("gate_up", block.gate_up, {up.data(), e.gate_up.bias}, x.sorted, x.inner, pairs,
                    e.hidden_size, block.up_size());
    Product down("down", block.down, {down_weight.data(), e.down.bias}, x.inner, x.sorted, pairs,
                 block.intermediate_size, e.hidden_size);
    for (Product* p : {&gate_up, &down}) {
      p->num_groups = block.router.num_experts;
      p->group_ends = x.ends;
    }
    down.group_ends_ready = true;  // gate_up came between
    REGATTA_RETURN_IF_ERROR(run_up(gate_up, block.activation, x.functions, e.dtype));
    return multiply(down, e.dtype);
  }

  // s.normed -> s.experts.logits.
  Status multiply_router(const ExpertBlockParams& e) {
    TensorView weight;
    weight.data = e.router;
    weight.dtype = e.dtype;
    weight.rank = 2;
    weight.shape[0] = e.block.router.num_experts;
    weight.shape[1] = e.hidden_size;
    return cuda::run({"router",
                      SchemeId::kDense,
                      {&weight},
                      s_.normed,
                      s_.experts.logits,
                      e.num_tokens,
                      e.hidden_size,
                      e.block.router.num_experts},
                     e.dtype, DType::kFloat32, s_.product, launch_);
  }

  // s.normed -> s.experts.shared.
  Status run_shared(const ExpertBlockParams& e) {
    const ExpertBlock& block = e.block;
    const ExpertScratch& x = s_.experts;
    Product gate_up("shared_gate_up", block.shared_gate_up, e.shared_gate_up, s_.normed, x.inner,
                    e.num_tokens, e.hidden_size, block.shared_up_size());
    REGATTA_RETURN_IF_ERROR(run_up(gate_up, block.activation, x.functions, e.dtype));
    return multiply({"shared_down", block.shared_down, e.shared_down, x.inner, x.shared,
                     e.num_tokens, block.shared_size, e.hidden_size},
                    e.dtype);
  }

  // `up`, and a launch behind it that adds what adapters do and makes the function.
  Status run_adapted_up(Product& up, const MlpBlockParams& m, const AdapterRows& adapters,
                        const BlockView& view, const void* input) {
    const Activation& activation = m.block.activation;
    const int64_t inner = m.block.intermediate_size;
    Adding adding;
    const auto set = [&](std::initializer_list<int64_t> parts) {
      return adding_to_first(up, m.gate_up.low_rank, adapters, Adapted::kGateUp, parts, view, input,
                             m.dtype, &adding);
    };
    REGATTA_RETURN_IF_ERROR(activation.gated ? set({inner, inner}) : set({inner}));
    REGATTA_RETURN_IF_ERROR(shrink(adding.down, launch_));
    adding.up.out = std::exchange(up.out, s_.functions);
    adding.up.residual = s_.functions;
    adding.up.activation = &activation;
    REGATTA_RETURN_IF_ERROR(multiply(up, m.dtype));
    return expand(adding.up, launch_);
  }

  // `up`, and the function of what it makes: by its epilogue, or of `functions` by another launch.
  Status run_up(Product& up, const Activation& activation, void* functions, DType dtype) {
    up.gated = activation.gated;
    up.activates = !activation.gated;
    up.function = activation.function;
    if (activation.is_plain() && cuda::makes_function(up, dtype)) {
      return multiply(up, dtype);
    }
    up.gated = up.activates = false;
    void* const out = std::exchange(up.out, functions);
    REGATTA_RETURN_IF_ERROR(multiply(up, dtype));
    const int64_t width = up.out_features / (activation.gated ? 2 : 1);
    return activate({functions, out, up.num_rows, width, dtype, activation}, launch_);
  }

  const std::vector<BlockParams>& blocks_;
  const AttentionLimits& limits_;
  const BlocksScratch& s_;
  const Launch& launch_;
  const BlockParams* next_ = nullptr;
  Handed handed_ = Handed::kNothing;
  bool are_wanted_ = false;              // attention ahead has made some rows alone
  const int32_t* sorted_ids_ = nullptr;  // of the rows that s.adding.sorted has
};

}  // namespace

Status blocks(const std::vector<BlockParams>& params, const AttentionLimits& limits,
              const ResourcesFor& resources_for, const Launch& launch_on) {
  BlocksScratch scratch(params, limits);
  const ComposedResources resources = resources_for(scratch.place({}));
  REGATTA_RETURN_IF_ERROR(check_scratch(scratch.place(resources), resources, "blocks"));
  const auto zero = [&](void* memory, int64_t bytes) {
    if (bytes == 0 || memory == nullptr) return Status();
    return cuda_status(cudaMemsetAsync(memory, 0, bytes, launch_on.stream), "blocks");
  };
  for (const AttentionSpace& space : scratch.attention) {
    REGATTA_RETURN_IF_ERROR(zero(space.memory, space.zeroed_bytes));
  }
  REGATTA_RETURN_IF_ERROR(
      zero(scratch.latent.expanded_workspace, expanded_attention_zeroed_bytes()));
  return Blocks(params, limits, scratch, launch_on).run();
}

}  // namespace regatta::cuda
