// A block on the CPU as a sequence of operators: the ones that many kinds begin and end with.
#pragma once

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

// out = the norm of a block's input; copy: rows of hidden_size that it needs.
inline Status norm_of_input(const BlockParams& p, const Norm& norm, void* out, void* copy) {
  NormParams params;
  params.x = p.hidden, params.weight = p.norm.weight, params.bias = p.norm.bias;
  params.out = out, params.residual_out = copy;
  params.num_tokens = p.num_tokens, params.hidden_size = p.hidden_size;
  params.epsilon = norm.epsilon, params.dtype = p.dtype;
  params.kind = norm.kind, params.plus_one = norm.plus_one;
  return cpu::norm(params);
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

// What such a sequence computes of a record.
template <class Fields>
Status check_sequence(const char* kind, const Fields& block) {
  if (block.norm.is_there && !block.post_norm.is_there && block.residual.is_plain_sum()) return {};
  return Status::error(std::string("blocks: ") + kind +
                       " has other norms or sums (allowed: a norm ahead, and input + output)");
}

}  // namespace regatta::runtime
