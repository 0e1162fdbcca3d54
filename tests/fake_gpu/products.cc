// The products of regatta/gemm.h and what prepares their weights, as plain loops. See kernels.cc.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/gemm/rounding.h"
#include "kernel.h"
#include "regatta/cuda_ops.h"
#include "regatta/gemm.h"
#include "regatta/round_weight.h"
#include "rows.h"

namespace regatta::cuda {
namespace {

constexpr float kInt8Max = 127.f;

float from_e2m1(uint8_t code) {
  constexpr float kMagnitudes[8] = {0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f};
  return code & 8 ? -kMagnitudes[code & 7] : kMagnitudes[code & 7];
}

// A packed weight here: units of 16 rows by 128 columns of codes, a byte each, and behind them,
// where groups have scales, [groups of the unit][16] of scale and zero point.
constexpr int64_t kUnitRows = 16, kUnitColumns = 128, kUnitCodes = kUnitRows * kUnitColumns;

int64_t unit_bytes(GemmOperands operands, int64_t group_size) {
  if (operands == GemmOperands::kWeightInt8) return kUnitCodes;
  return kUnitCodes + kUnitColumns / group_size * kUnitRows * 8;
}

struct UnitPlace {
  int64_t code, scale;  // bytes from the weight's begin; of scale and zero point

  UnitPlace(GemmOperands operands, int64_t group_size, int64_t in_features, int64_t row,
            int64_t column) {
    const int64_t unit = row / kUnitRows * packed_units(in_features) + column / kUnitColumns;
    const int64_t begin = unit * unit_bytes(operands, group_size);
    code = begin + row % kUnitRows * kUnitColumns + column % kUnitColumns;
    scale =
        begin + kUnitCodes + (column % kUnitColumns / group_size * kUnitRows + row % kUnitRows) * 8;
  }
};

float packed_value(const GemmParams& p, int64_t row, int64_t column) {
  const auto* weight = static_cast<const char*>(p.weight);
  const UnitPlace place(p.operands, p.group_size, p.in_features, row, column);
  const auto code = static_cast<float>(static_cast<int8_t>(weight[place.code]));
  if (p.operands == GemmOperands::kWeightInt8) return code * p.weight_scale[row];
  float scale[2];
  std::memcpy(scale, weight + place.scale, 8);
  if (p.operands == GemmOperands::kWeightMxfp4) return from_e2m1(weight[place.code]) * scale[0];
  return (code - scale[1]) * scale[0];
}

// Row `m` of x as floats: where it lies, or in `room`.
template <class T>
const float* x_row(const GemmParams& p, int64_t m, std::vector<float>* room) {
  const int64_t width = p.in_features;
  if (std::is_same_v<T, float> && p.x_scale == nullptr) {
    return static_cast<const float*>(p.x) + m * width;
  }
  room->resize(width);
  for (int64_t k = 0; k < width; ++k) {
    float& value = (*room)[k];
    if (p.x_scale == nullptr) {
      value = to_float(static_cast<const T*>(p.x)[m * width + k]);
      continue;
    }
    const uint8_t code = static_cast<const uint8_t*>(p.x)[m * width + k];
    value = p.operands == GemmOperands::kFp8 ? from_e4m3(code) : static_cast<int8_t>(code);
    value *= p.x_scale[p.scale_rows ? k / kScaleBlock * gemm_block_stride(p.num_rows) + m : m];
  }
  return room->data();
}

template <class T>
const float* weight_row(const GemmParams& p, int64_t n, std::vector<float>* room) {
  const int64_t width = p.in_features;
  const bool dense = p.operands == GemmOperands::kDense;
  if (std::is_same_v<T, float> && dense) return static_cast<const float*>(p.weight) + n * width;
  room->resize(width);
  for (int64_t k = 0; k < width; ++k) {
    float& value = (*room)[k];
    if (dense) {
      value = to_float(static_cast<const T*>(p.weight)[n * width + k]);
    } else if (is_packed(p.operands)) {
      value = packed_value(p, n, k);
    } else {
      const uint8_t code = static_cast<const uint8_t*>(p.weight)[n * width + k];
      value = p.operands == GemmOperands::kFp8 ? from_e4m3(code) : static_cast<int8_t>(code);
      const int64_t blocks = ceil_div(width, kScaleBlock);
      value *= p.weight_scale[p.scale_rows ? n / p.scale_rows * blocks + k / kScaleBlock : n];
    }
  }
  return room->data();
}

// Rows of x, first .. end - 1.
struct Rows {
  int64_t first, end;
};

template <class T, class Out>
void finish(const GemmParams& p, Rows rows, const std::vector<float>& products) {
  const int64_t width = p.gated ? p.out_features / 2 : p.out_features;
  const int64_t columns = gemm_sumsq_columns(p.num_rows);
  const int64_t num_sums = ceil_div(p.out_features, columns);
  const auto value = [](const void* values, int64_t i) {
    return values == nullptr ? 0.f : to_float(static_cast<const T*>(values)[i]);
  };
  for (int64_t m = rows.first; m < rows.end; ++m) {
    float scale = 1.f;
    if (p.sumsq != nullptr) {
      float sum = 0.f;
      for (int64_t i = 0; i < p.num_sumsq; ++i) sum += p.sumsq[m * p.num_sumsq + i];
      scale = 1.f / std::sqrt(sum / static_cast<float>(p.in_features) + p.epsilon);
    }
    if (p.sumsq_out != nullptr) std::memset(p.sumsq_out + m * num_sums, 0, num_sums * 4);
    for (int64_t n = 0; n < width; ++n) {
      const float* product = products.data() + (m - rows.first) * p.out_features + n;
      float y = scale * product[0] + value(p.bias, n);
      if (p.gated)
        y = y / (1.f + std::exp(-y)) * (scale * product[width] + value(p.bias, width + n));
      y += value(p.residual, m * width + n);
      Out* out = static_cast<Out*>(p.out) + m * width + n;
      from_float(y, out);
      const float kept = to_float(*out);
      if (p.sumsq_out != nullptr) p.sumsq_out[m * num_sums + n / columns] += kept * kept;
      if (p.scaled_out != nullptr) {
        from_float(kept * value(p.next_norm_weight, n),
                   static_cast<T*>(p.scaled_out) + m * width + n);
      }
    }
  }
}

template <class T>
void multiply(const GemmParams& p, Rows rows) {
  const int64_t count = rows.end - rows.first;
  std::vector<float> products(count * p.out_features), weight_room;
  std::vector<std::vector<float>> rooms(count);
  std::vector<const float*> x;
  for (int64_t i = 0; i < count; ++i) x.push_back(x_row<T>(p, rows.first + i, &rooms[i]));
  for (int64_t n = 0; n < p.out_features; ++n) {
    const float* weight = weight_row<T>(p, n, &weight_room);
    for (int64_t i = 0; i < count; ++i) {
      products[i * p.out_features + n] = dot(x[i], weight, p.in_features);
    }
  }
  p.out_dtype == DType::kFloat32 ? finish<T, float>(p, rows, products)
                                 : finish<T, T>(p, rows, products);
}

// With the weight of group `g`, whose rows keep their numbers.
GemmParams of_group(const GemmParams& p, int64_t g) {
  const int64_t size = p.operands == GemmOperands::kDense ? dtype_size(p.dtype) : 1;
  const int64_t weight_bytes =
      is_packed(p.operands)
          ? packed_weight_bytes(p.out_features, p.in_features, p.operands, p.group_size)
          : p.out_features * p.in_features * size;
  const int64_t num_scales = p.scale_rows == 0 ? p.out_features
                                               : ceil_div(p.out_features, p.scale_rows) *
                                                     ceil_div(p.in_features, kScaleBlock);
  GemmParams own = p;
  own.weight = static_cast<const char*>(p.weight) + g * weight_bytes;
  if (p.bias != nullptr) {
    own.bias = static_cast<const char*>(p.bias) + g * p.out_features * dtype_size(p.dtype);
  }
  if (p.weight_scale != nullptr) own.weight_scale += g * num_scales;
  return own;
}

template <class T>
Status multiply_groups(const GemmParams& p) {
  int64_t first = 0;
  for (int64_t g = 0; g < p.num_groups; ++g) {
    const int64_t end = p.group_ends[g];
    if (end < first || end > p.num_rows) {
      return Status::error("gemm: group " + std::to_string(g) + " ends at row " +
                           std::to_string(end) + " (allowed: " + std::to_string(first) + " to " +
                           std::to_string(p.num_rows) + ")");
    }
    if (end > first) multiply<T>(of_group(p, g), {first, end});
    first = end;
  }
  if (first == p.num_rows) return {};
  return Status::error("gemm: the last group ends at row " + std::to_string(first) + " of " +
                       std::to_string(p.num_rows));
}

constexpr int64_t kMaxGroups = 512;  // as cuda/gemm/tiles.h

// What no kernel of csrc/cuda/gemm takes either, and functions: gemm_makes_function() has none.
Status check(const GemmParams& p) {
  if (p.activates || (p.gated && p.function != Function::kSilu)) {
    return Status::error("gemm: the fake GPU has no function but a gate's SiLU");
  }
  if (p.gated && (p.residual != nullptr || p.sumsq_out != nullptr)) {
    return Status::error("gemm: a gated product takes no residual and gives no sumsq");
  }
  if (p.num_groups == 0) return {};
  if (p.group_ends == nullptr) return Status::error("gemm: groups of rows need group_ends");
  if (p.num_groups > kMaxGroups) return Status::error("gemm: more than 512 groups of rows");
  if (p.residual != nullptr || p.sumsq != nullptr || p.sumsq_out != nullptr ||
      p.scaled_out != nullptr) {
    return Status::error("gemm: groups of rows take no residual, norm or sums of squares");
  }
  return {};
}

// One row to codes; see QuantizeRowsParams.
template <class T>
void quantize_row(const QuantizeRowsParams& p, int64_t row) {
  const auto* x = static_cast<const T*>(p.x) + row * p.width * (p.gated ? 2 : 1);
  auto* codes = static_cast<uint8_t*>(p.codes) + row * p.width;
  std::vector<float> values(p.width);
  double squares = 0;
  for (int64_t k = 0; k < p.width; ++k) {
    float& value = values[k];
    value = to_float(x[k]);
    if (p.gated) {
      T folded;
      from_float(value / (1.f + std::exp(-value)) * to_float(x[p.width + k]), &folded);
      value = to_float(folded);
    }
    squares += static_cast<double>(value) * value;
    if (p.norm_weight != nullptr) value *= to_float(static_cast<const T*>(p.norm_weight)[k]);
  }
  float norm = 1.f;
  if (p.normalize) {
    norm = 1.f / std::sqrt(static_cast<float>(squares / static_cast<double>(p.width)) + p.epsilon);
  }
  // It is left out of the values where nothing is added, and goes into the scale.
  const float divisor = p.shift == nullptr ? norm : 1.f;
  for (int64_t k = 0; k < p.width; ++k) {
    if (p.shift != nullptr) values[k] = values[k] * norm + p.shift[k];
    if (p.smooth != nullptr) values[k] *= p.smooth[k];
  }
  const bool fp8 = p.operands == GemmOperands::kFp8;
  const float fixed = p.static_scale != nullptr ? *p.static_scale : 0.f;
  const int64_t step = p.blocks ? kScaleBlock : p.width;
  for (int64_t first = 0; first < p.width; first += step) {
    const int64_t last = std::min(first + step, p.width);
    float largest = 0.f;
    for (int64_t k = first; k < last; ++k) largest = std::max(largest, std::fabs(values[k]));
    const float own = largest > 0.f ? largest / (fp8 ? kFp8Max : kInt8Max) : 1.f;
    const float factor = fixed > 0.f ? divisor / fixed : 1.f / own;
    p.scale[p.blocks ? first / kScaleBlock * gemm_block_stride(p.num_rows) + row : row] =
        fixed > 0.f ? fixed : own * divisor;
    for (int64_t k = first; k < last; ++k) {
      const float value = values[k] * factor;
      const float bounded = std::min(std::max(value, -kInt8Max), kInt8Max);
      codes[k] = fp8 ? to_e4m3(value) : static_cast<uint8_t>(std::lrint(bounded));
    }
  }
}

}  // namespace

Status create_blas(void** blas) {
  *blas = nullptr;  // nothing to say of it: products here need none
  return {};
}

int64_t gemm_scratch_bytes(const GemmParams&) { return 0; }

Status gemm(const GemmParams& params, const GemmResources&, const char*, CUstream_st* stream) {
  const Status status = check(params);
  if (!status.ok()) return status;
  return queue(stream, "gemm", [p = params] {
    return dispatch(p.dtype, "gemm", [&](auto* type) {
      using T = ElementOf<decltype(type)>;
      if (p.num_groups > 0) return multiply_groups<T>(p);
      multiply<T>(p, {0, p.num_rows});
      return Status();
    });
  });
}

int64_t gemm_matrix_bytes(const GemmParams&) { return 0; }

// A gate's SiLU alone: others are launches of their own.
bool gemm_makes_function(const GemmParams&) { return false; }

bool gemm_packed_scales_out(DType dtype, int64_t num_rows) {
  return dtype == DType::kBFloat16 && num_rows <= 64;
}

Status row_sumsq(const RowSumsqParams& p, CUstream_st* stream) {
  return queue(stream, "row_sumsq", [=] {
    return dispatch(p.dtype, "row_sumsq", [&](auto* type) {
      using T = ElementOf<decltype(type)>;
      const auto* values = static_cast<const T*>(p.x);
      const auto* norm = static_cast<const T*>(p.norm_weight);
      const int64_t num_sums = ceil_div(p.width, p.columns);
      std::memset(p.sums, 0, p.num_rows * num_sums * 4);
      for (int64_t i = 0; i < p.num_rows * p.width; ++i) {
        const float value = to_float(values[i]);
        p.sums[i / p.width * num_sums + i % p.width / p.columns] += value * value;
        if (p.scaled != nullptr) {
          from_float(value * to_float(norm[i % p.width]), static_cast<T*>(p.scaled) + i);
        }
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

// quantized weights

namespace {

// The scale of values that share one, those of `size` columns of each row.
template <class T>
float scale_of(RoundingRule rule, const T* values, int64_t rows, int64_t size, int64_t stride) {
  uint32_t found = 0;
  float peak = 0.f;
  for (int64_t i = 0; i < rows * size; ++i) {
    const float value = to_float(values[i / size * stride + i % size]);
    if (rounding::magnitude_bits(value) <= found) continue;
    found = rounding::magnitude_bits(value);
    peak = value;
  }
  const float largest = rounding::largest_of(found);
  if (rule == RoundingRule::kInt8) return rounding::int8_scale(largest);
  if (rule == RoundingRule::kE4M3) return rounding::e4m3_scale(largest);
  float best = rounding::int4_candidate(0, largest, peak), least = INFINITY;
  for (int candidate = 0; candidate < rounding::kInt4Candidates; ++candidate) {
    const float scale = rounding::int4_candidate(candidate, largest, peak);
    float sums[rounding::kSumLanes] = {};
    for (int64_t k = 0; k < size; ++k) {
      sums[k % rounding::kSumLanes] +=
          rounding::int4_squared_error(to_float(values[k]), scale, 1.f / scale);
    }
    for (int half = rounding::kSumLanes / 2; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
    }
    if (sums[0] < least) {
      least = sums[0];
      best = scale;
    }
  }
  return best;
}

uint8_t code_of(RoundingRule rule, float value, float scale) {
  if (rule == RoundingRule::kE4M3) return rounding::e4m3_code(value, scale);
  return static_cast<uint8_t>(rule == RoundingRule::kInt8 ? rounding::int8_code(value, scale)
                                                          : rounding::int4_code(value, scale));
}

}  // namespace

Status round_weight(const RoundWeightParams& params, CUstream_st* stream) {
  return queue(stream, "round_weight", [p = params] {
    return dispatch(p.dtype, "round_weight", [&](auto* type) {
      const auto* weight = static_cast<const ElementOf<decltype(type)>*>(p.weight);
      const int64_t across = ceil_div(p.in_features, p.group_size);
      const int64_t num_scales = across * ceil_div(p.out_features, p.block_rows);
      for (int64_t i = 0; i < num_scales; ++i) {
        const int64_t row = i / across * p.block_rows, column = i % across * p.group_size;
        const int64_t rows = std::min(p.block_rows, p.out_features - row);
        const int64_t columns = std::min(p.group_size, p.in_features - column);
        const int64_t first = row * p.in_features + column;
        p.scale[i] = scale_of(p.rule, weight + first, rows, columns, p.in_features);
        if (p.rule == RoundingRule::kInt4) p.zero[i] = rounding::kInt4Zero;
        for (int64_t j = 0; j < rows * columns; ++j) {
          const int64_t at = first + j / columns * p.in_features + j % columns;
          p.codes[at] = code_of(p.rule, to_float(weight[at]), p.scale[i]);
        }
      }
      return Status();
    });
  });
}

Status quantize_rows(const QuantizeRowsParams& params, CUstream_st* stream) {
  return queue(stream, "quantize_rows", [p = params] {
    return dispatch(p.dtype, "quantize_rows", [&](auto* type) {
      for (int64_t row = 0; row < p.num_rows; ++row)
        quantize_row<ElementOf<decltype(type)>>(p, row);
      return Status();
    });
  });
}

Status gemm_quantized(const GemmParams& params, const QuantizeRowsParams& q,
                      const GemmResources& resources, CUstream_st* stream) {
  GemmParams p = params;
  p.x = q.codes;
  p.x_scale = q.scale;
  const Status status = quantize_rows(q, stream);
  return status.ok() ? gemm(p, resources, nullptr, stream) : status;
}

Status gemm_to_codes(const GemmParams& params, const QuantizeRowsParams& q,
                     const QuantizeRowsParams& next, const GemmResources& resources, bool* coded,
                     CUstream_st* stream) {
  const Status status = gemm_quantized(params, q, resources, stream);
  *coded = true;
  return status.ok() ? quantize_rows(next, stream) : status;
}

Status gather_columns(const void* x, const int32_t* perm, void* out, int64_t num_rows,
                      int64_t width, CUstream_st* stream) {
  return queue(stream, "gather_columns", [=] {
    const auto* from = static_cast<const uint16_t*>(x);
    auto* to = static_cast<uint16_t*>(out);
    for (int64_t i = 0; i < num_rows * width; ++i)
      to[i] = from[i / width * width + perm[i % width]];
    return Status();
  });
}

int64_t packed_group_size(GemmOperands operands, int64_t in_features, int64_t num_groups) {
  const int64_t widest = operands == GemmOperands::kWeightInt8Groups ? 64 : 128;
  if (operands == GemmOperands::kWeightMxfp4) return in_features == 32 * num_groups ? 32 : 0;
  if (num_groups <= 1) return widest;
  const int64_t group = in_features / num_groups;
  if (in_features % num_groups != 0) return 0;
  if (group == 32 && operands == GemmOperands::kWeightInt4) return 32;
  return group % 128 == 0 || group == 64 ? std::min(group, widest) : 0;
}

int64_t packed_unit_group_size(int64_t bytes) {
  for (const int64_t size : {32, 64}) {
    if (bytes == unit_bytes(GemmOperands::kWeightInt4, size)) return size;
  }
  return 128;
}

bool packed_unit_has_groups(int64_t bytes) { return bytes != kUnitCodes; }

int64_t packed_weight_bytes(int64_t out_features, int64_t in_features, GemmOperands operands,
                            int64_t group_size) {
  return packed_tiles(out_features) * packed_units(in_features) * unit_bytes(operands, group_size);
}

Status pack_weight(const PackWeightParams& params, CUstream_st* stream) {
  return queue(stream, "pack_weight", [p = params] {
    const int64_t group_size = packed_group_size(p.operands, p.in_features, p.num_groups);
    const bool has_groups = p.operands != GemmOperands::kWeightInt8;
    const float usual_zero = p.operands == GemmOperands::kWeightInt8Groups ? 0.f : 8.f;
    std::memset(p.packed, 0,
                packed_weight_bytes(p.out_features, p.in_features, p.operands,
                                    has_groups ? group_size : kUnitColumns));
    for (int64_t n = 0; n < p.out_features; ++n) {
      for (int64_t k = 0; k < p.in_features; ++k) {
        const UnitPlace place(p.operands, has_groups ? group_size : kUnitColumns, p.in_features, n,
                              k);
        p.packed[place.code] = static_cast<uint8_t>(p.codes[n * p.in_features + k]);
        if (!has_groups) continue;
        const int64_t at = n * p.num_groups + k / ceil_div(p.in_features, p.num_groups);
        const float scale[2] = {p.scale[at], p.zero != nullptr ? p.zero[at] : usual_zero};
        std::memcpy(p.packed + place.scale, scale, 8);
      }
    }
    return Status();
  });
}

}  // namespace regatta::cuda
