// Tensors: norm, qkvz's, ba's, conv [conv_width, conv_size], conv bias?, decay [V], step bias,
// skip [V]?, out norm, out's; the states of the convolution and of heads. Behind each linear A and
// B of all adapters, where it has any. On the CPU it is a sequence of operators.
#include "blocks/delta_net/block.h"
#include "runtime/kinds.h"
#include "runtime/rows.h"
#include "runtime/sequence.h"

namespace regatta::runtime {
namespace {

Status check(const DeltaNetBlock& block) {
  const bool sizes = block.num_key_heads > 0 && block.num_value_heads > 0 && block.key_dim > 0 &&
                     block.value_dim > 0 && block.conv_width > 1 && block.norm_groups >= 0;
  const bool by_step = block.write == WriteBy::kStep;
  if (!sizes || block.num_value_heads % block.num_key_heads != 0 ||
      (block.norm_groups > 0 && block.value_size() % block.norm_groups != 0) ||
      (by_step && (block.decay != Decay::kHead || block.decay_bound != 0.0f || block.delta))) {
    return Status::error("blocks: sizes or fields of a delta_net do not go together");
  }
  if (!block.out_norm.is_plain_rms()) {
    return Status::error("blocks: a delta_net's out_norm is no plain RMS norm");
  }
  return check_sequence("a delta_net", block);
}

void take(DeltaNetBlockParams& p, Tensors& tensors) {
  const DeltaNetBlock& block = p.block;
  const int64_t conv = block.conv_size(), values = block.value_size();
  const int64_t heads = block.num_value_heads, width = p.hidden_size;
  p.norm = tensors.norm("norm", block.norm, width);
  const int64_t parts = block.adapters ? 1 : 0;
  p.qkvz = tensors.linear("qkvz", block.qkvz, width, conv + values, false,
                          parts * (block.second_size(values) > 0 ? 2 : 1));
  p.ba = tensors.linear("ba", block.ba, width, block.gate_size(), false,
                        parts * (block.second_size(block.second_gates()) > 0 ? 2 : 1));
  p.conv = static_cast<const float*>(tensors.table("conv", {block.conv_width, conv}).data);
  if (block.conv_bias) p.conv_bias = tensors.floats("conv bias", conv);
  p.decay_log = tensors.floats("decay", heads);
  p.step_bias = tensors.floats("step bias", block.decay_size());
  if (block.skip) p.skip = tensors.floats("skip", heads);
  p.out_norm = tensors.floats("out norm", block.norm_groups > 0 ? values : block.value_dim);
  p.out = tensors.linear("out", block.out, values, width, false, parts);
  p.conv_states = tensors.state("conv_state", {block.conv_width - 1, conv});
  p.states = tensors.state("state", {heads, block.key_dim, block.value_dim}, &p.states_dtype);
}

Status run_rows(DeltaNetBlockParams& p) {
  cpu::Scratch& scratch = cpu::Scratch::mine();
  cpu::Scratch::Scope scope(scratch);
  const DeltaNetBlock& block = p.block;
  const int64_t width = p.hidden_size, values = block.value_size();
  const int64_t wide = block.conv_size() + values;
  void *normed = rows_of(p, scratch, width), *made = rows_of(p, scratch, width);
  void *qkvz = rows_of(p, scratch, wide), *ba = rows_of(p, scratch, block.gate_size());
  p.mixed = rows_of(p, scratch, values);
  REGATTA_RETURN_IF_ERROR(norm_of_input(p, block.norm, normed, made));
  REGATTA_RETURN_IF_ERROR(product_of(p, p.qkvz, block.qkvz, normed, width, wide, qkvz,
                                     Adapted::kQkv, block.second_size(values)));
  REGATTA_RETURN_IF_ERROR(product_of(p, p.ba, block.ba, normed, width, block.gate_size(), ba,
                                     Adapted::kQkv, block.second_size(block.second_gates())));
  p.made_qkvz = qkvz, p.made_ba = ba;
  REGATTA_RETURN_IF_ERROR(cpu::delta_net(p));
  REGATTA_RETURN_IF_ERROR(
      product_of(p, p.out, block.out, p.mixed, values, width, made, Adapted::kOut));
  REGATTA_RETURN_IF_ERROR(sum_over_ranks(p, block.partial, made));
  return sum_with_input(p, made);
}

Status run(DeltaNetBlockParams& p) {
  return run_all_rows(p, [&] { return run_rows(p); });
}

const KindOf<DeltaNetBlockParams> kDeltaNet("delta_net", /*reads_step=*/true, check, take, run);

}  // namespace
}  // namespace regatta::runtime
