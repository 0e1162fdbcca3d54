// residual_out = x + residual;  out = norm(residual_out) * weight + bias, an RMS or a layer norm;
// of all rows, or of rows by index (the ones that logits are computed for). Without weight: 1.
//
// A layer norm takes the mean first, then the squares of what is left: no cancellation.
// Architectures: all; float32, bf16, fp16. One block per row. The row stays in registers between
// the two passes when it fits (16 bytes x kMaxUnits per thread); longer or odd rows are read again.
// Bound: bytes, 2 to 4 rows per token.
#include <algorithm>
#include <type_traits>

#include "cuda/common.cuh"
#include "regatta/cuda_ops.h"

namespace regatta::cuda {
namespace {

constexpr int kMaxUnits = 4;  // 1024 threads x 4 x 8 = 32768 bf16 columns

// Row of x that this block normalises; negative: a row of zeros.
__device__ __forceinline__ int64_t source_row(const int32_t* row_ids, int num_source_rows) {
  if (row_ids == nullptr) return blockIdx.x;
  const int id = row_ids[blockIdx.x];
  return id < num_source_rows ? id : -1;
}

// Registers for v alone: the compiler would keep its elements as floats until they are used again.
template <class T>
__device__ __forceinline__ void keep_packed(Vec16<T>& v) {
  uint4 x = bit_cast<uint4>(v);
  asm volatile("" : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w));
  v = bit_cast<Vec16<T>>(x);
}

// What a norm may do beside an RMS norm's x * scale * weight.
template <class T>
struct More {
  const T* bias;  // or null
  bool layer, plus_one;
  int num_parts, num_weights;  // as NormParams has them

  // Points weight and bias at those of this block's row. Returns whether there are any.
  __device__ __forceinline__ bool seek(const T*& weight, const T*& row_bias, int size) const {
    const int part = blockIdx.x % num_parts;
    const bool has_factor = part < num_weights;
    weight = has_factor && weight != nullptr ? weight + part * size : nullptr;
    row_bias = has_factor && bias != nullptr ? bias + part * size : nullptr;
    return has_factor;
  }
};

// A row is up to kUnits * blockDim.x units of 16 bytes. All of a thread's loads are issued before
// its first store, which the compiler cannot tell from the next load's source. kAdds: there are a
// residual and residual_out, either of which may be null; without them there are registers for more
// blocks. kMore: `more` is read.
template <class T, int kUnits, bool kAdds, bool kMore>
__global__ void __launch_bounds__(1024)
    norm_kernel(const T* x, const T* weight, const T* residual, T* out, T* residual_out,
                const int32_t* row_ids, int num_source_rows, int hidden_size, float epsilon,
                const More<T> more) {
  constexpr int kUnit = Vec16<T>::kSize;
  __shared__ float scratch[32];
  const int num_units = hidden_size / kUnit;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * hidden_size;
  const T* bias = nullptr;
  bool has_factor = true;
  if constexpr (kMore) has_factor = more.seek(weight, bias, hidden_size);
  pdl_trigger();
  Vec16<T> w[kUnits], v[kUnits], r[kAdds ? kUnits : 1];
  auto unit_of = [&](int k) { return static_cast<int>(threadIdx.x + k * blockDim.x); };
  auto load_weight = [&] {
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      if (weight != nullptr && unit_of(k) < num_units) w[k] = load16(weight + unit_of(k) * kUnit);
    }
  };
  if constexpr (kUnits == 1) load_weight();  // a constant: ahead of the wait
  pdl_wait();
  const int64_t source = source_row(row_ids, num_source_rows) * hidden_size;
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    v[k] = Vec16<T>{};
    if constexpr (kAdds) r[k] = Vec16<T>{};
    if (unit_of(k) >= num_units) continue;
    if (source >= 0) v[k] = load16(x + source + unit_of(k) * kUnit);
    if constexpr (kAdds) {
      if (residual != nullptr) r[k] = load16(residual + row + unit_of(k) * kUnit);
    }
  }
  float sum = 0.f;
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    if constexpr (kAdds) {
      if (residual != nullptr) {
#pragma unroll
        for (int e = 0; e < kUnit; ++e) v[k].set(e, v[k].get(e) + r[k].get(e));
      }
      if (residual_out != nullptr && unit_of(k) < num_units) {
        store16(residual_out + row + unit_of(k) * kUnit, v[k]);
      }
    }
#pragma unroll
    for (int e = 0; e < kUnit; ++e) {
      if (kMore && more.layer) {
        sum += v[k].get(e);
      } else {
        sum = fmaf(v[k].get(e), v[k].get(e), sum);
      }
    }
    if constexpr (kUnits > 1) keep_packed(v[k]);
  }
  if constexpr (kUnits > 1) load_weight();
  float mean = 0.f;
  if constexpr (kMore) {
    if (more.layer) {
      __shared__ float mean_scratch[32];
      mean = block_sum(sum, mean_scratch) / hidden_size;
      sum = 0.f;
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        if (unit_of(k) >= num_units) continue;
#pragma unroll
        for (int e = 0; e < kUnit; ++e) {
          const float left = v[k].get(e) - mean;
          sum = fmaf(left, left, sum);
        }
      }
    }
  }
  float scale = rsqrtf(block_sum(sum, scratch) / hidden_size + epsilon);
  if (kMore && !has_factor) mean = 0.f, scale = 1.f;
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    if (unit_of(k) < num_units) {
      Vec16<T> y;
      if constexpr (kMore) {
        Vec16<T> b = {};
        if (bias != nullptr) b = load16(bias + unit_of(k) * kUnit);
#pragma unroll
        for (int e = 0; e < kUnit; ++e) {
          const float factor = weight == nullptr ? 1.f : w[k].get(e) + (more.plus_one ? 1.f : 0.f);
          y.set(e, fmaf((v[k].get(e) - mean) * scale, factor, b.get(e)));
        }
      } else {
#pragma unroll
        for (int e = 0; e < kUnit; ++e) {
          y.set(e, v[k].get(e) * scale * (weight == nullptr ? 1.f : w[k].get(e)));
        }
      }
      store16(out + row + unit_of(k) * kUnit, y);
    }
  }
}

// Any size; reads x and residual twice, of a layer norm three times.
template <class T>
__global__ void __launch_bounds__(1024)
    norm_any_kernel(const T* x, const T* weight, const T* residual, T* out, T* residual_out,
                    const int32_t* row_ids, int num_source_rows, int hidden_size, float epsilon,
                    const More<T> more) {
  __shared__ float scratch[32], mean_scratch[32];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * hidden_size;
  const T* bias;
  const bool has_factor = more.seek(weight, bias, hidden_size);
  pdl_trigger();
  pdl_wait();
  const int64_t source = source_row(row_ids, num_source_rows) * hidden_size;
  auto value = [&](int i) {
    const float a = source >= 0 ? Traits<T>::to_float(x[source + i]) : 0.f;
    if (residual == nullptr) return a;
    return Traits<T>::to_float(Traits<T>::from_float(a + Traits<T>::to_float(residual[row + i])));
  };
  float mean = 0.f, sum = 0.f;
  if (more.layer) {
    for (int i = threadIdx.x; i < hidden_size; i += blockDim.x) sum += value(i);
    mean = block_sum(sum, mean_scratch) / hidden_size;
    sum = 0.f;
  }
  for (int i = threadIdx.x; i < hidden_size; i += blockDim.x) {
    const float v = value(i) - mean;
    sum = fmaf(v, v, sum);
  }
  float scale = rsqrtf(block_sum(sum, scratch) / hidden_size + epsilon);
  if (!has_factor) mean = 0.f, scale = 1.f;
  for (int i = threadIdx.x; i < hidden_size; i += blockDim.x) {
    const float v = value(i);  // before residual_out, which may be the residual itself
    if (residual_out != nullptr) residual_out[row + i] = Traits<T>::from_float(v);
    const float w =
        weight == nullptr ? 1.f : Traits<T>::to_float(weight[i]) + (more.plus_one ? 1.f : 0.f);
    const float y = (v - mean) * scale * w;
    out[row + i] = Traits<T>::from_float(bias == nullptr ? y : y + Traits<T>::to_float(bias[i]));
  }
}

Status run(const NormParams& params, const int32_t* row_ids, int64_t num_source_rows,
           const Launch& launch_on) {
  if (params.num_tokens == 0) return {};
  return dispatch_dtype(params.dtype, "norm", [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    constexpr int kUnit = Vec16<T>::kSize;
    const int64_t units = params.hidden_size / kUnit;
    const bool vector = params.hidden_size % kUnit == 0 && units <= 1024 * kMaxUnits;
    // Few rows: as many threads as units, for latency. Many rows: two units per thread.
    const int64_t per_thread = std::max<int64_t>(
        params.num_tokens <= 264 || is_batch_invariant ? 1 : 2, ceil_div(units, 1024));
    const int kernel_units = per_thread <= 1 ? 1 : per_thread <= 2 ? 2 : 4;
    const bool adds = params.residual != nullptr || params.residual_out != nullptr;
    const More<T> more = {static_cast<const T*>(params.bias), params.kind == NormKind::kLayer,
                          params.plus_one, static_cast<int>(params.num_parts),
                          static_cast<int>(params.num_weights)};
    const bool does_more =
        more.bias != nullptr || more.layer || more.plus_one || more.num_parts > 1;
    const auto of = [&](auto k) {
      if (does_more) {
        return adds ? norm_kernel<T, k.value, true, true> : norm_kernel<T, k.value, false, true>;
      }
      return adds ? norm_kernel<T, k.value, true, false> : norm_kernel<T, k.value, false, false>;
    };
    auto* const kernel = !vector             ? norm_any_kernel<T>
                         : kernel_units == 1 ? of(std::integral_constant<int, 1>())
                         : kernel_units == 2 ? of(std::integral_constant<int, 2>())
                                             : of(std::integral_constant<int, 4>());
    return launch(
        kernel,
        {launch_on, params.num_tokens, vector ? round_up(ceil_div(units, kernel_units), 32) : 256},
        "norm", static_cast<const T*>(params.x), static_cast<const T*>(params.weight),
        static_cast<const T*>(params.residual), static_cast<T*>(params.out),
        static_cast<T*>(params.residual_out), row_ids, static_cast<int>(num_source_rows),
        static_cast<int>(params.hidden_size), params.epsilon, more);
  });
}

}  // namespace

Status norm(const NormParams& params, const Launch& launch_on) {
  return run(params, nullptr, 0, launch_on);
}

Status norm_rows(const NormParams& params, const int32_t* row_ids, int64_t num_source_rows,
                 const Launch& launch_on) {
  return run(params, row_ids, num_source_rows, launch_on);
}

}  // namespace regatta::cuda
