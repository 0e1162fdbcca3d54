// Operators of beam search:
//
// regatta_copy_blocks(caches..., copies [C, 2] int32 on the CPU) -> caches, in place: blocks of all
//     tensors [N, ...] are copied, from copies[i][0] to copies[i][1]; no block is both
// regatta_log_softmax(logits [L, V] float32, rows [B] int32) -> logits, in place: those rows become
//     log-probabilities
// regatta_likeliest(logits [L, V] float32, rows [B] int32) {count} -> found [2, B, count] int32:
//     token ids, -1 behind the last, and their logits (floats by their bits), see
//     regatta/likeliest.h
//
// The last two are for GPUs only: on a CPU NumPy does the same (predict/engine/beams.py).
#include "cuda_resources.h"
#include "regatta/copy_blocks.h"
#include "regatta/likeliest.h"

namespace regatta::binding {
namespace {

// Paddle itself returns the in-place outputs.
Tensors copy_blocks(Tensors& caches, const paddle::Tensor& copies) {
  const TensorView pairs = checked_view(copies, "copies", DType::kInt32, {-1, 2});
  if (caches.empty() || pairs.shape[0] == 0) return {};
  const Device device = device_of(caches[0], "caches");
  std::vector<void*> data;
  std::vector<int64_t> block_bytes;
  int64_t num_blocks = INT64_MAX;
  for (const paddle::Tensor& cache : caches) {
    const TensorView x = view(cache, "caches", device.place);
    int64_t bytes = dtype_size(x.dtype);
    for (int i = 1; i < x.rank; ++i) bytes *= x.shape[i];
    if (x.rank < 2 || bytes % 16 != 0) {
      fail("caches has a tensor of shape " + shape_string(x) + ", whose blocks have " +
           std::to_string(bytes) + " bytes (allowed: multiples of 16)");
    }
    num_blocks = std::min(num_blocks, x.shape[0]);
    data.push_back(const_cast<void*>(x.data));
    block_bytes.push_back(bytes);
  }
  CopyBlocksParams params;
  params.caches = data.data();
  params.block_bytes = block_bytes.data();
  params.copies = static_cast<const int32_t*>(pairs.data);
  params.num_caches = static_cast<int64_t>(data.size());
  params.num_copies = pairs.shape[0];
  for (int64_t i = 0; i < 2 * params.num_copies; ++i) {
    if (params.copies[i] < 0 || params.copies[i] >= num_blocks) {
      fail("copies names block " + std::to_string(params.copies[i]) + " (allowed: 0 to " +
           std::to_string(num_blocks - 1) + ")");
    }
  }
  REGATTA_RUN(copy_blocks, params, device);
  return {};
}

LikeliestParams rows_of(const paddle::Tensor& logits, const paddle::Tensor& rows,
                        const Device& device) {
  const TensorView x = checked_view(logits, "logits", DType::kFloat32, {-1, -1}, device.place);
  const TensorView wanted = checked_view(rows, "rows", DType::kInt32, {-1}, device.place);
  LikeliestParams params;
  params.logits = static_cast<float*>(const_cast<void*>(x.data));
  params.rows = static_cast<const int32_t*>(wanted.data);
  params.num_rows = wanted.shape[0];
  params.num_logit_rows = x.shape[0];
  params.vocab_size = x.shape[1];
  return params;
}

Tensors log_softmax(paddle::Tensor& logits, const paddle::Tensor& rows) {
  const Device device = gpu_of(logits, "logits");
  const LikeliestParams params = rows_of(logits, rows, device);
  REGATTA_RUN_ON_GPU(log_softmax, params, device);
  return {};
}

Tensors likeliest(const paddle::Tensor& logits, const paddle::Tensor& rows, int64_t count) {
  const Device device = gpu_of(logits, "logits");
  LikeliestParams params = rows_of(logits, rows, device);
  if (count < 1) fail("count is " + std::to_string(count) + " (allowed: 1 or more)");
  paddle::Tensor found = device.empty({2, params.num_rows, count}, DType::kInt32);
  params.count = count;
  params.token_ids = static_cast<int32_t*>(found.data());
  params.values = reinterpret_cast<float*>(params.token_ids + params.num_rows * count);
  REGATTA_RUN_ON_GPU(likeliest, params, device);
  return {found};
}

std::vector<Shape> copy_shape(const std::vector<Shape>& caches, const Shape&) { return caches; }
std::vector<Type> copy_dtype(const std::vector<Type>& caches, const Type&) { return caches; }
std::vector<Shape> likeliest_shape(const Shape&, const Shape& rows, int64_t count) {
  return {{2, rows[0], count}};
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_copy_blocks)
    .Inputs({paddle::Vec("caches"), "copies"})
    .Outputs({paddle::Vec("caches_out")})
    .SetInplaceMap({{paddle::Vec("caches"), paddle::Vec("caches_out")}})
    .SetKernelFn(PD_KERNEL(regatta::binding::copy_blocks))
    .SetInferShapeFn(PD_INFER_SHAPE(regatta::binding::copy_shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(regatta::binding::copy_dtype));

PD_BUILD_OP(regatta_log_softmax)
    .Inputs({"logits", "rows"})
    .Outputs({"log_probs"})
    .SetInplaceMap({{"logits", "log_probs"}})
    .SetKernelFn(PD_KERNEL(regatta::binding::log_softmax))
    .SetInferShapeFn(regatta::binding::shapes_of<0>)
    .SetInferDtypeFn(regatta::binding::types_of<0>);

PD_BUILD_OP(regatta_likeliest)
    .Inputs({"logits", "rows"})
    .Outputs({"found"})
    .Attrs({"count: int64_t"})
    .SetKernelFn(PD_KERNEL(regatta::binding::likeliest))
    .SetInferShapeFn(PD_INFER_SHAPE(regatta::binding::likeliest_shape))
    .SetInferDtypeFn(regatta::binding::types_of<1>);
