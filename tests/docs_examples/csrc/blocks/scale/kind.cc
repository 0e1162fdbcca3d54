// Tensors: post norm?
#include "blocks/scale/block.h"
#include "runtime/kinds.h"

namespace regatta::runtime {
namespace {

Status check(const ScaleFields& block) {
  if (block.factor != 0.0f && !block.norm.is_there && !block.post_norm.is_there) return {};
  return Status::error("blocks: factor is " + std::to_string(block.factor) +
                       ", or there is a norm (allowed: not 0, and none)");
}

void take(ScaleBlockParams&, Tensors&) {}

template <class T>
void scale(const ScaleBlockParams& p) {
  const auto* const x = static_cast<const T*>(p.hidden);
  auto* const out = static_cast<T*>(p.hidden_out);
  const Residual& residual = p.block.residual;
  const float factor = residual.input_scale + residual.output_scale * p.block.factor;
  for (int64_t i = 0; i < p.num_tokens * p.hidden_size; ++i) {
    from_float(factor * to_float(x[i]), &out[i]);
  }
}

Status run(ScaleBlockParams& p) {
  p.dtype == DType::kFloat32    ? scale<float>(p)
  : p.dtype == DType::kBFloat16 ? scale<bf16>(p)
                                : scale<fp16>(p);
  return {};
}

const KindOf<ScaleBlockParams> kScale("scale", /*reads_step=*/false, check, take, run);

}  // namespace
}  // namespace regatta::runtime
