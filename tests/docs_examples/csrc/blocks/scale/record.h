// The record of predict.nn.kinds.scale. Made by csrc/make_records.py: do not edit.
#pragma once

#include "regatta/record_parts.h"

namespace regatta {

struct ScaleFields {
  float factor = 1.0f;
  Norm norm;
  Norm post_norm;
  Placement post_norm_of = Placement::kOutput;
  Residual residual;
};

template <class Setting>
void take(ScaleFields* to, Setting& setting) {
  setting.field("factor", &to->factor);
  setting.field("norm", &to->norm);
  setting.field("post_norm", &to->post_norm);
  setting.field("post_norm_of", &to->post_norm_of);
  setting.field("residual", &to->residual);
}

}  // namespace regatta
