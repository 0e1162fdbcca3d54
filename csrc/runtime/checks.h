// Checks of tensors: what was got and what is expected, as a status.
#pragma once

#include <string>
#include <type_traits>
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

// Takes the tensors of one operator. What is wrong first is kept. A tensor of rank 0 is not there.
class Reader {
 public:
  const Status& status() const { return status_; }
  void check(const Status& status) {
    if (status_.ok()) status_ = status;
  }

  // The values of a tensor of float, int32_t or int64_t.
  template <class T>
  T* values(const TensorView& tensor, const char* name, const std::vector<int64_t>& shape) {
    constexpr DType kDType = std::is_same_v<T, float>     ? DType::kFloat32
                             : std::is_same_v<T, int32_t> ? DType::kInt32
                                                          : DType::kInt64;
    return static_cast<T*>(const_cast<void*>(data(tensor, name, kDType, shape)));
  }
  const void* data(const TensorView& tensor, const char* name, DType dtype,
                   const std::vector<int64_t>& shape) {
    check(runtime::check(tensor, name, dtype, shape));
    return tensor.data;
  }
  // Null where it is not there.
  template <class T>
  T* optional_values(const TensorView& tensor, const char* name,
                     const std::vector<int64_t>& shape) {
    return tensor.rank == 0 ? nullptr : values<T>(tensor, name, shape);
  }
  const void* optional_data(const TensorView& tensor, const char* name, DType dtype,
                            const std::vector<int64_t>& shape) {
    return tensor.rank == 0 ? nullptr : data(tensor, name, dtype, shape);
  }
  // [rows, columns] of activations.
  const void* activations(const TensorView& tensor, const char* name) {
    check(check_activation(tensor, name));
    check(check_shape(tensor, name, {-1, -1}));
    return tensor.data;
  }

 private:
  Status status_;
};

}  // namespace regatta::runtime
