// The records of predict.nn.kinds.attention. Made by csrc/make_records.py: do not edit.
#pragma once

#include "regatta/kv_format.h"
#include "regatta/record_parts.h"
#include "regatta/scheme.h"

#define TAKE(name) setting.field(#name, &to->name)

namespace regatta {

struct AttentionFields {
  int64_t num_heads = 0, num_kv_heads = 0, head_dim = 0;
  float softmax_scale = 0.0f;
  Norm norm, qk_norm;
  bool qk_norm_whole = false, qk_norm_each = false, qk_norm_last = false;
  Positions positions;
  bool qkv_bias = false, out_bias = false;
  float softcap = 0.0f;
  int64_t window = -1;
  bool prefix_mask = false, sinks = false, out_gate = false;
  Norm post_norm;
  Placement post_norm_of = Placement::kOutput;
  Residual residual;
  bool partial = false;
  int64_t all_heads = 0, first_head = 0;
  SchemeId qkv = SchemeId::kDense, out = SchemeId::kDense;
  KvFormat kv_format = KvFormat::kDense;
  bool adapters = false, composed = false;
};

template <class Setting>
void take(AttentionFields* to, Setting& setting) {
  TAKE(num_heads), TAKE(num_kv_heads), TAKE(head_dim), TAKE(softmax_scale), TAKE(norm),
      TAKE(qk_norm), TAKE(qk_norm_whole), TAKE(qk_norm_each), TAKE(qk_norm_last), TAKE(positions),
      TAKE(qkv_bias), TAKE(out_bias), TAKE(softcap), TAKE(window), TAKE(prefix_mask), TAKE(sinks),
      TAKE(out_gate), TAKE(post_norm), TAKE(post_norm_of), TAKE(residual), TAKE(partial),
      TAKE(all_heads), TAKE(first_head), TAKE(qkv), TAKE(out), TAKE(kv_format), TAKE(adapters),
      TAKE(composed);
}

}  // namespace regatta

#undef TAKE
