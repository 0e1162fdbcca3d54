// Rows of a matrix by index: token embedding (scaled, and with rows of learned positions added,
// where a model has that, or rows of pictures in their place), and the rows that logits are
// computed for; and the borders of spans of one row.
//
// Architectures: all; any dtype. One thread per 16 bytes (or per element, when rows are not a
// multiple of 16 bytes). Bound: bytes read and written.
#include <type_traits>

#include "cuda/common.cuh"
#include "regatta/cuda_ops.h"

namespace regatta::cuda {
namespace {

constexpr int kThreads = 256;

// Unit is 16 bytes or one element.
template <class Unit>
__global__ void __launch_bounds__(kThreads)
    gather_rows_kernel(const int32_t* row_ids, const Unit* source, Unit* out, int64_t num_units,
                       int64_t num_source_rows, int units_per_row) {
  pdl_trigger();
  pdl_wait();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= num_units) return;
  const int64_t row = i / units_per_row, column = i % units_per_row;
  const int id = row_ids[row];
  out[i] = id >= 0 && id < num_source_rows
               ? source[id * static_cast<int64_t>(units_per_row) + column]
               : Unit{};
}

// One thread per 16 bytes (kVector) or element: scale * token's row + position's row, rounded once;
// or a picture's row, as it is.
template <class T, bool kVector>
__global__ void __launch_bounds__(kThreads)
    embedding_kernel(const EmbeddingParams p, int64_t num_units, int units_per_row) {
  constexpr int kUnit = kVector ? Vec16<T>::kSize : 1;
  pdl_trigger();
  pdl_wait();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= num_units) return;
  const int64_t row = i / units_per_row, column = i % units_per_row * kUnit;
  float sum[kUnit] = {};
  const auto add = [&](const void* table, int64_t num_rows, int64_t id, float scale) {
    if (id < 0 || id >= num_rows) return;
    const T* const from = static_cast<const T*>(table) + id * p.hidden_size + column;
    if constexpr (kVector) {
      const Vec16<T> x = load16(from);
#pragma unroll
      for (int e = 0; e < kUnit; ++e) sum[e] = fmaf(scale, x.get(e), sum[e]);
    } else {
      sum[0] = fmaf(scale, Traits<T>::to_float(*from), sum[0]);
    }
  };
  const int64_t image = p.image_table == nullptr ? -1 : p.image_rows[row];
  if (image >= 0) {
    add(p.image_table, p.num_image_rows, image, 1.f);
  } else {
    add(p.weight, p.vocab_size, p.token_ids[row], p.scale);
  }
  if (image < 0 && p.position_table != nullptr) {
    add(p.position_table, p.num_positions, p.positions[row], 1.f);
  }
  T* const out = static_cast<T*>(p.out) + i * kUnit;
  if constexpr (kVector) {
    Vec16<T> x;
#pragma unroll
    for (int e = 0; e < kUnit; ++e) x.set(e, sum[e]);
    store16(out, x);
  } else {
    *out = Traits<T>::from_float(sum[0]);
  }
}

__global__ void __launch_bounds__(kThreads) count_up_kernel(int32_t* out, int64_t count) {
  pdl_trigger();
  pdl_wait();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) out[i] = static_cast<int32_t>(i);
}

template <class Unit>
Status run(const GatherRowsParams& p, int64_t units_per_row, const Launch& launch_on) {
  const int64_t num_units = p.num_rows * units_per_row;
  return launch(gather_rows_kernel<Unit>, {launch_on, ceil_div(num_units, kThreads), kThreads},
                "gather_rows", p.row_ids, static_cast<const Unit*>(p.source),
                static_cast<Unit*>(p.out), num_units, p.num_source_rows,
                static_cast<int>(units_per_row));
}

}  // namespace

Status gather_rows(const GatherRowsParams& params, const Launch& launch_on) {
  if (params.num_rows == 0 || params.row_size == 0) return {};
  const int64_t bytes = params.row_size * dtype_size(params.dtype);
  if (bytes % 16 == 0) return run<uint4>(params, bytes / 16, launch_on);
  switch (dtype_size(params.dtype)) {
    case 4:
      return run<uint32_t>(params, params.row_size, launch_on);
    case 2:
      return run<uint16_t>(params, params.row_size, launch_on);
  }
  return Status::error(std::string("gather_rows: dtype ") + dtype_name(params.dtype) +
                       " is not supported (allowed: float32, bfloat16, float16)");
}

Status count_up(int32_t* out, int64_t count, const Launch& launch_on) {
  return launch(count_up_kernel, {launch_on, ceil_div(count, kThreads), kThreads}, "count_up", out,
                count);
}

Status embedding(const EmbeddingParams& params, const Launch& launch_on) {
  if (params.packed) {
    return Status::error(
        "embedding: packed weights are a CPU layout; pass [vocab_size, hidden_size]");
  }
  if (params.scale != 1.f || params.position_table != nullptr || params.image_table != nullptr) {
    if (params.num_tokens == 0 || params.hidden_size == 0) return {};
    return dispatch_dtype(params.dtype, "embedding", [&](auto* t) {
      using T = std::remove_pointer_t<decltype(t)>;
      constexpr int kUnit = Vec16<T>::kSize;
      const bool vector = params.hidden_size % kUnit == 0;
      const int64_t units = vector ? params.hidden_size / kUnit : params.hidden_size;
      const int64_t num_units = params.num_tokens * units;
      return launch(vector ? embedding_kernel<T, true> : embedding_kernel<T, false>,
                    {launch_on, ceil_div(num_units, kThreads), kThreads}, "embedding", params,
                    num_units, static_cast<int>(units));
    });
  }
  GatherRowsParams rows;
  rows.row_ids = params.token_ids;
  rows.source = params.weight;
  rows.out = params.out;
  rows.num_rows = params.num_tokens;
  rows.num_source_rows = params.vocab_size;
  rows.row_size = params.hidden_size;
  rows.dtype = params.dtype;
  return gather_rows(rows, launch_on);
}

}  // namespace regatta::cuda
