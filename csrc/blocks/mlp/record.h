// The records of predict.nn.kinds.mlp. Made by csrc/make_records.py: do not edit.
#pragma once

#include "regatta/kv_format.h"
#include "regatta/record_parts.h"
#include "regatta/scheme.h"

#define TAKE(name) setting.field(#name, &to->name)

namespace regatta {

struct MlpFields {
  int64_t intermediate_size = 0;
  Activation activation;
  Norm norm;
  bool up_bias = false, down_bias = false, parallel = false;
  Norm post_norm;
  Placement post_norm_of = Placement::kOutput;
  Residual residual;
  bool partial = false, joins = false;
  SchemeId gate_up = SchemeId::kDense, down = SchemeId::kDense;
  bool adapters = false, composed = false;
};

template <class Setting>
void take(MlpFields* to, Setting& setting) {
  TAKE(intermediate_size), TAKE(activation), TAKE(norm), TAKE(up_bias), TAKE(down_bias),
      TAKE(parallel), TAKE(post_norm), TAKE(post_norm_of), TAKE(residual), TAKE(partial),
      TAKE(joins), TAKE(gate_up), TAKE(down), TAKE(adapters), TAKE(composed);
}

}  // namespace regatta

#undef TAKE
