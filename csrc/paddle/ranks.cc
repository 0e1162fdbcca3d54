// regatta_sum_ranks(x) -> like x: the sum of all ranks' x
// regatta_gather_ranks(x [T, N]) {num_ranks} -> [num_ranks, T, N]: all ranks' x
//
// With one rank, x itself.
#include <cstring>

#include "common.h"
#include "regatta/communicator.h"

namespace regatta::binding {
namespace {

size_t num_bytes(const TensorView& x) {
  int64_t bytes = dtype_size(x.dtype);
  for (int i = 0; i < x.rank; ++i) bytes *= x.shape[i];
  return static_cast<size_t>(bytes);
}

Shape shape_of(const TensorView& x) { return Shape(x.shape, x.shape + x.rank); }

Tensors sum_ranks(const paddle::Tensor& x) {
  const TensorView from = view(x, "x");
  check_activation(from, "x");
  paddle::Tensor out = empty(shape_of(from), from.dtype);
  const size_t bytes = num_bytes(from);
  if (bytes != 0) std::memcpy(out.data(), from.data, bytes);
  if (Communicator* const ranks = current_communicator()) {
    throw_if_error(
        ranks->sum(out.data(), static_cast<int64_t>(bytes) / dtype_size(from.dtype), from.dtype));
  }
  return {out};
}

Tensors gather_ranks(const paddle::Tensor& x, int num_ranks) {
  const TensorView from = view(x, "x");
  Communicator* const ranks = current_communicator();
  const int size = ranks ? ranks->size() : 1;
  if (num_ranks != size) {
    fail("num_ranks is " + std::to_string(num_ranks) + ", and this process is one of " +
         std::to_string(size) + " ranks");
  }
  Shape shape = shape_of(from);
  shape.insert(shape.begin(), num_ranks);
  paddle::Tensor out = empty(shape, from.dtype);
  const size_t bytes = num_bytes(from);
  if (!ranks) {
    if (bytes != 0) std::memcpy(out.data(), from.data, bytes);
  } else {
    throw_if_error(ranks->gather(from.data, out.data(), static_cast<int64_t>(bytes)));
  }
  return {out};
}

std::vector<Shape> gathered_shape(const Shape& x, int num_ranks) {
  Shape shape = x;
  shape.insert(shape.begin(), num_ranks);
  return {shape};
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_sum_ranks)
    .Inputs({"x"})
    .Outputs({"out"})
    .SetKernelFn(PD_KERNEL(regatta::binding::sum_ranks))
    .SetInferShapeFn(regatta::binding::shapes_of<0>)
    .SetInferDtypeFn(regatta::binding::types_of<0>);

PD_BUILD_OP(regatta_gather_ranks)
    .Inputs({"x"})
    .Outputs({"all"})
    .Attrs({"num_ranks: int"})
    .SetKernelFn(PD_KERNEL(regatta::binding::gather_ranks))
    .SetInferShapeFn(PD_INFER_SHAPE(regatta::binding::gathered_shape))
    .SetInferDtypeFn(regatta::binding::types_of<0>);
