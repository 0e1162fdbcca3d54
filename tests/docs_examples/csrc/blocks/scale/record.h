// The record of predict.nn.kinds.scale. Made by csrc/make_records.py: do not edit.
#pragma once

#include "regatta/record_parts.h"

#define TAKE(name) setting.field(#name, &to->name)

namespace regatta {

struct ScaleFields {
  float factor = 1.0f;
  Norm norm, post_norm;
  Placement post_norm_of = Placement::kOutput;
  Residual residual;
};

template <class Setting>
void take(ScaleFields* to, Setting& setting) {
  TAKE(factor), TAKE(norm), TAKE(post_norm), TAKE(post_norm_of), TAKE(residual);
}

}  // namespace regatta

#undef TAKE
