// The records of predict.nn.kinds.mlp. Made by csrc/make_records.py: do not edit.
#pragma once

#include "regatta/kv_format.h"
#include "regatta/record_parts.h"
#include "regatta/scheme.h"

namespace regatta {

struct MlpFields {
  int64_t intermediate_size = 0;
  Activation activation;
  Norm norm;
  bool up_bias = false, down_bias = false, parallel = false;
  Norm post_norm;
  Placement post_norm_of = Placement::kOutput;
  Residual residual;
  SchemeId gate_up = SchemeId::kDense, down = SchemeId::kDense;
  bool adapters = false;
};

template <class Setting>
void take(MlpFields* to, Setting& setting) {
  setting.field("intermediate_size", &to->intermediate_size);
  setting.field("activation", &to->activation);
  setting.field("norm", &to->norm);
  setting.field("up_bias", &to->up_bias);
  setting.field("down_bias", &to->down_bias);
  setting.field("parallel", &to->parallel);
  setting.field("post_norm", &to->post_norm);
  setting.field("post_norm_of", &to->post_norm_of);
  setting.field("residual", &to->residual);
  setting.field("gate_up", &to->gate_up);
  setting.field("down", &to->down);
  setting.field("adapters", &to->adapters);
}

}  // namespace regatta
