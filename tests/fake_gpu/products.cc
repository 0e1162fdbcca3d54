// The products of regatta/gemm.h and what prepares their weights, as plain loops. See kernels.cc.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "kernel.h"
#include "regatta/cuda_ops.h"
#include "regatta/gemm.h"

namespace regatta::cuda {
namespace {

float dot(const float* x, const float* y, int64_t size) {
  constexpr int kLanes = 16;  // sums side by side, for the compiler's vectors
  float sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] += x[i + lane] * y[i + lane];
  }
  float sum = 0.f;
  for (; i < size; ++i) sum += x[i] * y[i];
  for (const float each : sums) sum += each;
  return sum;
}

// Values as floats: where they lie, or in `room`.
template <class T>
const float* floats(const T* values, int64_t size, std::vector<float>* room) {
  if constexpr (std::is_same_v<T, float>) {
    return values;
  } else {
    room->resize(size);
    for (int64_t i = 0; i < size; ++i) (*room)[i] = to_float(values[i]);
    return room->data();
  }
}

template <class T, class Out>
void finish(const GemmParams& p, const std::vector<float>& products) {
  const int64_t width = p.gated ? p.out_features / 2 : p.out_features;
  const int64_t columns = gemm_sumsq_columns(p.num_rows);
  const int64_t num_sums = ceil_div(p.out_features, columns);
  const auto value = [](const void* values, int64_t i) {
    return values == nullptr ? 0.f : to_float(static_cast<const T*>(values)[i]);
  };
  for (int64_t m = 0; m < p.num_rows; ++m) {
    float scale = 1.f;
    if (p.sumsq != nullptr) {
      float sum = 0.f;
      for (int64_t i = 0; i < p.num_sumsq; ++i) sum += p.sumsq[m * p.num_sumsq + i];
      scale = 1.f / std::sqrt(sum / static_cast<float>(p.in_features) + p.epsilon);
    }
    if (p.sumsq_out != nullptr) std::memset(p.sumsq_out + m * num_sums, 0, num_sums * 4);
    for (int64_t n = 0; n < width; ++n) {
      const float* product = products.data() + m * p.out_features + n;
      float y = scale * product[0] + value(p.bias, n);
      if (p.gated) y = y / (1.f + std::exp(-y)) * (scale * product[width] + value(p.bias, width + n));
      y += value(p.residual, m * width + n);
      Out* out = static_cast<Out*>(p.out) + m * width + n;
      from_float(y, out);
      const float kept = to_float(*out);
      if (p.sumsq_out != nullptr) p.sumsq_out[m * num_sums + n / columns] += kept * kept;
    }
  }
}

template <class T>
void multiply(const GemmParams& p) {
  std::vector<float> products(p.num_rows * p.out_features), x_room, weight_room;
  const float* x = floats(static_cast<const T*>(p.x), p.num_rows * p.in_features, &x_room);
  for (int64_t n = 0; n < p.out_features; ++n) {
    const float* weight =
        floats(static_cast<const T*>(p.weight) + n * p.in_features, p.in_features, &weight_room);
    for (int64_t m = 0; m < p.num_rows; ++m) {
      products[m * p.out_features + n] = dot(x + m * p.in_features, weight, p.in_features);
    }
  }
  p.out_dtype == DType::kFloat32 ? finish<T, float>(p, products) : finish<T, T>(p, products);
}

const char kNoCodes[] = "the fake GPU has no products of codes yet";

}  // namespace

Status create_blas(void** blas) {
  *blas = nullptr;  // nothing to say of it: products here need none
  return {};
}

int64_t gemm_scratch_bytes(const GemmParams&) { return 0; }

Status gemm(const GemmParams& params, const GemmResources&, const char*, CUstream_st* stream) {
  if (params.operands != GemmOperands::kDense) return Status::error(kNoCodes);
  return queue(stream, "gemm", [p = params] {
    return dispatch(p.dtype, "gemm", [&](auto* type) {
      multiply<ElementOf<decltype(type)>>(p);
      return Status();
    });
  });
}

Status row_sumsq(const void* x, DType dtype, int64_t num_rows, int64_t width, int64_t columns,
                 float* sums, CUstream_st* stream) {
  return queue(stream, "row_sumsq", [=] {
    return dispatch(dtype, "row_sumsq", [&](auto* type) {
      const auto* values = static_cast<const ElementOf<decltype(type)>*>(x);
      const int64_t num_sums = ceil_div(width, columns);
      std::memset(sums, 0, num_rows * num_sums * 4);
      for (int64_t i = 0; i < num_rows * width; ++i) {
        const float value = to_float(values[i]);
        sums[i / width * num_sums + i % width / columns] += value * value;
      }
      return Status();
    });
  });
}

Status fold_norm_weight(void* weight, const void* norm_weight, DType dtype, int64_t out_features,
                        int64_t in_features, CUstream_st* stream) {
  return queue(stream, "fold_norm_weight", [=] {
    return dispatch(dtype, "fold_norm_weight", [&](auto* type) {
      using T = ElementOf<decltype(type)>;
      auto* values = static_cast<T*>(weight);
      const auto* norm = static_cast<const T*>(norm_weight);
      for (int64_t i = 0; i < out_features * in_features; ++i) {
        from_float(to_float(values[i]) * to_float(norm[i % in_features]), values + i);
      }
      return Status();
    });
  });
}

Status pack_dense(const PackDenseParams& params, const Launch& on) {
  return queue(on.stream, "pack_dense", [p = params] {
    return dispatch(p.from, "pack_dense", [&](auto* from) {
      return dispatch(p.to, "pack_dense", [&](auto* to) {
        const auto* weight = static_cast<const ElementOf<decltype(from)>*>(p.weight);
        auto* packed = static_cast<ElementOf<decltype(to)>*>(p.packed);
        for (int64_t n = 0; n < p.out_features; ++n) {
          for (int64_t k = 0; k < p.in_features; ++k) {
            const int64_t at = p.transposed ? n * p.in_features + k : k * p.out_features + n;
            from_float(to_float(weight[at]), packed + n * p.in_features + k);
          }
        }
        return Status();
      });
    });
  });
}

Status copy_bytes(void* to, const void* from, int64_t bytes, CUstream_st* stream) {
  return queue(stream, "copy_bytes", [=] {
    std::memcpy(to, from, bytes);
    return Status();
  });
}

Status repeat_scale(const float* scale, int64_t count, float* out, int64_t num_values,
                    CUstream_st* stream) {
  return queue(stream, "repeat_scale", [=] {
    for (int64_t i = 0; i < num_values; ++i) out[i] = scale[count == 1 ? 0 : i];
    return Status();
  });
}

// Quantized weights: refused.

Status gemm_quantized(const GemmParams&, const QuantizeRowsParams&, const GemmResources&,
                      CUstream_st*) {
  return Status::error(kNoCodes);
}
Status gemm_to_codes(const GemmParams&, const QuantizeRowsParams&, const QuantizeRowsParams&,
                     const GemmResources&, bool*, CUstream_st*) {
  return Status::error(kNoCodes);
}
Status gather_columns(const void*, const int32_t*, void*, int64_t, int64_t, CUstream_st*) {
  return Status::error(kNoCodes);
}
Status unpack_weight(const GemmParams&, void*, CUstream_st*) { return Status::error(kNoCodes); }
Status pack_weight(const PackWeightParams&, CUstream_st*) { return Status::error(kNoCodes); }
int64_t packed_group_size(GemmOperands, int64_t, int64_t) { return 0; }
int64_t packed_unit_group_size(int64_t) { return 0; }
bool packed_unit_has_groups(int64_t) { return false; }
int64_t packed_weight_bytes(int64_t, int64_t, GemmOperands, int64_t) { return 0; }

}  // namespace regatta::cuda
