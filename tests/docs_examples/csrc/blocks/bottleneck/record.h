// The records of predict.nn.kinds.bottleneck. Made by csrc/make_records.py: do not edit.
#pragma once

#include "regatta/kv_format.h"
#include "regatta/record_parts.h"
#include "regatta/scheme.h"

#define TAKE(name) setting.field(#name, &to->name)

namespace regatta {

struct BottleneckFields {
  int64_t size = 0;
  Norm norm, post_norm;
  Placement post_norm_of = Placement::kOutput;
  Residual residual;
  SchemeId down = SchemeId::kDense, up = SchemeId::kDense;
  bool adapters = false;
};

template <class Setting>
void take(BottleneckFields* to, Setting& setting) {
  TAKE(size), TAKE(norm), TAKE(post_norm), TAKE(post_norm_of), TAKE(residual), TAKE(down), TAKE(up),
      TAKE(adapters);
}

}  // namespace regatta

#undef TAKE
