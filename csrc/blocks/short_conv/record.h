// The records of predict.nn.kinds.short_conv. Made by csrc/make_records.py: do not edit.
#pragma once

#include "regatta/kv_format.h"
#include "regatta/record_parts.h"
#include "regatta/scheme.h"

#define TAKE(name) setting.field(#name, &to->name)

namespace regatta {

struct ShortConvFields {
  int64_t size = 0, width = 3;
  Norm norm;
  bool conv_bias = false, bias = false, out_bias = false;
  Norm post_norm;
  Placement post_norm_of = Placement::kOutput;
  Residual residual;
  bool partial = false;
  SchemeId bcx = SchemeId::kDense, out = SchemeId::kDense;
  bool adapters = false;
};

template <class Setting>
void take(ShortConvFields* to, Setting& setting) {
  TAKE(size), TAKE(width), TAKE(norm), TAKE(conv_bias), TAKE(bias), TAKE(out_bias), TAKE(post_norm),
      TAKE(post_norm_of), TAKE(residual), TAKE(partial), TAKE(bcx), TAKE(out), TAKE(adapters);
}

}  // namespace regatta

#undef TAKE
