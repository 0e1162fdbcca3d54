// Checks of tensors: what was got and what is expected, as a status.
#pragma once

#include <string>
#include <vector>

#include "regatta/types.h"

namespace regatta::runtime {

inline std::string dims_string(const std::vector<int64_t>& dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + "]";
}

// -1 in `shape` allows any size.
inline Status check_shape(const TensorView& tensor, const char* name,
                          const std::vector<int64_t>& shape) {
  bool fits = tensor.rank == static_cast<int>(shape.size());
  for (int i = 0; fits && i < tensor.rank; ++i) {
    fits = shape[i] < 0 || shape[i] == tensor.shape[i];
  }
  if (fits) return {};
  return Status::error(std::string(name) + " has shape " + shape_string(tensor) + ", expected " +
                       dims_string(shape) + " (-1: any)");
}

inline Status check_dtype(const TensorView& tensor, const char* name, DType expected) {
  if (tensor.dtype == expected) return {};
  return Status::error(std::string(name) + " is " + dtype_name(tensor.dtype) + ", expected " +
                       dtype_name(expected));
}

// float32, bfloat16 or float16.
inline Status check_activation(const TensorView& tensor, const char* name) {
  if (is_activation_dtype(tensor.dtype)) return {};
  return Status::error(std::string(name) + " is " + dtype_name(tensor.dtype) +
                       " (allowed: float32, bfloat16, float16)");
}

inline Status check(const TensorView& tensor, const char* name, DType dtype,
                    const std::vector<int64_t>& shape) {
  REGATTA_RETURN_IF_ERROR(check_dtype(tensor, name, dtype));
  return check_shape(tensor, name, shape);
}

// The values of a tensor of int32.
inline Status take_ids(const TensorView& tensor, const char* name,
                       const std::vector<int64_t>& shape, const int32_t** to) {
  *to = static_cast<const int32_t*>(tensor.data);
  return check(tensor, name, DType::kInt32, shape);
}

}  // namespace regatta::runtime
