// kv_format.h for device code.
#pragma once

#include "regatta/kv_format.h"

namespace regatta::cuda {

// kv_format_info() for device code, which cannot index a host table.
__host__ __device__ constexpr bool has_token_scales(KvFormat format) {
  return format == KvFormat::kInt8Dynamic || format == KvFormat::kInt4;
}
__host__ __device__ constexpr int scale_floats(KvFormat format) {
  return format == KvFormat::kDense ? 0 : format == KvFormat::kInt4 ? 2 : 1;
}
static_assert(has_token_scales(KvFormat::kInt4) == kv_format_info(KvFormat::kInt4).token_scales &&
              scale_floats(KvFormat::kInt4) == kv_format_info(KvFormat::kInt4).scale_floats &&
              scale_floats(KvFormat::kFp8) == kv_format_info(KvFormat::kFp8).scale_floats);

}  // namespace regatta::cuda
