// What pictures write: rows of a tower into the table that embeddings read, and rows of a rotary
// table for places in several dimensions.
#pragma once

#include "regatta/types.h"

namespace regatta {

// table[rows[i]] = x[i]; a row outside of the table is refused on a CPU, and skipped on a GPU.
struct PutRowsParams {
  const int32_t* rows = nullptr;  // [num_rows]
  const void* x = nullptr;        // [num_rows, width]
  void* table = nullptr;          // [num_table_rows, width]
  int64_t num_rows = 0;
  int64_t num_table_rows = 0;
  int64_t width = 0;  // elements
  DType dtype = DType::kFloat32;
};

constexpr int kNumAxes = 3;      // time, row, column
constexpr int kMaxAngles = 256;  // of a rotary row

// Row first + t takes angle j (its cosine, and its sine num_angles behind it) from the row
// places[t, axes[j]]. Rows that are read lie before `first`.
struct WritePlacesParams {
  float* table = nullptr;           // [num_table_rows, 2 * num_angles]
  const int32_t* places = nullptr;  // [num_places, kNumAxes]
  int64_t num_places = 0;
  int64_t num_table_rows = 0;
  int64_t num_angles = 0;
  int64_t first = 0;
  uint8_t axes[kMaxAngles] = {};  // of each angle
};

namespace cpu {
Status put_rows(const PutRowsParams& params);
Status write_places(const WritePlacesParams& params);
}  // namespace cpu

}  // namespace regatta
