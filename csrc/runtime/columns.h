// Tables of predict/ops/columns.py. Made by csrc/make_columns.py: do not edit.
#pragma once

#include "runtime/checks.h"

namespace regatta::runtime {

// How a row of logits is drawn from (regatta/sample.h). Rows of a table [10, P] int32.
struct Choices {
  int64_t num_columns;  // P
  float* temperature;
  int32_t* top_k;
  float* top_p;
  float* min_p;
  int64_t* seed;
  int64_t* offset;
  float* typical_p;
  int32_t* num_drafts;
};

inline Choices choices_of(Reader& read, const TensorView& table) {
  auto* const base = read.values<int32_t>(table, "choices", {10, -1});
  const int64_t stride = table.shape[1];
  return {stride,
          reinterpret_cast<float*>(base + 0 * stride),
          reinterpret_cast<int32_t*>(base + 1 * stride),
          reinterpret_cast<float*>(base + 2 * stride),
          reinterpret_cast<float*>(base + 3 * stride),
          reinterpret_cast<int64_t*>(base + 4 * stride),
          reinterpret_cast<int64_t*>(base + 6 * stride),
          reinterpret_cast<float*>(base + 8 * stride),
          reinterpret_cast<int32_t*>(base + 9 * stride)};
}

// How a row of logits is changed before (regatta/adjust_logits.h). Rows of a table [8, P] int32.
struct Penalties {
  int64_t num_columns;  // P
  float* repetition;
  float* presence;
  float* frequency;
  int32_t* slot;
  int32_t* length;
  int32_t* num_prompt;
  int32_t* num_new;
  int32_t* no_repeat_ngram_size;
};

inline Penalties penalties_of(Reader& read, const TensorView& table) {
  auto* const base = read.values<int32_t>(table, "penalties", {8, -1});
  const int64_t stride = table.shape[1];
  return {stride,
          reinterpret_cast<float*>(base + 0 * stride),
          reinterpret_cast<float*>(base + 1 * stride),
          reinterpret_cast<float*>(base + 2 * stride),
          reinterpret_cast<int32_t*>(base + 3 * stride),
          reinterpret_cast<int32_t*>(base + 4 * stride),
          reinterpret_cast<int32_t*>(base + 5 * stride),
          reinterpret_cast<int32_t*>(base + 6 * stride),
          reinterpret_cast<int32_t*>(base + 7 * stride)};
}

}  // namespace regatta::runtime
