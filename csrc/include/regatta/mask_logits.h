// Bans the tokens that a mask leaves out.
#pragma once

#include <cstdint>

#include "regatta/types.h"

namespace regatta {

// Of L rows: a token whose bit is 0 gets -inf, all others stay. Bit v % 32 of word v / 32 is that
// of token v, as llguidance and vLLM have them.
struct MaskLogitsParams {
  float* logits = nullptr;         // [L, V], changed in place
  const int32_t* masks = nullptr;  // [L, W], W * 32 >= V; bits from V on are not read
  int64_t num_rows = 0;
  int64_t vocab_size = 0;
  int64_t num_words = 0;  // W
};

namespace cpu {
Status mask_logits(const MaskLogitsParams& params);
}

}  // namespace regatta
