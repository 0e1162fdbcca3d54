// How a linear's weight is stored: the twin of predict/schemes. No framework.
//
//   scheme            tensors
//   dense             weight
//   dense_folded      weight times the norm's ahead of it; on a GPU (regatta/cuda_ops.h)
//   weight_only_int8  packed, scales, on a CPU whether activations stay floats (else int8), perm
//   weight_only_int4  alike
//   weight_only_mxfp4 alike
//   w4a8              alike
//   a8w8              packed, scales, static scale, smooth, shift
//   a8w8_fp8          packed, scales, static scale; on a GPU
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "regatta/gemm.h"

namespace regatta {

enum class SchemeId : uint8_t {
  kDense,
  kDenseFolded,
  kWeightOnlyInt8,
  kWeightOnlyInt4,
  kWeightOnlyMxfp4,
  kW4A8,
  kA8W8,
  kA8W8Fp8,
};

// What codes of a weight are multiplied with.
enum class Activations : uint8_t {
  kFloat,
  kInt8,  // with a scale for each token, or one for all
  kE4M3,  // alike, or a scale for each token and block of input features
};

struct SchemeInfo {
  const char* name;
  int num_tensors;
  int code_bits;  // 0: floating point
  Activations activations;
  bool has_groups;        // of input features, with a scale each; else one per output feature
  GemmOperands operands;  // how a GPU's products take them
  bool is_mxfp4 = false;  // codes are e2m1, a scale for each 32 of them; no zero points
};

constexpr SchemeInfo kSchemes[] = {
    {"dense", 1, 0, Activations::kFloat, false, GemmOperands::kDense},
    {"dense_folded", 1, 0, Activations::kFloat, false, GemmOperands::kDense},
    {"weight_only_int8", 4, 8, Activations::kFloat, true, GemmOperands::kWeightInt8},
    {"weight_only_int4", 4, 4, Activations::kFloat, true, GemmOperands::kWeightInt4},
    {"weight_only_mxfp4", 4, 4, Activations::kFloat, true, GemmOperands::kWeightMxfp4, true},
    {"w4a8", 4, 4, Activations::kInt8, true, GemmOperands::kW4A8},
    {"a8w8", 5, 8, Activations::kInt8, false, GemmOperands::kInt8},
    {"a8w8_fp8", 3, 8, Activations::kE4M3, false, GemmOperands::kFp8},
};
constexpr int kNumSchemes = sizeof(kSchemes) / sizeof(kSchemes[0]);

constexpr const SchemeInfo& scheme_info(SchemeId scheme) {
  return kSchemes[static_cast<int>(scheme)];
}

// False where no scheme has that name.
inline bool parse_scheme(const char* name, SchemeId* scheme) {
  for (int i = 0; i < kNumSchemes; ++i) {
    if (std::strcmp(kSchemes[i].name, name) != 0) continue;
    *scheme = static_cast<SchemeId>(i);
    return true;
  }
  return false;
}

// The names of schemes for which `is_wanted(info)`, for messages.
template <class IsWanted>
std::string scheme_names(IsWanted&& is_wanted) {
  std::string names;
  for (const SchemeInfo& info : kSchemes) {
    if (is_wanted(info)) names += (names.empty() ? "" : ", ") + std::string(info.name);
  }
  return names;
}

}  // namespace regatta
