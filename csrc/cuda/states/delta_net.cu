// The delta net: which way it goes (delta_net.h). Host code.
#include <algorithm>

#include "cuda/common.cuh"
#include "cuda/states/delta_net.h"

namespace regatta::cuda {
namespace {

constexpr int kDim = 128, kWidth = 4;  // of a head, and of a convolution, that have own kernels

// Whether kernels for heads of 128 compute it.
bool has_own_form(const DeltaNetBlock& block) {
  return block.key_dim == kDim && block.value_dim == kDim && block.conv_width == kWidth &&
         block.decay == Decay::kHead && block.delta && block.write == WriteBy::kSigmoid &&
         block.unit_keys && !block.skip && block.norm_groups == 0 && !block.gate_first;
}

}  // namespace

DeltaArgs delta_args(const DeltaNetBlockParams& p) {
  const DeltaNetBlock& block = p.block;
  DeltaArgs a = {};
  a.qkvz = p.made_qkvz, a.ba = p.made_ba, a.mixed = p.mixed;
  a.conv = p.conv, a.conv_bias = p.conv_bias, a.decay_log = p.decay_log;
  a.step_bias = p.step_bias, a.skip = p.skip, a.out_norm = p.out_norm;
  a.conv_states = p.conv_states, a.states = p.states;
  a.borders = p.batch.cu_seqlens_q, a.contexts = p.batch.context_lens;
  a.src = p.state_src, a.dst = p.state_dst;
  a.num_tokens = static_cast<int>(p.num_tokens), a.num_seqs = static_cast<int>(p.batch.num_seqs);
  a.key_heads = static_cast<int>(block.num_key_heads);
  a.value_heads = static_cast<int>(block.num_value_heads);
  a.key_dim = static_cast<int>(block.key_dim), a.value_dim = static_cast<int>(block.value_dim);
  a.conv_width = static_cast<int>(block.conv_width);
  a.norm_groups = static_cast<int>(block.norm_groups);
  a.decay_bound = block.decay_bound, a.write_scale = block.write_scale;
  a.epsilon = block.out_norm.epsilon;
  a.by_channel = block.decay == Decay::kChannel, a.delta = block.delta;
  a.by_step = block.write == WriteBy::kStep, a.unit_keys = block.unit_keys;
  a.tiled = block.tiled_heads, a.silu_gate = block.gate == OutGate::kSilu;
  a.gate_first = block.gate_first;
  return a;
}

DeltaWay delta_way(const DeltaNetBlockParams& p, const AttentionLimits& limits) {
  const std::string forced = forced_candidate("delta_net");
  if (!has_own_form(p.block) || forced == "any") return DeltaWay::kAny;
  const bool chunks = p.dtype != DType::kFloat32 && compute_capability() >= 80 &&
                      has_room_for_chunks() && limits.max_query_len > kFewTokens;
  return chunks && forced != "steps" ? DeltaWay::kChunks : DeltaWay::kSteps;
}

DeltaNeeds delta_needs(const DeltaNetBlockParams& p, DeltaWay way) {
  const DeltaNetBlock& block = p.block;
  const int64_t tokens = p.num_tokens, heads = block.num_value_heads;
  DeltaNeeds needs;
  if (way == DeltaWay::kAny) needs.floats = tokens * block.value_size();
  if (way == DeltaWay::kChunks) {
    needs.convolved = tokens * block.conv_size();
    needs.solved = tokens * heads * 2 * 64;
    needs.floats = 2 * tokens * heads;
  }
  return needs;
}

Status delta_net(const DeltaNetBlockParams& p, DeltaWay way, void* convolved, void* solved,
                 float* floats, const Launch& launch_on) {
  DeltaArgs args = delta_args(p);
  if (way == DeltaWay::kAny) {
    args.outputs = floats;
    REGATTA_RETURN_IF_ERROR(delta_any(args, p.dtype, p.states_dtype, launch_on));
    return delta_norm(args, floats, false, p.dtype, launch_on);
  }
  if (way == DeltaWay::kSteps) {
    return delta_steps(args, false, p.dtype, p.states_dtype, launch_on);
  }
  args.convolved = convolved, args.solved = solved;
  args.logs = floats, args.strengths = floats + p.num_tokens * p.block.num_value_heads;
  REGATTA_RETURN_IF_ERROR(delta_prepare(args, p.dtype, launch_on));
  REGATTA_RETURN_IF_ERROR(delta_pass(args, p.dtype, p.states_dtype, launch_on));
  REGATTA_RETURN_IF_ERROR(delta_norm(args, nullptr, true, p.dtype, launch_on));
  return delta_steps(args, true, p.dtype, p.states_dtype, launch_on);
}

}  // namespace regatta::cuda
