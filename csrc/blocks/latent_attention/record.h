// The records of predict.nn.kinds.latent_attention. Made by csrc/make_records.py: do not edit.
#pragma once

#include "regatta/kv_format.h"
#include "regatta/record_parts.h"
#include "regatta/scheme.h"

namespace regatta {

enum class LatentForm : uint8_t { kCheaper, kAbsorbed, kExpanded };
inline constexpr const char* kLatentFormNames[] = {"cheaper", "absorbed", "expanded"};
constexpr const auto& names_of(LatentForm) { return kLatentFormNames; }
constexpr int kNumLatentForms = 3;

struct LatentAttentionFields {
  int64_t num_heads = 0, kv_lora_rank = 0, qk_nope_head_dim = 0, qk_rope_head_dim = 0;
  int64_t v_head_dim = 0;
  float softmax_scale = 0.0f;
  int64_t q_lora_rank = 0;
  Norm norm, q_a_norm, kv_a_norm;
  Positions positions = [] {
    Positions of;
    of.interleaved = true;
    return of;
  }();
  bool a_bias = false, out_bias = false;
  LatentForm form = LatentForm::kCheaper;
  Norm post_norm;
  Placement post_norm_of = Placement::kOutput;
  Residual residual;
  SchemeId qkv_a = SchemeId::kDense, q_b = SchemeId::kDense, out = SchemeId::kDense;
  KvFormat kv_format = KvFormat::kDense;
  bool adapters = false;
};

template <class Setting>
void take(LatentAttentionFields* to, Setting& setting) {
  setting.field("num_heads", &to->num_heads);
  setting.field("kv_lora_rank", &to->kv_lora_rank);
  setting.field("qk_nope_head_dim", &to->qk_nope_head_dim);
  setting.field("qk_rope_head_dim", &to->qk_rope_head_dim);
  setting.field("v_head_dim", &to->v_head_dim);
  setting.field("softmax_scale", &to->softmax_scale);
  setting.field("q_lora_rank", &to->q_lora_rank);
  setting.field("norm", &to->norm);
  setting.field("q_a_norm", &to->q_a_norm);
  setting.field("kv_a_norm", &to->kv_a_norm);
  setting.field("positions", &to->positions);
  setting.field("a_bias", &to->a_bias);
  setting.field("out_bias", &to->out_bias);
  setting.field("form", &to->form);
  setting.field("post_norm", &to->post_norm);
  setting.field("post_norm_of", &to->post_norm_of);
  setting.field("residual", &to->residual);
  setting.field("qkv_a", &to->qkv_a);
  setting.field("q_b", &to->q_b);
  setting.field("out", &to->out);
  setting.field("kv_format", &to->kv_format);
  setting.field("adapters", &to->adapters);
}

}  // namespace regatta
