// Tensors: norm, gate_up's, gate_up bias?, down's, down bias?, post norm?. Adapters as attention's.
#include "blocks/mlp/block.h"
#include "runtime/kinds.h"
#include "runtime/rows.h"
#include "runtime/sequence.h"

namespace regatta::runtime {
namespace {

Status check(const MlpBlock& block) {
  REGATTA_RETURN_IF_ERROR(check_intermediate_size(block.intermediate_size));
  REGATTA_RETURN_IF_ERROR(check_composed("an MLP", block));
  if (block.activation.is_plain()) return {};
  return Status::error(
      "blocks: an MLP's activation has a clamp, a slope or an up_offset (allowed: experts')");
}

void take(MlpBlockParams& p, Tensors& tensors) {
  const MlpBlock& block = p.block;
  const int64_t up_parts = block.activation.gated ? 2 : 1;
  if (block.composed) tensors.check_on_cpu("composed");
  p.norm = tensors.norm("norm", block.norm, p.hidden_size);
  p.gate_up = tensors.linear("gate_up", block.gate_up, p.hidden_size, block.up_size(),
                             block.up_bias, block.adapters ? up_parts : 0);
  p.down = tensors.linear("down", block.down, block.intermediate_size, p.hidden_size,
                          block.down_bias, block.adapters);
  p.post_norm = tensors.norm("post norm", block.post_norm, p.hidden_size);
}

Status run(MlpBlockParams& p) {
  cpu::Scratch& scratch = cpu::Scratch::mine();
  cpu::Scratch::Scope scope(scratch);
  if (p.block.parallel && p.before_rows != nullptr) {
    void* const some = scratch.take<char>(p.num_tokens * p.hidden_size * dtype_size(p.dtype));
    REGATTA_RETURN_IF_ERROR(gather_rows(p.before_rows, p.num_tokens, p.before, p.num_before,
                                        p.hidden_size, p.dtype, some));
    p.before = some;
  }
  if (p.block.composed) return cpu::mlp_sequence(p);
  keep_wanted_adapters(p, scratch);
  return cpu::mlp_block(p);
}

const KindOf<MlpBlockParams> kMlp("mlp", /*reads_step=*/false, check, take, run);

}  // namespace
}  // namespace regatta::runtime
