// What pictures write: a tower's rows into the table that embeddings read, and rows of the rotary
// table for tokens with places in several dimensions. See regatta/picture_rows.h.
//
// Architectures: all; any dtype. One thread per 16 bytes of a row (or per element, when rows are
// not a multiple of 16 bytes), or per angle. Bound: bytes read and written.
#include <string>

#include "cuda/common.cuh"
#include "regatta/cuda_ops.h"

namespace regatta::cuda {
namespace {

constexpr int kThreads = 256;

// Unit is 16 bytes or one element.
template <class Unit>
__global__ void __launch_bounds__(kThreads)
    put_rows_kernel(const int32_t* rows, const Unit* x, Unit* table, int64_t num_units,
                    int64_t num_table_rows, int units_per_row) {
  pdl_trigger();
  pdl_wait();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= num_units) return;
  const int64_t row = rows[i / units_per_row];
  if (row < 0 || row >= num_table_rows) return;
  table[row * units_per_row + i % units_per_row] = x[i];
}

// A place outside of the rows that are read gives a row of row 0's.
__global__ void __launch_bounds__(kThreads) write_places_kernel(const WritePlacesParams p) {
  pdl_trigger();
  pdl_wait();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.num_places * p.num_angles) return;
  const int64_t t = i / p.num_angles, j = i % p.num_angles;
  int64_t place = p.places[t * kNumAxes + p.axes[j]];
  if (place < 0 || place >= p.first) place = 0;
  const float* const from = p.table + place * 2 * p.num_angles;
  float* const to = p.table + (p.first + t) * 2 * p.num_angles;
  to[j] = from[j];
  to[p.num_angles + j] = from[p.num_angles + j];
}

template <class Unit>
Status put(const PutRowsParams& p, int64_t units_per_row, const Launch& launch_on) {
  const int64_t num_units = p.num_rows * units_per_row;
  return launch(put_rows_kernel<Unit>, {launch_on, ceil_div(num_units, kThreads), kThreads},
                "put_rows", p.rows, static_cast<const Unit*>(p.x), static_cast<Unit*>(p.table),
                num_units, p.num_table_rows, static_cast<int>(units_per_row));
}

}  // namespace

Status put_rows(const PutRowsParams& p, const Launch& launch_on) {
  if (p.num_rows == 0 || p.width == 0) return {};
  const int64_t bytes = p.width * dtype_size(p.dtype);
  if (bytes % 16 == 0) return put<uint4>(p, bytes / 16, launch_on);
  return dtype_size(p.dtype) == 4 ? put<uint32_t>(p, p.width, launch_on)
                                  : put<uint16_t>(p, p.width, launch_on);
}

Status write_places(const WritePlacesParams& p, const Launch& launch_on) {
  if (p.num_places == 0) return {};
  return launch(write_places_kernel,
                {launch_on, ceil_div(p.num_places * p.num_angles, kThreads), kThreads},
                "write_places", p);
}

}  // namespace regatta::cuda
