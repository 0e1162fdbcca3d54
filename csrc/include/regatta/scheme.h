// How a linear's weight is stored: the twin of predict/schemes. No framework.
//
//   scheme            tensors
//   dense             weight
//   dense_folded      weight times the norm's ahead of it; on a GPU (regatta/cuda_ops.h)
//   weight_only_int8  packed, scales, unread, perm
//   weight_only_int4  alike
//   w4a8              alike
//   a8w8              packed, scales, static scale, smooth, shift
//   a8w8_fp8          packed, scales, static scale; on a GPU
#pragma once

#include <cstdint>
#include <cstring>

namespace regatta {

enum class SchemeId : uint8_t {
  kDense,
  kDenseFolded,
  kWeightOnlyInt8,
  kWeightOnlyInt4,
  kW4A8,
  kA8W8,
  kA8W8Fp8,
};

struct SchemeInfo {
  const char* name;
  int num_tensors;
};

constexpr SchemeInfo kSchemes[] = {
    {"dense", 1}, {"dense_folded", 1}, {"weight_only_int8", 4}, {"weight_only_int4", 4},
    {"w4a8", 4},  {"a8w8", 5},         {"a8w8_fp8", 3},
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

}  // namespace regatta
