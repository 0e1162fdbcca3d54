// Tensors: norm, down's, up's. On the CPU it is a sequence of smaller operators.
#include "blocks/bottleneck/block.h"
#include "regatta/activate.h"
#include "regatta/add.h"
#include "regatta/linear.h"
#include "regatta/norm.h"
#include "runtime/kinds.h"
#include "runtime/rows.h"

namespace regatta::runtime {
namespace {

Status check(const BottleneckFields& block) {
  if (block.size > 0 && block.norm.is_plain_rms() && !block.post_norm.is_there &&
      block.residual.is_plain_sum()) {
    return {};
  }
  return Status::error("blocks: a bottleneck has size " + std::to_string(block.size) +
                       ", or other norms or sums (allowed: 1 and more; an RMS norm ahead)");
}

void take(BottleneckBlockParams& p, Tensors& tensors) {
  const BottleneckFields& block = p.block;
  p.norm = tensors.norm("norm", block.norm, p.hidden_size);
  p.down =
      tensors.linear("down", block.down, p.hidden_size, block.size, false, block.adapters ? 1 : 0);
  p.up = tensors.linear("up", block.up, block.size, p.hidden_size, false, block.adapters ? 1 : 0);
}

Status run(BottleneckBlockParams& p) {
  cpu::Scratch& scratch = cpu::Scratch::mine();
  cpu::Scratch::Scope scope(scratch);
  keep_wanted_adapters(p, scratch);
  const int64_t tokens = p.num_tokens, size = p.block.size, width = p.hidden_size;
  const auto rows = [&](int64_t features) {
    return static_cast<void*>(scratch.take<char>(tokens * features * dtype_size(p.dtype)));
  };
  void *normed = rows(width), *inner = rows(size), *active = rows(size), *made = rows(width);
  NormParams norm;
  norm.x = p.hidden, norm.weight = p.norm.weight, norm.out = normed, norm.residual_out = made;
  norm.num_tokens = tokens, norm.hidden_size = width, norm.epsilon = p.block.norm.epsilon;
  norm.dtype = p.dtype;
  const auto product = [&](const LinearWeights& weights, SchemeId scheme, Adapted which,
                           const void* x, int64_t in, int64_t out, void* to) {
    LinearParams linear = {x,
                           weights.tensors,
                           scheme_info(scheme).num_tensors,
                           nullptr,
                           to,
                           tokens,
                           in,
                           out,
                           p.dtype,
                           scheme,
                           p.adapters,
                           which,
                           weights.low_rank};
    linear.part_sizes[0] = out;
    return cpu::linear(linear);
  };
  REGATTA_RETURN_IF_ERROR(cpu::norm(norm));
  REGATTA_RETURN_IF_ERROR(
      product(p.down, p.block.down, Adapted::kGateUp, normed, width, size, inner));
  REGATTA_RETURN_IF_ERROR(cpu::activate({inner, active, tokens, size, p.dtype, p.activation()}));
  REGATTA_RETURN_IF_ERROR(product(p.up, p.block.up, Adapted::kDown, active, size, width, made));
  return cpu::add({p.hidden, made, p.hidden_out, tokens * width, 1.0f, 1.0f, p.dtype});
}

const KindOf<BottleneckBlockParams> kBottleneck("bottleneck", /*reads_step=*/false, check, take,
                                                run);

}  // namespace
}  // namespace regatta::runtime
