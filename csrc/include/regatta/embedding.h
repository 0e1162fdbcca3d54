// Rows of a table, by token id, and those of a learned table of positions added to them; or rows of
// pictures in their place.
#pragma once

#include "regatta/types.h"

namespace regatta {

struct EmbeddingParams {
  const int32_t* token_ids;  // [num_tokens], each in [0, vocab_size)
  const void* weight;        // [vocab_size, hidden_size], or packed: the dense LM head
  void* out;                 // [num_tokens, hidden_size]
  int64_t num_tokens;
  int64_t vocab_size;  // of the packed head: rounded up to a multiple of 32
  int64_t hidden_size;
  bool packed;
  DType dtype;
  float scale = 1.0f;  // of the token's row
  // Added, where there are any: row positions[i].
  const void* position_table = nullptr;  // [num_positions, hidden_size]
  const int32_t* positions = nullptr;    // [num_tokens]
  int64_t num_positions = 0;
  // Where there are any: token i is row image_rows[i], as it is, unless that is below 0.
  const void* image_table = nullptr;    // [num_image_rows, hidden_size]
  const int32_t* image_rows = nullptr;  // [num_tokens]
  int64_t num_image_rows = 0;
};

namespace cpu {
Status embedding(const EmbeddingParams& params);
}

}  // namespace regatta
