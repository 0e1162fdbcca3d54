// `choices` [10, P] int32 of a step: how tokens are drawn, a column per row of logits.
#pragma once

#include "device.h"

namespace regatta::binding {

// Pointers to its rows, of floats by their bits and of int64s in two rows' space.
struct Choices {
  int64_t num_columns;  // P
  const float* temperature;
  const int32_t* top_k;
  const float *top_p, *min_p;
  const int64_t* seeds;
  int64_t* offsets;
  const float* typical_p;
  const int32_t* num_drafts;  // from a row on: of regatta_verify_window
};

inline Choices choices_of(const paddle::Tensor& tensor, const phi::Place& place) {
  const TensorView columns = checked_view(tensor, "choices", DType::kInt32, {10, -1}, place);
  auto* base = static_cast<int32_t*>(const_cast<void*>(columns.data));
  const int64_t stride = columns.shape[1];
  const auto floats = [=](int row) { return reinterpret_cast<const float*>(base + row * stride); };
  Choices choices;
  choices.num_columns = stride;
  choices.temperature = floats(0);
  choices.top_k = base + stride;
  choices.top_p = floats(2);
  choices.min_p = floats(3);
  choices.seeds = reinterpret_cast<const int64_t*>(base + 4 * stride);
  choices.offsets = reinterpret_cast<int64_t*>(base + 6 * stride);
  choices.typical_p = floats(8);
  choices.num_drafts = base + 9 * stride;
  return choices;
}

}  // namespace regatta::binding
