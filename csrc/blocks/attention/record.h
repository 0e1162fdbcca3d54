// The records of predict.nn.kinds.attention. Made by csrc/make_records.py: do not edit.
#pragma once

#include "regatta/kv_format.h"
#include "regatta/record_parts.h"
#include "regatta/scheme.h"

namespace regatta {

struct AttentionFields {
  int64_t num_heads = 0, num_kv_heads = 0, head_dim = 0;
  float softmax_scale = 0.0f;
  Norm norm, qk_norm;
  bool qk_norm_whole = false, qk_norm_each = false;
  Positions positions;
  bool qkv_bias = false, out_bias = false;
  float softcap = 0.0f;
  int64_t window = -1;
  bool prefix_mask = false, sinks = false;
  Norm post_norm;
  Placement post_norm_of = Placement::kOutput;
  Residual residual;
  SchemeId qkv = SchemeId::kDense, out = SchemeId::kDense;
  KvFormat kv_format = KvFormat::kDense;
  bool adapters = false;
};

template <class Setting>
void take(AttentionFields* to, Setting& setting) {
  setting.field("num_heads", &to->num_heads);
  setting.field("num_kv_heads", &to->num_kv_heads);
  setting.field("head_dim", &to->head_dim);
  setting.field("softmax_scale", &to->softmax_scale);
  setting.field("norm", &to->norm);
  setting.field("qk_norm", &to->qk_norm);
  setting.field("qk_norm_whole", &to->qk_norm_whole);
  setting.field("qk_norm_each", &to->qk_norm_each);
  setting.field("positions", &to->positions);
  setting.field("qkv_bias", &to->qkv_bias);
  setting.field("out_bias", &to->out_bias);
  setting.field("softcap", &to->softcap);
  setting.field("window", &to->window);
  setting.field("prefix_mask", &to->prefix_mask);
  setting.field("sinks", &to->sinks);
  setting.field("post_norm", &to->post_norm);
  setting.field("post_norm_of", &to->post_norm_of);
  setting.field("residual", &to->residual);
  setting.field("qkv", &to->qkv);
  setting.field("out", &to->out);
  setting.field("kv_format", &to->kv_format);
  setting.field("adapters", &to->adapters);
}

}  // namespace regatta
