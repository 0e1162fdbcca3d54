// The launchers that prepare weights (regatta/gemm.h). See kernels.cc.
#include "weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cuda/gemm/rounding.h"
#include "launch.h"
#include "regatta/gemm.h"
#include "regatta/round_weight.h"

namespace regatta::cuda {

Status create_blas(void** blas) {
  *blas = nullptr;  // products here need none
  return {};
}

Status fold_norm_weight(void* weight, const void* norm_weight, DType dtype, int64_t out_features,
                        int64_t in_features, CUstream_st* stream) {
  return queue(stream, "fold_norm_weight", [=] {
    Floats values = read(weight, dtype, out_features * in_features);
    const Floats norm = read(norm_weight, dtype, in_features);
    for (int64_t i = 0; i < out_features * in_features; ++i) values[i] *= norm[i % in_features];
    write(values, dtype, weight);
  });
}

Status pack_dense(const PackDenseParams& params, const Launch& on) {
  return queue(on.stream, "pack_dense", [p = params] {
    const int64_t size = p.out_features * p.in_features;
    const Floats weight = read(p.weight, p.from, size);
    Floats turned(size);
    for (int64_t i = 0; i < size; ++i) {
      turned[i % p.out_features * p.in_features + i / p.out_features] = weight[i];
    }
    write(p.transposed ? weight : turned, p.to, p.packed);
  });
}

Status copy_bytes(void* to, const void* from, int64_t bytes, CUstream_st* stream) {
  return queue(stream, "copy_bytes", [=] { std::memcpy(to, from, bytes); });
}

Status repeat_scale(const float* scale, int64_t count, float* out, int64_t num_values,
                    CUstream_st* stream) {
  return queue(stream, "repeat_scale", [=] {
    for (int64_t i = 0; i < num_values; ++i) out[i] = scale[count == 1 ? 0 : i];
  });
}

// float weights to codes

namespace {

// Of the int4 candidates for a group, the one with the least squared error.
float int4_scale(const Floats& values, float largest, float peak) {
  float best = rounding::int4_candidate(0, largest, peak), least = INFINITY;
  for (int candidate = 0; candidate < rounding::kInt4Candidates; ++candidate) {
    const float scale = rounding::int4_candidate(candidate, largest, peak);
    float sums[rounding::kSumLanes] = {};
    for (size_t k = 0; k < values.size(); ++k) {
      sums[k % rounding::kSumLanes] += rounding::int4_squared_error(values[k], scale, 1.f / scale);
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

// Of values that share one.
float scale_of(RoundingRule rule, const Floats& values) {
  float peak = 0.f;
  for (const float value : values) {
    if (rounding::magnitude_bits(value) > rounding::magnitude_bits(peak)) peak = value;
  }
  const float largest = rounding::largest_of(rounding::magnitude_bits(peak));
  if (rule == RoundingRule::kInt8) return rounding::int8_scale(largest);
  return rule == RoundingRule::kE4M3 ? rounding::e4m3_scale(largest)
                                     : int4_scale(values, largest, peak);
}

uint8_t code_of(RoundingRule rule, float value, float scale) {
  if (rule == RoundingRule::kE4M3) return rounding::e4m3_code(value, scale);
  return static_cast<uint8_t>(rule == RoundingRule::kInt8 ? rounding::int8_code(value, scale)
                                                          : rounding::int4_code(value, scale));
}

}  // namespace

Status round_weight(const RoundWeightParams& params, CUstream_st* stream) {
  return queue(stream, "round_weight", [p = params] {
    const int64_t across = ceil_div(p.in_features, p.group_size);
    for (int64_t i = 0; i < across * ceil_div(p.out_features, p.block_rows); ++i) {
      const int64_t row = i / across * p.block_rows, column = i % across * p.group_size;
      const int64_t rows = std::min(p.block_rows, p.out_features - row);
      const int64_t columns = std::min(p.group_size, p.in_features - column);
      Floats values;
      for (int64_t r = 0; r < rows; ++r) {
        const Floats part = read(p.weight, p.dtype, columns, (row + r) * p.in_features + column);
        values.insert(values.end(), part.begin(), part.end());
      }
      p.scale[i] = scale_of(p.rule, values);
      if (p.rule == RoundingRule::kInt4) p.zero[i] = rounding::kInt4Zero;
      for (int64_t j = 0; j < rows * columns; ++j) {
        const int64_t at = (row + j / columns) * p.in_features + column + j % columns;
        p.codes[at] = code_of(p.rule, values[j], p.scale[i]);
      }
    }
  });
}

// packed codes: number of groups, whether there are zeros; scales; zeros; codes

namespace {

constexpr int64_t kHeaderBytes = 16;
// Of 16 rows and 128 columns: a byte for each code, and scales and zeros of groups of 32.
constexpr int64_t kUnitBytes = kHeaderBytes + 16 * 128 + 2 * 4 * 16 * 128 / 32;

}  // namespace

int64_t packed_group_size(GemmOperands operands, int64_t in_features, int64_t num_groups) {
  const int64_t widest = operands == GemmOperands::kWeightInt8Groups ? 64 : 128;
  if (operands == GemmOperands::kWeightMxfp4) return in_features == 32 * num_groups ? 32 : 0;
  if (num_groups <= 1) return widest;
  const int64_t group = in_features / num_groups;
  if (in_features % num_groups != 0) return 0;
  if (group == 32 && operands == GemmOperands::kWeightInt4) return 32;
  return group % 128 == 0 || group == 64 ? std::min(group, widest) : 0;
}

int64_t packed_weight_bytes(int64_t out_features, int64_t in_features, GemmOperands, int64_t) {
  return packed_tiles(out_features) * packed_units(in_features) * kUnitBytes;
}

PackedWeight unpack(const void* packed, int64_t out_features, int64_t in_features) {
  int64_t header[2];
  std::memcpy(header, packed, kHeaderBytes);
  const int64_t count = out_features * header[0];
  PackedWeight weight;
  weight.num_groups = header[0];
  weight.scale = reinterpret_cast<const float*>(static_cast<const char*>(packed) + kHeaderBytes);
  if (header[1] != 0) weight.zero = weight.scale + count;
  weight.codes = reinterpret_cast<const int8_t*>(weight.scale + 2 * count);
  return weight;
}

Status pack_weight(const PackWeightParams& params, CUstream_st* stream) {
  return queue(stream, "pack_weight", [p = params] {
    const int64_t groups = p.operands == GemmOperands::kWeightInt8 ? 0 : p.num_groups;
    const int64_t header[2] = {groups, p.zero != nullptr}, count = p.out_features * groups;
    std::memset(p.packed, 0,
                packed_weight_bytes(p.out_features, p.in_features, p.operands, p.num_groups));
    std::memcpy(p.packed, header, kHeaderBytes);
    const PackedWeight to = unpack(p.packed, p.out_features, p.in_features);
    std::copy_n(p.scale, count, const_cast<float*>(to.scale));
    if (p.zero != nullptr) std::copy_n(p.zero, count, const_cast<float*>(to.zero));
    std::copy_n(p.codes, p.out_features * p.in_features, const_cast<int8_t*>(to.codes));
  });
}

}  // namespace regatta::cuda
