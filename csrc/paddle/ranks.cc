// regatta_sum_ranks(x) -> like x: the sum of all ranks' x; on a CPU with one rank, x itself
// regatta_gather_ranks(x [T, N]) {counts} -> [T, the sum of counts]: the first counts[r] columns of
//     rank r's x, one behind the other; x is float32 on GPUs
// regatta_own_rows(token_ids [T] int32) {begin, end, other} -> [T]: token - begin of those in
//     [begin, end), else other
#include <cstring>
#include <numeric>

#include "cuda_resources.h"
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
  const Device device = device_of(x, "x");
  const TensorView from = view(x, "x", device.place);
  check_activation(from, "x");
  paddle::Tensor out = device.empty(shape_of(from), from.dtype);
  const size_t bytes = num_bytes(from);
  const int64_t count = static_cast<int64_t>(bytes) / dtype_size(from.dtype);
  if (device.is_cpu()) {
    if (bytes != 0) std::memcpy(out.data(), from.data, bytes);
    if (Communicator* const ranks = current_communicator()) {
      throw_if_error(ranks->sum(out.data(), count, from.dtype));
    }
  }
#ifdef REGATTA_WITH_CUDA
  if (!device.is_cpu() && count != 0) {
    make_current(device);
    throw_if_error(cuda::sum_ranks({from.data, out.data(), count, from.dtype}, launch_on(device)));
  }
#endif
  return {out};
}

// Rows of all ranks' columns.
void gather_on_cpu(const TensorView& from, const std::vector<int>& counts, int64_t width,
                   char* all) {
  Communicator* const ranks = current_communicator();
  const size_t bytes = num_bytes(from), unit = static_cast<size_t>(dtype_size(from.dtype));
  const size_t pitch = static_cast<size_t>(from.shape[1]) * unit;
  std::vector<char> parts(ranks ? bytes * counts.size() : 0);
  if (ranks) throw_if_error(ranks->gather(from.data, parts.data(), static_cast<int64_t>(bytes)));
  const char* const first = ranks ? parts.data() : static_cast<const char*>(from.data);
  for (int64_t row = 0; row < from.shape[0]; ++row) {
    char* to = all + static_cast<size_t>(row * width) * unit;
    for (size_t rank = 0; rank < counts.size(); ++rank) {
      const size_t size = static_cast<size_t>(counts[rank]) * unit;
      std::memcpy(to, first + rank * bytes + static_cast<size_t>(row) * pitch, size);
      to += size;
    }
  }
}

Tensors gather_ranks(const paddle::Tensor& x, const std::vector<int>& counts) {
  const Device device = device_of(x, "x");
  const TensorView from =
      checked_view(x, "x", view(x, "x", device.place).dtype, {-1, -1}, device.place);
  Communicator* const ranks = current_communicator();
  const size_t size = ranks ? static_cast<size_t>(ranks->size()) : 1;
  if (counts.size() != size) {
    fail("counts are of " + std::to_string(counts.size()) + " ranks, and this process is one of " +
         std::to_string(size));
  }
  for (const int count : counts) {
    if (count >= 0 && count <= from.shape[1]) continue;
    fail("counts hold " + std::to_string(count) + " (allowed: 0 to " +
         std::to_string(from.shape[1]) + ", the columns of x)");
  }
  const int64_t width = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  paddle::Tensor out = device.empty({from.shape[0], width}, from.dtype);
  if (from.shape[0] == 0) return {out};
  if (device.is_cpu()) gather_on_cpu(from, counts, width, static_cast<char*>(out.data()));
#ifdef REGATTA_WITH_CUDA
  if (!device.is_cpu()) {
    if (from.dtype != DType::kFloat32) fail("x is not float32, as it must be on a GPU");
    make_current(device);
    throw_if_error(cuda::gather_over_ranks({static_cast<const float*>(from.data), out.data<float>(),
                                            counts.data(), from.shape[0], from.shape[1]},
                                           launch_on(device)));
  }
#endif
  return {out};
}

std::vector<Shape> gathered_shape(const Shape& x, const std::vector<int>& counts) {
  return {{x[0], std::accumulate(counts.begin(), counts.end(), int64_t{0})}};
}

Tensors own_rows(const paddle::Tensor& token_ids, int begin, int end, int other) {
  const Device device = device_of(token_ids, "token_ids");
  const TensorView ids = checked_view(token_ids, "token_ids", DType::kInt32, {-1}, device.place);
  paddle::Tensor out = device.empty({ids.shape[0]}, DType::kInt32);
  const auto* const from = static_cast<const int32_t*>(ids.data);
  auto* const rows = static_cast<int32_t*>(out.data());
  if (device.is_cpu()) {
    for (int64_t i = 0; i < ids.shape[0]; ++i) {
      rows[i] = from[i] >= begin && from[i] < end ? from[i] - begin : other;
    }
  }
#ifdef REGATTA_WITH_CUDA
  if (!device.is_cpu()) {
    make_current(device);
    throw_if_error(
        cuda::own_rows({from, rows, ids.shape[0], begin, end, other}, launch_on(device)));
  }
#endif
  return {out};
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
    .Attrs({"counts: std::vector<int>"})
    .SetKernelFn(PD_KERNEL(regatta::binding::gather_ranks))
    .SetInferShapeFn(PD_INFER_SHAPE(regatta::binding::gathered_shape))
    .SetInferDtypeFn(regatta::binding::types_of<0>);

PD_BUILD_OP(regatta_own_rows)
    .Inputs({"token_ids"})
    .Outputs({"rows"})
    .Attrs({"begin: int", "end: int", "other: int"})
    .SetKernelFn(PD_KERNEL(regatta::binding::own_rows))
    .SetInferShapeFn(regatta::binding::shapes_of<0>)
    .SetInferDtypeFn(regatta::binding::types_of<0>);
