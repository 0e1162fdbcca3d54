// Tensors: norm, router [E, H], its bias [E]?, correction [E]?, of E experts gate_up's, gate_up
// bias?, down's, down bias?; the shared MLP's gate_up's and down's?, its gate [1, H]?, post norm?.
#include <algorithm>

#include "blocks/experts/block.h"
#include "runtime/kinds.h"

namespace regatta::runtime {
namespace {

Status check(const ExpertBlock& block) {
  REGATTA_RETURN_IF_ERROR(check_intermediate_size(block.intermediate_size));
  const Router& r = block.router;
  if (r.num_experts < 1 || r.num_experts > kMaxExperts) {
    return Status::error("blocks: router.num_experts is " + std::to_string(r.num_experts) +
                         " (allowed: 1 to " + std::to_string(kMaxExperts) + ")");
  }
  if (r.num_groups < 1 || r.num_experts % r.num_groups != 0 || r.top_groups < 1 ||
      r.top_groups > r.num_groups) {
    return Status::error("blocks: router.num_groups is " + std::to_string(r.num_groups) + " of " +
                         std::to_string(r.num_experts) + " experts, top_groups " +
                         std::to_string(r.top_groups) +
                         " (allowed: divisors of num_experts; 1 to num_groups)");
  }
  const int64_t most = std::min(kMaxChosen, r.num_experts / r.num_groups * r.top_groups);
  if (r.top_k < 1 || r.top_k > most) {
    return Status::error("blocks: router.top_k is " + std::to_string(r.top_k) + " (allowed: 1 to " +
                         std::to_string(most) + ")");
  }
  if (r.group_score == GroupScore::kTopTwo && r.num_experts / r.num_groups < 2) {
    return Status::error(
        "blocks: router.group_score is top_two of groups of one expert (allowed: max)");
  }
  if (block.own_experts < 0 || block.first_expert < 0 ||
      block.first_expert + block.own_experts > r.num_experts) {
    return Status::error("blocks: own_experts is " + std::to_string(block.own_experts) +
                         " from first_expert " + std::to_string(block.first_expert) + " on, of " +
                         std::to_string(r.num_experts) + " experts");
  }
  if (block.shared_size < 0) {
    return Status::error("blocks: shared_size is " + std::to_string(block.shared_size) +
                         " (allowed: 0 and more)");
  }
  return {};
}

void take(ExpertBlockParams& p, Tensors& tensors) {
  const ExpertBlock& block = p.block;
  const int64_t count = block.router.num_experts, width = p.hidden_size;
  p.norm = tensors.norm("norm", block.norm, width);
  p.router = tensors.matrix("router", {count, width}).data;
  if (block.router.bias) p.router_bias = tensors.floats("router_bias", count);
  if (block.router.correction) p.correction = tensors.floats("correction", count);
  const int64_t own = block.num_own();
  p.gate_up = tensors.experts("gate_up", block.gate_up, own, width, block.up_size(), block.up_bias);
  p.down =
      tensors.experts("down", block.down, own, block.intermediate_size, width, block.down_bias);
  if (block.shared_size > 0) {
    p.shared_gate_up = tensors.linear("shared_gate_up", block.shared_gate_up, width,
                                      block.shared_up_size(), false);
    p.shared_down =
        tensors.linear("shared_down", block.shared_down, block.shared_size, width, false);
    if (block.shared_gate) p.shared_gate = tensors.matrix("shared_gate", {1, width}).data;
  }
  p.post_norm = tensors.norm("post norm", block.post_norm, width);
}

Status run(ExpertBlockParams& p) { return cpu::expert_block(p); }

const KindOf<ExpertBlockParams> kExperts("experts", /*reads_step=*/false, check, take, run);

}  // namespace
}  // namespace regatta::runtime
