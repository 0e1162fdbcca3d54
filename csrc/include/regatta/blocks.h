// The blocks of a decoder as data: the twin of predict/nn/blocks.py, field for field, and what an
// operator needs of tensors to compute one. No framework, no ISA code.
//
// T tokens, L of them wanted, H hidden size; the other dims are attention.h's.
#pragma once

#include <cstdint>
#include <variant>

#include "regatta/activate.h"
#include "regatta/adapters.h"
#include "regatta/attention.h"
#include "regatta/norm.h"
#include "regatta/scheme.h"
#include "regatta/types.h"

namespace regatta {

enum class PositionKind : uint8_t { kRotary, kAlibi, kNone };
enum class Placement : uint8_t { kOutput, kSum };  // of a post norm
enum class Source : uint8_t { kInput, kNormed };   // of a residual
enum class LatentForm : uint8_t { kCheaper, kAbsorbed, kExpanded };
enum class Scoring : uint8_t { kSoftmax, kSigmoid, kSparseMixer };
enum class GroupScore : uint8_t { kMax, kTopTwo };

struct Norm {
  bool is_there = false;
  NormKind kind = NormKind::kRms;
  float epsilon = 1e-6f;
  bool bias = false;
  bool plus_one = false;  // the factor is 1 + the stored weight

  // x / sqrt(mean(x^2) + epsilon) * weight.
  bool is_plain_rms() const { return is_there && kind == NormKind::kRms && !bias && !plus_one; }
};

// input_scale * source + output_scale * what the block made.
struct Residual {
  Source source = Source::kInput;
  float input_scale = 1.0f;
  float output_scale = 1.0f;

  bool is_plain_sum() const {
    return source == Source::kInput && input_scale == 1.0f && output_scale == 1.0f;
  }
};

// table, query_table and the slopes' scale are of Python alone: operators get the tensors.
struct Positions {
  PositionKind kind = PositionKind::kRotary;
  int64_t table = 0;
  int64_t query_table = -1;
  bool interleaved = false;
  bool two_dimensional = false;
  float scale = 1.0f;
};

struct AttentionBlock {
  int64_t num_heads = 0, num_kv_heads = 0, head_dim = 0;
  float softmax_scale = 1.0f;
  Norm norm;
  Norm qk_norm;
  bool qk_norm_whole = false, qk_norm_last = false;
  bool qk_norm_each = false;
  Positions positions;
  bool qkv_bias = false, out_bias = false;
  float softcap = 0.0f;
  int64_t window = -1;
  bool prefix_mask = false;
  bool sinks = false;
  Norm post_norm;
  Placement post_norm_of = Placement::kOutput;
  Residual residual;
  // How its weights and its cache are stored.
  SchemeId qkv = SchemeId::kDense, out = SchemeId::kDense;
  KvFormat kv_format = KvFormat::kDense;
  bool adapters = false;  // whether its linears have room for adapters

  int64_t q_size() const { return num_heads * head_dim; }
  int64_t kv_size() const { return num_kv_heads * head_dim; }
  int64_t qkv_size() const { return q_size() + 2 * kv_size(); }
};

// L kv_lora_rank, N qk_nope_head_dim, R qk_rope_head_dim, V v_head_dim; a latent is a row of L + R.
struct LatentAttentionBlock {
  int64_t num_heads = 0;
  int64_t kv_lora_rank = 0, qk_nope_head_dim = 0, qk_rope_head_dim = 0, v_head_dim = 0;
  float softmax_scale = 1.0f;
  int64_t q_lora_rank = 0;  // 0: queries are made of the input at once
  Norm norm;
  Norm q_a_norm, kv_a_norm;
  Positions positions;
  bool a_bias = false, out_bias = false;
  LatentForm form = LatentForm::kCheaper;
  Norm post_norm;
  Placement post_norm_of = Placement::kOutput;
  Residual residual;
  SchemeId qkv_a = SchemeId::kDense, q_b = SchemeId::kDense, out = SchemeId::kDense;
  KvFormat kv_format = KvFormat::kDense;
  bool adapters = false;  // whether its linears, those of heads apart, have room for adapters

  int64_t latent_size() const { return kv_lora_rank + qk_rope_head_dim; }
  int64_t q_head_size() const { return qk_nope_head_dim + qk_rope_head_dim; }
  int64_t q_size() const { return num_heads * q_head_size(); }
  int64_t mixed_size() const { return num_heads * v_head_dim; }
  // Outputs of the first product: q_a's (or the queries), then the latent's.
  int64_t q_a_size() const { return q_lora_rank ? q_lora_rank : q_size(); }
  int64_t a_size() const { return q_a_size() + latent_size(); }
};

struct MlpBlock {
  int64_t intermediate_size = 0;
  Activation activation;
  Norm norm;
  bool up_bias = false, down_bias = false;
  bool parallel = false;  // its norm reads what the block before it read
  Norm post_norm;
  Placement post_norm_of = Placement::kOutput;
  Residual residual;
  SchemeId gate_up = SchemeId::kDense, down = SchemeId::kDense;
  bool adapters = false;

  int64_t up_size() const { return intermediate_size * (activation.gated ? 2 : 1); }
};

// Which experts a row goes to, and with which weights: see predict/nn/blocks.py.
struct Router {
  int64_t num_experts = 0, top_k = 0;
  Scoring scoring = Scoring::kSoftmax;
  bool renormalize = false;
  float scale = 1.0f;
  bool bias = false, correction = false;
  float jitter = 0.0f;  // of kSparseMixer
  int64_t num_groups = 1, top_groups = 1;
  GroupScore group_score = GroupScore::kMax;
};
constexpr int64_t kMaxExperts = 512;  // of one block
constexpr int64_t kMaxChosen = 32;    // of them, for one row

struct ExpertBlock {
  Router router;
  int64_t intermediate_size = 0;
  Activation activation;
  Norm norm;
  bool up_bias = false, down_bias = false;
  int64_t shared_size = 0;
  bool shared_gate = false;
  Norm post_norm;
  Placement post_norm_of = Placement::kOutput;
  Residual residual;
  SchemeId gate_up = SchemeId::kDense, down = SchemeId::kDense;
  SchemeId shared_gate_up = SchemeId::kDense, shared_down = SchemeId::kDense;

  int64_t up_size() const { return intermediate_size * (activation.gated ? 2 : 1); }
  int64_t shared_up_size() const { return shared_size * (activation.gated ? 2 : 1); }
};

struct NormWeights {
  const void* weight = nullptr;
  const void* bias = nullptr;  // or null
};

struct LinearWeights {
  const TensorView* tensors = nullptr;  // as many as the scheme has
  const void* bias = nullptr;           // [out_features] or null
  LowRankWeights low_rank;              // of adapters, where the block has them
};

// Tensors are of one dtype but those that schemes and the cache's format store.
struct AttentionBlockParams {
  AttentionBlock block;
  DType dtype = DType::kFloat32;
  int64_t hidden_size = 0;
  const void* hidden = nullptr;  // [T, H]
  NormWeights norm, q_norm, k_norm, post_norm;
  LinearWeights qkv, out;
  const float* sinks = nullptr;             // [Hq] or null
  const float* slopes = nullptr;            // [Hq], of ALiBi
  const float* rope_cache = nullptr;        // [P, R], of rotary positions
  const float* query_rope_cache = nullptr;  // [P, R] or null: rope_cache
  int64_t rotary_dim = 0, num_positions = 0;
  PagedCache cache;                       // written in place
  const int32_t* positions = nullptr;     // [T]
  const int32_t* slot_mapping = nullptr;  // [T]
  AttentionBatch batch;
  AdapterRows adapters;
  // [L] those of hidden_out, or null: all. On a GPU AttentionLimits::rows says which they are, on a
  // CPU see narrows().
  const int32_t* rows = nullptr;
  int64_t num_rows = 0;
  void* hidden_out = nullptr;  // [T, H]; with rows [L, H]
};

// Of each head, as pack_dense has a matrix, and heads as one more dimension, the first.
struct HeadMatrices {
  TensorView key_up;      // [heads, N, L]
  TensorView value_up;    // [heads, V, L]
  TensorView key_absorb;  // [heads, L, N] key_up turned
};

struct LatentAttentionBlockParams {
  LatentAttentionBlock block;
  DType dtype = DType::kFloat32;
  int64_t hidden_size = 0;
  const void* hidden = nullptr;  // [T, H]
  NormWeights norm, q_a_norm, kv_a_norm, post_norm;
  LinearWeights qkv_a, q_b, out;
  HeadMatrices kv_b;
  const float* rope_cache = nullptr;  // [P, R]
  int64_t rotary_dim = 0, num_positions = 0;
  PagedCache cache;                       // of latents: one head; values are the first L of keys
  const int32_t* positions = nullptr;     // [T]
  const int32_t* slot_mapping = nullptr;  // [T]
  AttentionBatch batch;
  AdapterRows adapters;
  const int32_t* rows = nullptr;  // as AttentionBlockParams'
  int64_t num_rows = 0;
  void* hidden_out = nullptr;  // [T, H]; with rows [L, H]
};

struct MlpBlockParams {
  MlpBlock block;
  DType dtype = DType::kFloat32;
  int64_t num_tokens = 0, hidden_size = 0;
  const void* hidden = nullptr;  // [T, H]
  const void* before = nullptr;  // [T, H] what a parallel block's norm reads
  // [T] the rows of `before`, which then has num_before of them, or null: all.
  const int32_t* before_rows = nullptr;
  int64_t num_before = 0;
  NormWeights norm, post_norm;
  LinearWeights gate_up, down;
  AdapterRows adapters;
  void* out = nullptr;  // [T, H]

  const void* input() const { return block.parallel ? before : hidden; }
};

// Weights of experts have one more dimension, the first: E.
struct ExpertBlockParams {
  ExpertBlock block;
  DType dtype = DType::kFloat32;
  int64_t num_tokens = 0, hidden_size = 0;
  const void* hidden = nullptr;  // [T, H]
  NormWeights norm, post_norm;
  const void* router = nullptr;        // [E, H]
  const float* router_bias = nullptr;  // [E] or null
  const float* correction = nullptr;   // [E] or null
  LinearWeights gate_up, down;         // of E experts
  LinearWeights shared_gate_up, shared_down;
  const void* shared_gate = nullptr;  // [H] or null
  void* out = nullptr;                // [T, H]
};

using BlockParams = std::variant<AttentionBlockParams, MlpBlockParams, ExpertBlockParams,
                                 LatentAttentionBlockParams>;

namespace cpu {

// Whether attention_block() takes params.rows, which are not null: each token at most once, in
// order, and the sum reads no normed input. Else it makes all rows, with `rows` null.
bool narrows(const AttentionBlockParams& params);
Status attention_block(const AttentionBlockParams& params);
Status latent_attention_block(const LatentAttentionBlockParams& params);
Status mlp_block(const MlpBlockParams& params);
Status expert_block(const ExpertBlockParams& params);

}  // namespace cpu
}  // namespace regatta
