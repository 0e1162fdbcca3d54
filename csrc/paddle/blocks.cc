// regatta_blocks(hidden [T, H], weights..., caches..., step..., tree_mask? [T, words], rows? [L])
//     {blocks, order} -> hidden_out [T, H], or with rows [L, H], caches in place
//
// Blocks of a decoder, one after the other, in one call (runtime/blocks.h). blocks: their records
// (runtime/kinds.h); order: which record each block has.
//
// A call costs the host about 0.5 us per tensor and 5 us besides, which over two calls per layer is
// several percent of a small model's decode step; behind a step that has pushed Paddle's code and
// its tensors out of the CPU's caches it is three times as much. So `weights` and `caches` may each
// be one tensor of regatta_views().
#include "runtime/blocks.h"

#include "cuda_resources.h"

namespace regatta::binding {
namespace {

// The tensors of a list as kernels see them.
class Views {
 public:
  Views(const Tensors& tensors, const char* name, const phi::Place& place) {
    if (are_views(tensors)) {
      const TensorView list = checked_view(tensors[0], name, DType::kUInt8,
                                           {-1, static_cast<int64_t>(sizeof(TensorView))});
      list_ = {static_cast<const TensorView*>(list.data), static_cast<size_t>(list.shape[0])};
    } else {
      own_ = views(tensors, name, place);
      list_ = {own_.data(), own_.size()};
    }
  }

  // Whether a list is one tensor of regatta_views().
  static bool are_views(const Tensors& tensors) {
    return tensors.size() == 1 && tensors[0].dtype() == paddle::DataType::UINT8;
  }

  const runtime::TensorList& list() const { return list_; }

 private:
  std::vector<TensorView> own_;
  runtime::TensorList list_;
};

void check_step(const Tensors& step, size_t least) {
  if (step.size() >= least) return;
  fail("step holds " + std::to_string(step.size()) + " tensors (allowed: those of " +
       "predict.nn.inputs.FIELDS, " + std::to_string(least) + " and more)");
}

// The tensors of `step` that `made` reads.
runtime::StepViews step_views(const runtime::Blocks& made, const Tensors& step,
                              const phi::Place& place) {
  runtime::StepViews views;
  const size_t num_states = made.has_states() ? 2 : 0;  // the last ones
  const auto add = [&](int field, const char* name, const phi::Place& at) {
    views.fields[field] = view(step[field], name, at);
  };
  if (made.reads_step()) {
    check_step(step, runtime::kNumStepFields + num_states);
    add(runtime::kPositions, "positions", place);
    add(runtime::kSlotMapping, "slot_mapping", place);
    add(runtime::kCuSeqlensQ, "cu_seqlens_q", place);
    add(runtime::kContextLens, "context_lens", place);
    add(runtime::kBlockTables, "block_tables", place);
    add(runtime::kMaxLens, "max_lens", phi::CPUPlace());
  }
  if (made.has_adapters() && step.size() > runtime::kAdapterPages + num_states) {
    add(runtime::kAdapterIds, "adapter_ids", place);
    add(runtime::kAdapterPages, "adapter_pages", place);
  }
  if (num_states > 0) {
    views.state_src = view(step[step.size() - 2], "state_src", place);
    views.state_dst = view(step[step.size() - 1], "state_dst", place);
  }
  return views;
}

Tensors blocks(const paddle::Tensor& hidden, const Tensors& weights, Tensors& caches,
               const Tensors& step, const MaybeTensor& tree_mask, const MaybeTensor& rows,
               const std::string& text, const std::vector<int>& order) {
  if (weights.empty()) fail("weights is empty (allowed: those of one block and more)");
  const Device device = device_of(hidden, "hidden");  // lists may be views
  if (!Views::are_views(weights)) check_device(hidden, "hidden", device_of(weights[0], "weights"));
  const phi::Place& place = device.place;
  const Views weight_views(weights, "weights", place), cache_views(caches, "caches", place);
  const TensorView x = view(hidden, "hidden", place);
  runtime::Blocks made(x, device.is_cpu());
  throw_if_error(made.take(text, order, weight_views.list(), cache_views.list()));
  runtime::StepViews read = step_views(made, step, place);
  if (made.reads_step() && tree_mask) read.tree_mask = view(*tree_mask, "tree_mask", place);
  if (rows) read.rows = view(*rows, "rows", place);
  throw_if_error(made.take_step(read));
  paddle::Tensor out = device.empty({made.num_rows(), x.shape[1]}, x.dtype);
  Tensors pieces;
  made.place(out.data(), [&](int64_t bytes) {
    pieces.push_back(device.empty({bytes}, DType::kUInt8));
    return pieces.back().data();
  });
  if (device.is_cpu()) throw_if_error(made.run());
#ifdef REGATTA_WITH_CUDA
  if (!device.is_cpu()) {
    const auto resources = [&](int64_t bytes) {
      return resources_of(device, made.most_rows(), bytes);
    };
    throw_if_error(cuda::blocks(made.params(), made.limits(), resources, launch_on(device)));
  }
#endif
  return {out};
}

// order is of ints: Paddle takes a list of int64_t here for the shape of one more input.
std::vector<Shape> infer_shape(const Shape& hidden, const std::vector<Shape>&,
                               const std::vector<Shape>& caches, const std::vector<Shape>&,
                               const MaybeShape&, const MaybeShape& rows, const std::string&,
                               const std::vector<int>&) {
  std::vector<Shape> result = {rows ? Shape{(*rows)[0], hidden[1]} : hidden};
  result.insert(result.end(), caches.begin(), caches.end());
  return result;
}

std::vector<Type> infer_dtype(const Type& hidden, const std::vector<Type>&,
                              const std::vector<Type>& caches, const std::vector<Type>&,
                              const MaybeType&, const MaybeType&) {
  std::vector<Type> result = {hidden};
  result.insert(result.end(), caches.begin(), caches.end());
  return result;
}

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_blocks)
    .Inputs({"hidden", paddle::Vec("weights"), paddle::Vec("caches"), paddle::Vec("step"),
             paddle::Optional("tree_mask"), paddle::Optional("rows")})
    .Outputs({"hidden_out", paddle::Vec("caches_out")})
    .SetInplaceMap({{paddle::Vec("caches"), paddle::Vec("caches_out")}})
    .Attrs({"blocks: std::string", "order: std::vector<int>"})
    .SetKernelFn(PD_KERNEL(regatta::binding::blocks))
    .SetInferShapeFn(PD_INFER_SHAPE(regatta::binding::infer_shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(regatta::binding::infer_dtype));
