// The records of predict.nn.kinds.latent_attention. Made by csrc/make_records.py: do not edit.
#pragma once

#include "regatta/kv_format.h"
#include "regatta/record_parts.h"
#include "regatta/scheme.h"

#define TAKE(name) setting.field(#name, &to->name)

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
  bool partial = false;
  SchemeId qkv_a = SchemeId::kDense, q_b = SchemeId::kDense, out = SchemeId::kDense;
  KvFormat kv_format = KvFormat::kDense;
  bool adapters = false;
};

template <class Setting>
void take(LatentAttentionFields* to, Setting& setting) {
  TAKE(num_heads), TAKE(kv_lora_rank), TAKE(qk_nope_head_dim), TAKE(qk_rope_head_dim),
      TAKE(v_head_dim), TAKE(softmax_scale), TAKE(q_lora_rank), TAKE(norm), TAKE(q_a_norm),
      TAKE(kv_a_norm), TAKE(positions), TAKE(a_bias), TAKE(out_bias), TAKE(form), TAKE(post_norm),
      TAKE(post_norm_of), TAKE(residual), TAKE(partial), TAKE(qkv_a), TAKE(q_b), TAKE(out),
      TAKE(kv_format), TAKE(adapters);
}

}  // namespace regatta

#undef TAKE
