// The MLP on GPUs: two products, of which the first makes the function where it can. Host code.
#include <utility>

#include "blocks/mlp/block.h"
#include "cuda/walk.h"

namespace regatta::cuda {
namespace {

struct MlpScratch : Buffers {
  Values inner{this};      // [T, I]
  Values functions{this};  // [T, I or 2 I], ahead of a function that is a launch of its own
};

BlockView view(const MlpBlockParams& m) {
  return view_of(m, m.block.gate_up, m.block.down, m.block.parallel);
}

void count(const MlpBlockParams& m, const AttentionLimits&, SharedScratch& shared,
           MlpScratch& scratch) {
  const MlpBlock& block = m.block;
  const int64_t rows = m.num_tokens;
  scratch.inner.need(rows * block.intermediate_size);
  const bool folds = is_gates_silu(block.activation) && m.adapters.ids == nullptr;
  if (!folds) scratch.functions.need(rows * block.up_size());
  shared.need_adapters(m.adapters, rows, m.hidden_size, block.activation.gated ? 2 : 1, 0);
  shared.need_adapters(m.adapters, rows, block.intermediate_size, 1, m.hidden_size);
  shared.product.count(block.gate_up, m.dtype, rows, m.hidden_size, block.up_size(), folds,
                       !norms_ahead(rows));
  shared.product.count(block.down, m.dtype, rows, block.intermediate_size, m.hidden_size);
}

// `up`, and a launch behind it that adds what adapters do and makes the function.
Status run_adapted_up(Product& up, const MlpBlockParams& m, const AdapterRows& adapters,
                      const BlockView& view, const void* input, const MlpScratch& scratch,
                      Walk& walk) {
  const Activation& activation = m.block.activation;
  const int64_t inner = m.block.intermediate_size;
  Adding adding;
  const auto set = [&](std::initializer_list<int64_t> parts) {
    return walk.adding_to_first(up, m.gate_up.low_rank, adapters, Adapted::kGateUp, parts, view,
                                input, &adding);
  };
  REGATTA_RETURN_IF_ERROR(activation.gated ? set({inner, inner}) : set({inner}));
  REGATTA_RETURN_IF_ERROR(shrink(adding.down, walk.launch));
  adding.up.out = std::exchange(up.out, scratch.functions);
  adding.up.residual = scratch.functions;
  adding.up.activation = &activation;
  REGATTA_RETURN_IF_ERROR(walk.multiply(up, m.dtype));
  return expand(adding.up, walk.launch);
}

Status run(const MlpBlockParams& m, const BlockView& view, const MlpScratch& scratch, Walk& walk) {
  const MlpBlock& block = m.block;
  const int64_t rows = m.num_tokens;
  const void* input = m.input();
  if (block.parallel && m.before_rows != nullptr) {
    void* const some = walk.shared.some;
    REGATTA_RETURN_IF_ERROR(gather_rows(
        {m.before_rows, input, some, rows, m.num_before, m.hidden_size, m.dtype}, walk.launch));
    input = some;
  }
  Product gate_up("gate_up", block.gate_up, m.gate_up, input, scratch.inner, rows, m.hidden_size,
                  block.up_size());
  REGATTA_RETURN_IF_ERROR(walk.take_norm(gate_up, view, input));
  Product down("down", block.down, m.down, scratch.inner, m.hidden_out, rows,
               block.intermediate_size, m.hidden_size);
  const AdapterRows adapters = walk.of_wanted(m.adapters);
  if (adapters.ids != nullptr) {
    REGATTA_RETURN_IF_ERROR(run_adapted_up(gate_up, m, adapters, view, input, scratch, walk));
  } else {
    if (is_gates_silu(block.activation)) gate_up.next = &down;
    REGATTA_RETURN_IF_ERROR(
        walk.multiply_up(gate_up, block.activation, scratch.functions, m.dtype));
  }
  const void* const source = block.joins ? input : walk.source_of(view);
  return walk.end_block(down, view, source, true, adapters, Adapted::kDown, m.down.low_rank,
                        block.joins ? m.hidden : nullptr);
}

const KindOnGpuOf<MlpBlockParams, MlpScratch> kMlp("mlp", view, count, run);

}  // namespace
}  // namespace regatta::cuda
