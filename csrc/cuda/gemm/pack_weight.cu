// Codes into the layout of packed_weight.cuh, and back to a matrix.
//
// Input: codes [N, K] int8. Architectures: all (bf16: sm_80 and later). A warp per unit; done
// once per weight.
// unpack_weight() is the way of products with many rows: 2 + 0.5 .. 1 bytes per value of memory
// traffic ahead of a dense product.
#include <cmath>

#include "packed_weight.cuh"
#include "regatta/gemm.h"

namespace regatta::cuda {
namespace {

struct Place {
  int row, column;  // in the unit
};

// Value `half` (0, 1) of register i of step `step` of lane t.
__device__ __forceinline__ Place place_of(int t, int step, int i, int half) {
  return {t / 4 + i % 2 * 8, step * 16 + t % 4 * 2 + i / 2 * 8 + half};
}

// Value `b` of 0..3 of the same of kW4A8.
__device__ __forceinline__ Place w4a8_place_of(int t, int step, int i, int b) {
  return {t / 4 + i % 2 * 8, step * 32 + t % 4 * 4 + i / 2 * 16 + b};
}

__device__ __forceinline__ uint32_t code_at(const PackWeightParams& p, int64_t row,
                                            int64_t column) {
  if (row >= p.out_features || column >= p.in_features) return 0;
  return static_cast<uint8_t>(p.codes[row * p.in_features + column]);
}

constexpr int kWarps = 4;  // of a block, a unit each

// This warp's unit.
struct UnitPlace {
  int64_t index, row0, column0;
  bool inside;
};

__device__ __forceinline__ UnitPlace unit_place(int64_t rows, int64_t columns) {
  const int64_t units = (columns + kUnitColumns - 1) / kUnitColumns;
  const int64_t index = blockIdx.x * static_cast<int64_t>(kWarps) + threadIdx.x / kWarp;
  const int64_t row0 = index / units * kUnitRows;
  return {index, row0, index % units * kUnitColumns, row0 < rows};
}

template <class T>
__global__ void pack_kernel(const PackWeightParams p, const int group_size) {
  const UnitPlace place = unit_place(p.out_features, p.in_features);
  if (!place.inside) return;
  const int64_t row0 = place.row0, column0 = place.column0;
  uint8_t* unit = p.packed + place.index * unit_bytes(p.operands, group_size);
  const int t = threadIdx.x % kWarp;
  uint32_t* words = reinterpret_cast<uint32_t*>(unit);
  const auto at = [&](int step, int i, int half) {
    const Place place = place_of(t, step, i, half);
    return code_at(p, row0 + place.row, column0 + place.column);
  };
  const int bits = code_bits(p.operands);
  if (bits == 8) {
    for (int q = 0; q < 4; ++q) {
      for (int j = 0; j < 4; ++j) {
        const int step = 2 * q + j / 2, i = j % 2 * 2;
        words[(q * kWarp + t) * 4 + j] = at(step, i, 0) | at(step, i + 1, 0) << 8 |
                                         at(step, i, 1) << 16 | at(step, i + 1, 1) << 24;
      }
    }
    if (p.operands == GemmOperands::kWeightInt8) return;
  } else {
    for (int q = 0; q < 2; ++q) {
      for (int j = 0; j < 4; ++j) {
        uint32_t word = 0;
        if (p.operands == GemmOperands::kW4A8) {
          for (int b = 0; b < 4; ++b) {
            for (int h = 0; h < 2; ++h) {
              const Place place = w4a8_place_of(t, 2 * q + j / 2, j % 2 * 2 + h, b);
              word |= (code_at(p, row0 + place.row, column0 + place.column) & 15)
                      << (8 * b + 4 * h);
            }
          }
        } else {
          for (int i = 0; i < 4; ++i) {
            word |= (at(4 * q + j, i, 0) & 15) << (4 * i) | (at(4 * q + j, i, 1) & 15)
                                                                << (16 + 4 * i);
          }
        }
        words[(q * kWarp + t) * 4 + j] = word;
      }
    }
  }
  const int64_t group = p.in_features / p.num_groups;  // columns that share a scale
  for (int i = t; i < kUnitColumns / group_size * kUnitRows; i += kWarp) {
    const int64_t row = row0 + i % kUnitRows / 2 + i % 2 * 8;
    const int64_t column = column0 + i / kUnitRows * group_size;
    float scale = 0.f, zero = 0.f;
    if (row < p.out_features && column < p.in_features) {
      const int64_t g = min(column / group, p.num_groups - 1);
      scale = p.scale[row * p.num_groups + g];
      zero = p.zero != nullptr ? p.zero[row * p.num_groups + g] : bits == 4 ? 8.f : 0.f;
    }
    uint32_t& word = words[bits * 64 + i];
    if (p.operands == GemmOperands::kW4A8) {
      word = ((__float_as_uint(scale) + 0x80) & ~0xffu) | (128 - __float2int_rn(zero));
      continue;
    }
    const T low = Traits<T>::from_float(scale);
    const bool lifted = bits == 4 && p.operands != GemmOperands::kWeightMxfp4;
    const T high = Traits<T>::from_float(lifted ? CodeMagic<T>::kValue + zero : zero);
    word = static_cast<uint32_t>(bit_cast<uint16_t>(high)) << 16 | bit_cast<uint16_t>(low);
  }
}

// Through shared memory, so that rows are written 16 bytes at a time.
template <class T, GemmOperands kOperands>
__global__ void unpack_kernel(const uint8_t* packed, const float* weight_scale, T* out,
                              const int64_t rows, const int64_t columns, const int group_size) {
  constexpr int kBits = code_bits(kOperands);
  __shared__ alignas(16) T tiles[kWarps][kUnitRows][kUnitColumns + 8];
  const UnitPlace place = unit_place(rows, columns);
  if (!place.inside) return;
  const int64_t row0 = place.row0, column0 = place.column0;
  const uint8_t* unit = packed + place.index * unit_bytes(kOperands, group_size);
  auto& tile = tiles[threadIdx.x / kWarp];
  const int t = threadIdx.x % kWarp;
  const int shift = group_size == 32 ? 5 : group_size == 64 ? 6 : 7;
  const uint4* quads = reinterpret_cast<const uint4*>(unit);
  const auto put = [&](int step, const uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Place at = place_of(t, step, i, 0);
      *reinterpret_cast<uint32_t*>(&tile[at.row][at.column]) = a[i];
    }
  };
  if constexpr (kBits == 8) {
    float scale[2];
    GroupScale group = {};
    uint4 quad[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) quad[q] = __ldcs(quads + q * kWarp + t);
    if constexpr (kOperands == GemmOperands::kWeightInt8) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int64_t row = row0 + t / 4 + h * 8;
        scale[h] = row < rows ? weight_scale[row] : 0.f;
      }
    }
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const uint32_t w[4] = {quad[q].x, quad[q].y, quad[q].z, quad[q].w};
      if constexpr (kOperands != GemmOperands::kWeightInt8) {
        const int g = q * 32 >> shift;
        group = group_scale(reinterpret_cast<const uint2*>(unit + 2048)[g * 8 + t / 4]);
      }
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t pair = pair_of_int8<T>(w[2 * s + i / 2] >> (i % 2 * 8));
          if constexpr (kOperands != GemmOperands::kWeightInt8) {
            a[i] = multiply_pair<T>(subtract_pair<T>(pair, group.zero[i % 2]), group.scale[i % 2]);
          } else {
            float2 f = Traits<T>::to_float2(bit_cast<typename Traits<T>::Pair>(pair));
            f.x *= scale[i % 2], f.y *= scale[i % 2];
            a[i] = bit_cast<uint32_t>(Traits<T>::from_float2(f));
          }
        }
        put(2 * q + s, a);
      }
    }
  } else {
    const uint4 quad[2] = {__ldcs(quads + t), __ldcs(quads + kWarp + t)};
    const uint2* blob = reinterpret_cast<const uint2*>(unit + 1024) + t / 4;
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      const uint32_t w[4] = {quad[q].x, quad[q].y, quad[q].z, quad[q].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const GroupScale group = group_scale(blob[((q * 64 + j * 16) >> shift) * 8]);
        uint32_t a[4];
        if constexpr (kOperands == GemmOperands::kWeightMxfp4) {
          operands_of_e2m1<T>(w[j], a);
        } else {
          operands_of_int4<T>(w[j], group.zero, a);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = multiply_pair<T>(a[i], group.scale[i % 2]);
        put(4 * q + j, a);
      }
    }
  }
  __syncwarp();
  for (int i = t; i < kUnitRows * kUnitColumns / 8; i += kWarp) {
    const int r = i / (kUnitColumns / 8), c = i % (kUnitColumns / 8) * 8;
    if (row0 + r < rows && column0 + c < columns) {
      *reinterpret_cast<uint4*>(out + (row0 + r) * columns + column0 + c) =
          *reinterpret_cast<const uint4*>(&tile[r][c]);
    }
  }
}

__global__ void __launch_bounds__(256) gather_columns_kernel(const uint16_t* x, const int32_t* perm,
                                                             uint16_t* out, const int64_t width) {
  pdl_trigger();
  pdl_wait();
  const int64_t row = blockIdx.x;
  for (int64_t i = blockIdx.y * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < width;
       i += static_cast<int64_t>(gridDim.y) * blockDim.x) {
    out[row * width + i] = x[row * width + perm[i]];
  }
}

__global__ void repeat_scale_kernel(const float* scale, const int64_t count, float* out,
                                    const int64_t num_values) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i < num_values) out[i] = scale[count == 1 ? 0 : i];
}

}  // namespace

int64_t packed_unit_group_size(int64_t bytes) {
  return bytes % 1024 == 256 ? 32 : bytes % 1024 == 128 ? 64 : 128;
}

bool packed_unit_has_groups(int64_t bytes) { return bytes % 1024 != 0; }

Status gather_columns(const void* x, const int32_t* perm, void* out, int64_t num_rows,
                      int64_t width, CUstream_st* stream) {
  if (num_rows == 0) return {};
  return launch(gather_columns_kernel,
                {{stream, true}, grid_of(num_rows, ceil_div(width, 2048)), 256}, "gather_columns",
                static_cast<const uint16_t*>(x), perm, static_cast<uint16_t*>(out), width);
}

Status repeat_scale(const float* scale, int64_t count, float* out, int64_t num_values,
                    CUstream_st* stream) {
  if (num_values == 0) return {};
  return launch(repeat_scale_kernel, {{stream}, ceil_div(num_values, 256), 256}, "repeat_scale",
                scale, count, out, num_values);
}

Status copy_bytes(void* to, const void* from, int64_t bytes, CUstream_st* stream) {
  return cuda_status(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream),
                     "copy_bytes");
}

int64_t packed_group_size(GemmOperands operands, int64_t in_features, int64_t num_groups) {
  const int64_t widest = operands == GemmOperands::kWeightInt8Groups ? 64 : 128;
  if (operands == GemmOperands::kWeightMxfp4) return in_features == 32 * num_groups ? 32 : 0;
  if (num_groups <= 1) return widest;
  if (in_features % num_groups != 0) return 0;
  const int64_t group = in_features / num_groups;
  if (group == 32 && operands == GemmOperands::kWeightInt4) return 32;
  return group % 128 == 0 ? widest : group == 64 ? 64 : 0;
}

int64_t packed_weight_bytes(int64_t out_features, int64_t in_features, GemmOperands operands,
                            int64_t group_size) {
  return packed_tiles(out_features) * packed_units(in_features) *
         unit_bytes(operands, static_cast<int>(group_size));
}

Status pack_weight(const PackWeightParams& p, CUstream_st* stream) {
  const int64_t group = packed_group_size(p.operands, p.in_features, p.num_groups);
  if (p.operands != GemmOperands::kWeightInt8 && group == 0) {
    return Status::error("pack_weight: " + std::to_string(p.in_features) + " columns in " +
                         std::to_string(p.num_groups) +
                         " groups cannot be packed for a GPU (allowed: groups of 64 columns, of a "
                         "multiple of 128, of weight_only_int4 32, or one group; of MXFP4 32)");
  }
  const int64_t num_units = packed_tiles(p.out_features) * packed_units(p.in_features);
  const LaunchConfig config({stream}, ceil_div(num_units, kWarps), kWarps * kWarp);
  const int group_size = static_cast<int>(group == 0 ? 128 : group);
  if (p.dtype == DType::kFloat16) {
    return launch(pack_kernel<__half>, config, "pack_weight", p, group_size);
  }
  return launch(pack_kernel<__nv_bfloat16>, config, "pack_weight", p, group_size);
}

Status unpack_weight(const GemmParams& p, void* out, CUstream_st* stream) {
  if (p.in_features % 8 != 0) {
    return Status::error("unpack_weight: in_features must be a multiple of 8");
  }
  if (p.operands == GemmOperands::kW4A8) {
    return Status::error("unpack_weight: not of weights for 8-bit activations");
  }
  const int64_t num_units = packed_tiles(p.out_features) * packed_units(p.in_features);
  const LaunchConfig config({stream}, ceil_div(num_units, kWarps), kWarps * kWarp);
  const auto run = [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    using O = GemmOperands;
    return launch(p.operands == O::kWeightInt8         ? unpack_kernel<T, O::kWeightInt8>
                  : p.operands == O::kWeightInt8Groups ? unpack_kernel<T, O::kWeightInt8Groups>
                  : p.operands == O::kWeightMxfp4      ? unpack_kernel<T, O::kWeightMxfp4>
                                                       : unpack_kernel<T, O::kWeightInt4>,
                  config, "unpack_weight", static_cast<const uint8_t*>(p.weight), p.weight_scale,
                  static_cast<T*>(out), p.out_features, p.in_features,
                  static_cast<int>(p.group_size));
  };
  return p.dtype == DType::kFloat16 ? run(static_cast<__half*>(nullptr))
                                    : run(static_cast<__nv_bfloat16*>(nullptr));
}

}  // namespace regatta::cuda
