// A block on the CPU as a sequence of operators: the ones that many kinds begin and end with.
#pragma once

#include <string>
#include <utility>

#include "cpu/thread_pool.h"
#include "regatta/add.h"
#include "regatta/blocks.h"
#include "regatta/communicator.h"
#include "regatta/linear.h"
#include "regatta/norm.h"

namespace regatta::runtime {

// Rows of `features` values for all tokens of a block, in the thread's scratch.
inline void* rows_of(const BlockParams& p, cpu::Scratch& scratch, int64_t features) {
  return scratch.take<char>(p.num_tokens * features * dtype_size(p.dtype));
}

// Of a norm of rows of hidden_size; copy: as many that it needs.
inline NormParams norm_params(const BlockParams& p, const Norm& norm, const NormWeights& weights,
                              const void* x, void* out, void* copy) {
  NormParams params;
  params.x = x, params.weight = weights.weight, params.bias = weights.bias;
  params.out = out, params.residual_out = copy;
  params.num_tokens = p.num_tokens, params.hidden_size = p.hidden_size;
  params.epsilon = norm.epsilon, params.dtype = p.dtype;
  params.kind = norm.kind, params.plus_one = norm.plus_one;
  return params;
}

// out = the norm of a block's input; copy: rows of hidden_size that it needs.
inline Status norm_of_input(const BlockParams& p, const Norm& norm, void* out, void* copy) {
  return cpu::norm(norm_params(p, norm, p.norm, p.hidden, out, copy));
}

// *x := its norm, in the thread's scratch; without one it stays.
inline Status normed(const BlockParams& p, const Norm& norm, const NormWeights& weights,
                     cpu::Scratch& scratch, const void** x) {
  if (!norm.is_there) return {};
  void* const out = rows_of(p, scratch, p.hidden_size);
  void* const copy = rows_of(p, scratch, p.hidden_size);
  return cpu::norm(norm_params(p, norm, weights, std::exchange(*x, out), out, copy));
}

// hidden_out = the output of a block whose last product is `made`, of any norms and sums:
// predict.nn.blocks.BlockWeights.ended. input: its own; normed_input: the one of its first product.
template <class Fields>
Status ended(const BlockParams& p, const Fields& block, const void* input, const void* normed_input,
             const void* made, cpu::Scratch& scratch) {
  const Residual& residual = block.residual;
  const bool of_sum = block.post_norm.is_there && block.post_norm_of == Placement::kSum;
  if (!of_sum) REGATTA_RETURN_IF_ERROR(normed(p, block.post_norm, p.post_norm, scratch, &made));
  void* const total = of_sum ? rows_of(p, scratch, p.hidden_size) : p.hidden_out;
  AddParams sum = {made, nullptr, total, p.num_tokens * p.hidden_size, 1.0f, 1.0f, p.dtype};
  if (residual.source != Source::kNone) {
    sum.a = residual.source == Source::kNormed ? normed_input : input, sum.b = made;
    sum.a_scale = residual.input_scale, sum.b_scale = residual.output_scale;
  }
  REGATTA_RETURN_IF_ERROR(cpu::add(sum));
  if (!of_sum) return {};
  void* const copy = rows_of(p, scratch, p.hidden_size);
  return cpu::norm(norm_params(p, block.post_norm, p.post_norm, total, p.hidden_out, copy));
}

// out [T, out_features] = x [T, in_features] times a linear, and what adapters add. second: outputs
// of the second of two parts that adapters change apart, behind those of the first; 0: there is
// one.
inline Status product_of(const BlockParams& p, const LinearWeights& weights, SchemeId scheme,
                         const void* x, int64_t in_features, int64_t out_features, void* out,
                         Adapted which, int64_t second = 0) {
  LinearParams params = {};
  params.x = x, params.weight = weights.tensors;
  params.num_weights = scheme_info(scheme).num_tensors, params.bias = weights.bias;
  params.out = out, params.num_tokens = p.num_tokens;
  params.in_features = in_features, params.out_features = out_features;
  params.dtype = p.dtype, params.scheme = scheme;
  params.part_sizes[0] = out_features - second, params.part_sizes[1] = second;
  params.which = which, params.low_rank = weights.low_rank;
  if (weights.low_rank.a != nullptr) params.adapters = p.adapters;
  return cpu::linear(params);
}

// The rows of the last product become the sum of all ranks', where they are a part of it.
inline Status sum_over_ranks(const BlockParams& p, bool partial, void* made) {
  Communicator* const ranks = partial ? current_communicator() : nullptr;
  return ranks ? ranks->sum(made, p.num_tokens * p.hidden_size, p.dtype) : Status();
}

// hidden_out = hidden + made.
inline Status sum_with_input(const BlockParams& p, const void* made) {
  return cpu::add(
      {p.hidden, made, p.hidden_out, p.num_tokens * p.hidden_size, 1.0f, 1.0f, p.dtype});
}

// What a block that is `composed` may be, whatever its kind.
template <class Fields>
Status check_composed(const char* kind, const Fields& block) {
  if (!block.composed || !(block.partial || block.adapters)) return {};
  return Status::error(std::string("blocks: ") + kind +
                       " is composed and partial, or has adapters (allowed: composed alone)");
}

// What such a sequence computes of a record.
template <class Fields>
Status check_sequence(const char* kind, const Fields& block) {
  if (block.norm.is_there && !block.post_norm.is_there && block.residual.is_plain_sum()) return {};
  return Status::error(std::string("blocks: ") + kind +
                       " has other norms or sums (allowed: a norm ahead, and input + output)");
}

}  // namespace regatta::runtime
