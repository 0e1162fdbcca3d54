// The same on GPUs, by the launch that ends blocks: the next one's norm is made with it.
#include "blocks/scale/block.h"
#include "cuda/walk.h"

namespace regatta::cuda {
namespace {

BlockView view(const ScaleBlockParams& p) {
  return view_of(p, SchemeId::kDense, SchemeId::kDense);  // it has no products
}

void count(const ScaleBlockParams&, const AttentionLimits&, SharedScratch&, Buffers&) {}

Status run(const ScaleBlockParams& p, const BlockView& view, const Buffers&, Walk& walk) {
  walk.hand(view, p.num_tokens, /*ends_in_product=*/false);
  SumNormParams made;
  made.made = p.hidden;
  Residual residual = view.residual;
  residual.output_scale *= p.block.factor;
  const BlockView scaled = {p, view.norm, view.post_norm, view.post_norm_of, residual};
  return walk.sum(made, scaled, p.hidden, p.hidden_out, p.num_tokens, p.hidden_size);
}

const KindOnGpuOf<ScaleBlockParams, Buffers> kScale("scale", view, count, run);

}  // namespace
}  // namespace regatta::cuda
