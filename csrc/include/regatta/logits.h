// The LM head over the rows that are sampled from: norm, then the product, in float32, then bias,
// scale and soft cap.
#pragma once

#include "regatta/scheme.h"
#include "regatta/types.h"

namespace regatta {

struct LogitsParams {
  const void* hidden;       // [num_tokens, hidden_size]
  const void* norm_weight;  // [hidden_size], of an RMS norm; null: hidden is normed already
  const TensorView* head;   // [hidden_size, vocab_size] as the scheme stores it
  int num_head;             // tensors in head
  // [num_logits], each in [0, num_tokens); null: row i for logits i.
  const int32_t* logit_indices;
  float* logits;  // [num_logits, vocab_size]
  int64_t num_tokens;
  int64_t num_logits;
  int64_t hidden_size;
  int64_t vocab_size;
  float epsilon;
  DType dtype;  // of hidden and norm_weight
  SchemeId scheme;
  const void* bias = nullptr;  // [vocab_size] of dtype, or null
  float scale = 1.0f;          // logits = scale * (product + bias)
  float softcap = 0.0f;        // then softcap * tanh(logits / softcap); 0: they stay
};

namespace cpu {
Status logits(const LogitsParams& params);
}

}  // namespace regatta
