#include "block_records.h"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>

#include "attention_tensors.h"
#include "common.h"

namespace regatta::binding {
namespace {

constexpr const char* kNormKinds[] = {"rms", "layer"};
constexpr const char* kFunctions[kNumFunctions] = {"silu", "gelu", "gelu_tanh", "relu",
                                                   "relu_squared"};
constexpr const char* kPositionKinds[] = {"rotary", "alibi", "none"};
constexpr const char* kPlacements[] = {"output", "sum"};
constexpr const char* kSources[] = {"input", "normed"};
constexpr const char* kLatentForms[] = {"cheaper", "absorbed", "expanded"};
constexpr const char* kScorings[] = {"softmax", "sigmoid", "sparse_mixer"};
constexpr const char* kGroupScores[] = {"max", "top_two"};

// One "name=value", offered to the fields of a record until one takes it.
class Setting {
 public:
  // record: which has the fields, and a dot, if it is one within a block.
  Setting(std::string_view name, std::string_view value, std::string record = "")
      : record_(std::move(record)), name_(name), value_(value) {}

  void check_taken() const {
    if (is_taken_) return;
    fail("blocks: '" + record_ + std::string(name_) + "' is no field (allowed: " + offered_ + ")");
  }

  template <class T>
  void field(std::string_view name, T* to) {
    if (is_taken_) return;
    offered_ += (offered_.empty() ? "" : ", ") + record_ + std::string(name);
    if (name != name_) return;
    is_taken_ = true;
    read(to);
  }

  // The fields of a record that is a field.
  void field(std::string_view name, Norm* to) {
    within(name, [&](Setting& inner) {
      inner.field("kind", &to->kind);
      inner.field("epsilon", &to->epsilon);
      inner.field("bias", &to->bias);
      inner.field("plus_one", &to->plus_one);
      to->is_there = true;
    });
  }
  void field(std::string_view name, Activation* to) {
    within(name, [&](Setting& inner) {
      inner.field("function", &to->function);
      inner.field("gated", &to->gated);
      inner.field("clamp", &to->clamp);
      inner.field("slope", &to->slope);
      inner.field("up_offset", &to->up_offset);
    });
  }
  void field(std::string_view name, Residual* to) {
    within(name, [&](Setting& inner) {
      inner.field("source", &to->source);
      inner.field("input_scale", &to->input_scale);
      inner.field("output_scale", &to->output_scale);
    });
  }
  void field(std::string_view name, Positions* to) {
    within(name, [&](Setting& inner) {
      inner.field("kind", &to->kind);
      inner.field("table", &to->table);
      inner.field("query_table", &to->query_table);
      inner.field("interleaved", &to->interleaved);
      inner.field("two_dimensional", &to->two_dimensional);
      inner.field("scale", &to->scale);
    });
  }

  void field(std::string_view name, Router* to) {
    within(name, [&](Setting& inner) {
      inner.field("num_experts", &to->num_experts);
      inner.field("top_k", &to->top_k);
      inner.field("scoring", &to->scoring);
      inner.field("renormalize", &to->renormalize);
      inner.field("scale", &to->scale);
      inner.field("bias", &to->bias);
      inner.field("correction", &to->correction);
      inner.field("jitter", &to->jitter);
      inner.field("num_groups", &to->num_groups);
      inner.field("top_groups", &to->top_groups);
      inner.field("group_score", &to->group_score);
    });
  }

 private:
  template <class Fields>
  void within(std::string_view name, Fields&& fields) {
    const size_t size = name.size();
    if (is_taken_) return;
    if (name_.size() <= size || name_.substr(0, size) != name || name_[size] != '.') {
      offered_ += (offered_.empty() ? "" : ", ") + std::string(name) + ".*";
      return;
    }
    Setting inner(name_.substr(size + 1), value_, std::string(name) + ".");
    fields(inner);
    inner.check_taken();
    is_taken_ = true;
  }

  template <class T>
  void number(T* to) {
    const char* end = value_.data() + value_.size();
    const auto [last, error] = std::from_chars(value_.data(), end, *to);
    if (error != std::errc() || last != end) refuse("a number");
  }
  void read(int64_t* to) { number(to); }
  void read(float* to) { number(to); }
  void read(bool* to) {
    if (value_ != "0" && value_ != "1") refuse("0 or 1");
    *to = value_ == "1";
  }
  template <class T, size_t kCount>
  void choice(const char* const (&names)[kCount], T* to) {
    std::string allowed;
    for (size_t i = 0; i < kCount; ++i) {
      if (value_ == names[i]) return void(*to = static_cast<T>(i));
      allowed += (allowed.empty() ? "" : ", ") + std::string(names[i]);
    }
    refuse(allowed);
  }
  void read(NormKind* to) { choice(kNormKinds, to); }
  void read(Function* to) { choice(kFunctions, to); }
  void read(PositionKind* to) { choice(kPositionKinds, to); }
  void read(Placement* to) { choice(kPlacements, to); }
  void read(Source* to) { choice(kSources, to); }
  void read(LatentForm* to) { choice(kLatentForms, to); }
  void read(Scoring* to) { choice(kScorings, to); }
  void read(GroupScore* to) { choice(kGroupScores, to); }
  void read(SchemeId* to) { *to = scheme_of(std::string(value_)); }
  void read(KvFormat* to) { *to = kv_format_of(std::string(value_)); }

  [[noreturn]] void refuse(const std::string& allowed) const {
    fail("blocks: " + record_ + std::string(name_) + " is '" + std::string(value_) +
         "' (allowed: " + allowed + ")");
  }

  std::string record_;
  std::string_view name_, value_;
  std::string offered_;
  bool is_taken_ = false;
};

// The last fields of all blocks.
template <class Block>
void take_shared(Block* block, Setting& setting) {
  setting.field("post_norm", &block->post_norm);
  setting.field("post_norm_of", &block->post_norm_of);
  setting.field("residual", &block->residual);
}

void take(AttentionBlock* block, Setting& setting) {
  setting.field("num_heads", &block->num_heads);
  setting.field("num_kv_heads", &block->num_kv_heads);
  setting.field("head_dim", &block->head_dim);
  setting.field("softmax_scale", &block->softmax_scale);
  setting.field("norm", &block->norm);
  setting.field("qk_norm", &block->qk_norm);
  setting.field("qk_norm_whole", &block->qk_norm_whole);
  setting.field("qk_norm_each", &block->qk_norm_each);
  setting.field("qk_norm_last", &block->qk_norm_last);
  setting.field("positions", &block->positions);
  setting.field("qkv_bias", &block->qkv_bias);
  setting.field("out_bias", &block->out_bias);
  setting.field("softcap", &block->softcap);
  setting.field("window", &block->window);
  setting.field("prefix_mask", &block->prefix_mask);
  setting.field("sinks", &block->sinks);
  setting.field("qkv", &block->qkv);
  setting.field("out", &block->out);
  setting.field("kv_format", &block->kv_format);
  setting.field("adapters", &block->adapters);
}

void take(LatentAttentionBlock* block, Setting& setting) {
  setting.field("num_heads", &block->num_heads);
  setting.field("kv_lora_rank", &block->kv_lora_rank);
  setting.field("qk_nope_head_dim", &block->qk_nope_head_dim);
  setting.field("qk_rope_head_dim", &block->qk_rope_head_dim);
  setting.field("v_head_dim", &block->v_head_dim);
  setting.field("softmax_scale", &block->softmax_scale);
  setting.field("q_lora_rank", &block->q_lora_rank);
  setting.field("norm", &block->norm);
  setting.field("q_a_norm", &block->q_a_norm);
  setting.field("kv_a_norm", &block->kv_a_norm);
  setting.field("positions", &block->positions);
  setting.field("a_bias", &block->a_bias);
  setting.field("out_bias", &block->out_bias);
  setting.field("form", &block->form);
  setting.field("qkv_a", &block->qkv_a);
  setting.field("q_b", &block->q_b);
  setting.field("out", &block->out);
  setting.field("kv_format", &block->kv_format);
  setting.field("adapters", &block->adapters);
}

void take(MlpBlock* block, Setting& setting) {
  setting.field("intermediate_size", &block->intermediate_size);
  setting.field("activation", &block->activation);
  setting.field("norm", &block->norm);
  setting.field("up_bias", &block->up_bias);
  setting.field("down_bias", &block->down_bias);
  setting.field("parallel", &block->parallel);
  setting.field("gate_up", &block->gate_up);
  setting.field("down", &block->down);
  setting.field("adapters", &block->adapters);
}

void take(ExpertBlock* block, Setting& setting) {
  setting.field("router", &block->router);
  setting.field("intermediate_size", &block->intermediate_size);
  setting.field("activation", &block->activation);
  setting.field("norm", &block->norm);
  setting.field("up_bias", &block->up_bias);
  setting.field("down_bias", &block->down_bias);
  setting.field("shared_size", &block->shared_size);
  setting.field("shared_gate", &block->shared_gate);
  setting.field("gate_up", &block->gate_up);
  setting.field("down", &block->down);
  setting.field("shared_gate_up", &block->shared_gate_up);
  setting.field("shared_down", &block->shared_down);
}

void check(const AttentionBlock& block) {
  check_heads(block.num_heads, block.num_kv_heads, block.head_dim);
  check_softmax_scale(block.softmax_scale);
  // What small operators alone compute (predict/ops/composed.py).
  const Norm& norm = block.qk_norm;
  if (norm.is_there && (norm.kind != NormKind::kRms || norm.bias)) {
    fail("blocks: qk_norm is a layer norm or has a bias (allowed: an RMS norm without)");
  }
  if (block.qk_norm_each || block.prefix_mask || block.positions.two_dimensional) {
    fail("blocks: a block has qk_norm_each, prefix_mask or two-dimensional positions (allowed: " +
         std::string("none of these)"));
  }
}

void check(const LatentAttentionBlock& block) {
  const int64_t sizes[] = {block.num_heads, block.kv_lora_rank, block.qk_nope_head_dim,
                           block.qk_rope_head_dim, block.v_head_dim};
  if (*std::min_element(std::begin(sizes), std::end(sizes)) < 1 || block.q_lora_rank < 0) {
    fail("blocks: num_heads " + std::to_string(block.num_heads) + ", kv_lora_rank " +
         std::to_string(block.kv_lora_rank) + ", qk_nope_head_dim " +
         std::to_string(block.qk_nope_head_dim) + ", qk_rope_head_dim " +
         std::to_string(block.qk_rope_head_dim) + ", v_head_dim " +
         std::to_string(block.v_head_dim) + ", q_lora_rank " + std::to_string(block.q_lora_rank) +
         " (allowed: 1 and more, q_lora_rank 0 too)");
  }
  check_softmax_scale(block.softmax_scale);
  if (!block.kv_a_norm.is_there || block.q_a_norm.is_there != (block.q_lora_rank > 0)) {
    fail("blocks: kv_a_norm is not there, or q_a_norm without q_lora_rank, or that without it");
  }
  const Positions& positions = block.positions;
  if (positions.kind != PositionKind::kRotary || positions.two_dimensional ||
      positions.query_table >= 0) {
    fail("blocks: latents have other positions (allowed: rotary, one table, one dimension)");
  }
  if (block.kv_format != KvFormat::kDense && block.kv_format != KvFormat::kFp8) {
    fail("blocks: latents have kv_format " + std::string(kv_format_info(block.kv_format).name) +
         " (allowed: dense, fp8)");
  }
}

void check_intermediate_size(int64_t size) {
  if (size >= 1) return;
  fail("blocks: intermediate_size is " + std::to_string(size) + " (allowed: 1 and more)");
}

void check(const MlpBlock& block) {
  check_intermediate_size(block.intermediate_size);
  if (!block.activation.is_plain()) {
    fail("blocks: an MLP's activation has a clamp, a slope or an up_offset (allowed: experts')");
  }
}

void check(const ExpertBlock& block) {
  check_intermediate_size(block.intermediate_size);
  const Router& r = block.router;
  if (r.num_experts < 1 || r.num_experts > kMaxExperts) {
    fail("blocks: router.num_experts is " + std::to_string(r.num_experts) + " (allowed: 1 to " +
         std::to_string(kMaxExperts) + ")");
  }
  if (r.num_groups < 1 || r.num_experts % r.num_groups != 0 || r.top_groups < 1 ||
      r.top_groups > r.num_groups) {
    fail("blocks: router.num_groups is " + std::to_string(r.num_groups) + " of " +
         std::to_string(r.num_experts) + " experts, top_groups " + std::to_string(r.top_groups) +
         " (allowed: divisors of num_experts; 1 to num_groups)");
  }
  const int64_t most = std::min(kMaxChosen, r.num_experts / r.num_groups * r.top_groups);
  if (r.top_k < 1 || r.top_k > most) {
    fail("blocks: router.top_k is " + std::to_string(r.top_k) + " (allowed: 1 to " +
         std::to_string(most) + ")");
  }
  if (r.group_score == GroupScore::kTopTwo && r.num_experts / r.num_groups < 2) {
    fail("blocks: router.group_score is top_two of groups of one expert (allowed: max)");
  }
  if (block.shared_size < 0) {
    fail("blocks: shared_size is " + std::to_string(block.shared_size) + " (allowed: 0 and more)");
  }
}

// The part of `text` up to `separator`, taken off it.
std::string_view next_part(std::string_view* text, char separator) {
  const size_t end = std::min(text->find(separator), text->size());
  const std::string_view part = text->substr(0, end);
  text->remove_prefix(std::min(end + 1, text->size()));
  return part;
}

template <class Block>
BlockRecord record_of(std::string_view fields) {
  Block block;
  while (!fields.empty()) {
    const std::string_view part = next_part(&fields, ' ');
    const size_t equals = part.find('=');
    if (equals == std::string_view::npos) {
      fail("blocks: '" + std::string(part) + "' is no field (allowed: name=value)");
    }
    Setting setting(part.substr(0, equals), part.substr(equals + 1));
    take(&block, setting);
    take_shared(&block, setting);
    setting.check_taken();
  }
  check(block);
  return block;
}

std::vector<BlockRecord> parsed(std::string_view text) {
  std::vector<BlockRecord> records;
  while (!text.empty()) {
    std::string_view fields = next_part(&text, '|');
    const std::string_view kind = next_part(&fields, ' ');
    if (kind == "attention") {
      records.push_back(record_of<AttentionBlock>(fields));
    } else if (kind == "latent_attention") {
      records.push_back(record_of<LatentAttentionBlock>(fields));
    } else if (kind == "mlp") {
      records.push_back(record_of<MlpBlock>(fields));
    } else if (kind == "experts") {
      records.push_back(record_of<ExpertBlock>(fields));
    } else {
      fail("blocks: kind is '" + std::string(kind) +
           "' (allowed: attention, mlp, experts, latent_attention)");
    }
  }
  return records;
}

}  // namespace

const std::vector<BlockRecord>& block_records(const std::string& text) {
  // A process has a few models, and a model a few texts: one for each run of its layers. Lists stay
  // where they are while threads read them.
  static std::mutex mutex;
  static auto* const known = new std::map<std::string, std::vector<BlockRecord>>;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known->find(text);
  if (found != known->end()) return found->second;
  return known->emplace(text, parsed(text)).first->second;
}

}  // namespace regatta::binding
