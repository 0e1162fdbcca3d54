// What every registration shares: Paddle tensors as views, and messages as exceptions.
#pragma once

#include <algorithm>
#include <iterator>
#include <string>
#include <type_traits>
#include <vector>

#include "paddle/phi/api/all.h"
#include "paddle/phi/core/dense_tensor.h"
#include "regatta/scheme.h"
#include "regatta/types.h"
#include "runtime/checks.h"
#include "runtime/settings.h"

namespace regatta::binding {

using Tensors = std::vector<paddle::Tensor>;
using MaybeTensor = paddle::optional<paddle::Tensor>;
using Shape = std::vector<int64_t>;
using Type = paddle::DataType;
using MaybeShape = paddle::optional<Shape>;
using MaybeType = paddle::optional<Type>;

// What PD_BUILD_OP takes to infer outputs that are like inputs: those of the tensors, without the
// lists of tensors, that kInputs count.
template <size_t... kInputs>
std::vector<Shape> shapes_of(const std::vector<Shape>& inputs,
                             const std::vector<std::vector<Shape>>& /*lists*/,
                             const std::vector<paddle::any>& /*attributes*/) {
  return {inputs[kInputs]...};
}
template <size_t... kInputs>
std::vector<Type> types_of(const std::vector<Type>& inputs,
                           const std::vector<std::vector<Type>>& /*lists*/,
                           const std::vector<paddle::any>& /*attributes*/) {
  return {inputs[kInputs]...};
}

// A ValueError in Python. (Paddle ends the process on exceptions that are not its own.)
[[noreturn]] inline void fail(const std::string& message) {
  PADDLE_THROW(common::errors::InvalidArgument("%s", message));
}

inline void throw_if_error(const Status& status) {
  if (!status.ok()) fail(status.message());
}

// In DType's order.
constexpr Type kTypes[] = {Type::FLOAT32, Type::BFLOAT16, Type::FLOAT16, Type::INT8,
                           Type::UINT8,   Type::INT32,    Type::INT64};

inline DType dtype_of(const paddle::Tensor& tensor, const char* name) {
  const Type* const found = std::find(std::begin(kTypes), std::end(kTypes), tensor.dtype());
  if (found != std::end(kTypes)) return static_cast<DType>(found - kTypes);
  fail(std::string(name) + " has dtype " + phi::DataTypeToString(tensor.dtype()) +
       " (allowed: float32, bfloat16, float16, int8, uint8, int32, int64)");
}

inline Type paddle_dtype(DType dtype) { return kTypes[static_cast<int>(dtype)]; }

// The tensor as a kernel sees it. Throws unless it is a contiguous dense tensor at `place`.
inline TensorView view(const paddle::Tensor& tensor, const char* name,
                       const phi::Place& place = phi::CPUPlace()) {
  if (!tensor.defined() || !tensor.is_dense_tensor()) {
    fail(std::string(name) + " is not a dense tensor");
  }
  const auto& dense = static_cast<const phi::DenseTensor&>(*tensor.impl());
  const phi::DDim& dims = dense.dims();
  if (dims.size() > TensorView::kMaxRank) {
    fail(std::string(name) + " has " + std::to_string(dims.size()) +
         " dimensions (allowed: up to " + std::to_string(TensorView::kMaxRank) + ")");
  }
  TensorView result;
  result.dtype = dtype_of(tensor, name);
  result.rank = dims.size();
  for (int i = 0; i < result.rank; ++i) result.shape[i] = dims[i];
  if (dense.numel() == 0) return result;  // may have no memory, and so no place
  if (!dense.initialized()) fail(std::string(name) + " has no memory: it was never written");
  // Comparing places hashes both: not for the hundreds of CPU tensors of all blocks.
  const phi::Place& found = dense.place();
  const bool on_cpu = place.GetType() == phi::AllocationType::CPU;
  if (on_cpu ? found.GetType() != phi::AllocationType::CPU : found != place) {
    fail(std::string(name) + " is on " + found.DebugString() +
         (on_cpu ? ", and this operator computes on the CPU here; move it there with .cpu()"
                 : ", the other tensors are on " + place.DebugString() + "; move it there first"));
  }
  if (!dense.meta().is_contiguous()) {
    fail(std::string(name) + " is not contiguous; call .contiguous() first");
  }
  result.data = dense.data();
  return result;
}

// Of rank 0 when the tensor was not given.
inline TensorView view(const MaybeTensor& tensor, const char* name, const phi::Place& place) {
  if (!tensor) return {};
  const TensorView result = view(*tensor, name, place);
  if (result.rank == 0) fail(std::string(name) + " has no dimensions");
  return result;
}

// As runtime/checks.h has them; each throws.
inline void check_shape(const TensorView& tensor, const char* name, const Shape& shape) {
  throw_if_error(runtime::check_shape(tensor, name, shape));
}
inline void check_activation(const TensorView& tensor, const char* name) {
  throw_if_error(runtime::check_activation(tensor, name));
}
inline void check(const TensorView& tensor, const char* name, DType dtype, const Shape& shape) {
  throw_if_error(runtime::check(tensor, name, dtype, shape));
}

inline TensorView checked_view(const paddle::Tensor& tensor, const char* name, DType dtype,
                               const std::vector<int64_t>& shape,
                               const phi::Place& place = phi::CPUPlace()) {
  const TensorView result = view(tensor, name, place);
  check(result, name, dtype, shape);
  return result;
}

// Null data when the tensor was not given.
inline TensorView optional_view(const MaybeTensor& tensor, const char* name, DType dtype,
                                const std::vector<int64_t>& shape,
                                const phi::Place& place = phi::CPUPlace()) {
  return tensor ? checked_view(*tensor, name, dtype, shape, place) : TensorView();
}

// The values of a tensor of float, int32_t or int64_t.
template <class T>
T* data_of(const paddle::Tensor& tensor, const char* name, const Shape& shape,
           const phi::Place& place) {
  constexpr DType kDType = std::is_same_v<T, float>     ? DType::kFloat32
                           : std::is_same_v<T, int32_t> ? DType::kInt32
                                                        : DType::kInt64;
  return static_cast<T*>(const_cast<void*>(checked_view(tensor, name, kDType, shape, place).data));
}

// Null when the tensor was not given.
template <class T>
T* data_of(const MaybeTensor& tensor, const char* name, const Shape& shape,
           const phi::Place& place) {
  return tensor ? data_of<T>(*tensor, name, shape, place) : nullptr;
}

inline std::vector<TensorView> views(const Tensors& tensors, const char* name,
                                     const phi::Place& place = phi::CPUPlace()) {
  std::vector<TensorView> result;
  result.reserve(tensors.size());
  for (const paddle::Tensor& tensor : tensors) result.push_back(view(tensor, name, place));
  return result;
}

inline SchemeId scheme_of(const std::string& name) {
  SchemeId scheme;
  throw_if_error(runtime::parse(name, &scheme));
  return scheme;
}

inline paddle::Tensor empty(const std::vector<int64_t>& shape, DType dtype) {
  return paddle::empty(shape, paddle_dtype(dtype), paddle::CPUPlace());
}

}  // namespace regatta::binding
