// The delta net on GPUs: two products of one norm, what is between (cuda/states/delta_net.h), and
// the last product. Host code.
#include "blocks/delta_net/block.h"
#include "cuda/states/delta_net.h"
#include "cuda/walk.h"

namespace regatta::cuda {
namespace {

struct DeltaNetScratch : Buffers {
  Values qkvz{this};   // [T, C + V E]
  Values ba{this};     // [T, gate_size]
  Values mixed{this};  // [T, V E]
  Values some{this};   // [L, V E], where some rows are the output
  Values convolved{this}, solved{this};
  Floats floats{this};
};

BlockView view(const DeltaNetBlockParams& d) {
  BlockView made = view_of(d, d.block.qkvz, d.block.out);
  made.shares_norm = true;
  return made;
}

void count(const DeltaNetBlockParams& d, const AttentionLimits& limits, SharedScratch& shared,
           DeltaNetScratch& scratch) {
  const DeltaNetBlock& block = d.block;
  const int64_t rows = d.num_tokens, width = d.hidden_size, values = block.value_size();
  const int64_t wide = block.conv_size() + values;
  const DeltaNeeds needs = delta_needs(d, delta_way(d, limits));
  scratch.qkvz.need(rows * wide);
  scratch.ba.need(rows * block.gate_size());
  scratch.mixed.need(rows * values);
  if (d.rows != nullptr) scratch.some.need(d.num_rows * values);
  scratch.convolved.need(needs.convolved);
  scratch.solved.need(needs.solved);
  scratch.floats.need(needs.floats);
  shared.product.count(block.qkvz, d.dtype, rows, width, wide);
  shared.product.count(block.ba, d.dtype, rows, width, block.gate_size());
  shared.product.count(block.out, d.dtype, rows, values, width);
  if (!block.adapters) return;
  shared.need_adapters(d.adapters, rows, width, 2, wide);
  shared.need_adapters(d.adapters, rows, width, 2, block.gate_size());
  shared.need_adapters(d.adapters, rows, values, 1, width);
}

// A first product, of the normed rows, with what adapters add; second: outputs of its second part.
Status multiply_first(Product product, const DeltaNetBlockParams& d, const LinearWeights& weights,
                      int64_t second, Walk& walk) {
  if (d.block.adapters && d.adapters.ids != nullptr) {
    const int64_t first = product.out_features - second;
    const auto set = [&](std::initializer_list<int64_t> parts) {
      Adding adding;
      REGATTA_RETURN_IF_ERROR(walk.adding_to(product, weights.low_rank, d.adapters, Adapted::kQkv,
                                             parts, product.x, nullptr, d.dtype, &adding));
      return walk.add_ahead(product, adding, nullptr);
    };
    REGATTA_RETURN_IF_ERROR(second > 0 ? set({first, second}) : set({first}));
  }
  return walk.multiply(product, d.dtype);
}

Status run(const DeltaNetBlockParams& d, const BlockView& view, const DeltaNetScratch& s,
           Walk& walk) {
  const DeltaNetBlock& block = d.block;
  const int64_t rows = d.num_tokens, width = d.hidden_size, values = block.value_size();
  const void* const normed = walk.shared.normed;
  REGATTA_RETURN_IF_ERROR(walk.take_shared_norm(view));
  REGATTA_RETURN_IF_ERROR(multiply_first(
      {"qkvz", block.qkvz, d.qkvz, normed, s.qkvz, rows, width, block.conv_size() + values}, d,
      d.qkvz, block.second_size(values), walk));
  REGATTA_RETURN_IF_ERROR(
      multiply_first({"ba", block.ba, d.ba, normed, s.ba, rows, width, block.gate_size()}, d, d.ba,
                     block.second_size(block.second_gates()), walk));
  DeltaNetBlockParams between = d;
  between.made_qkvz = s.qkvz, between.made_ba = s.ba, between.mixed = s.mixed;
  REGATTA_RETURN_IF_ERROR(
      delta_net(between, delta_way(d, walk.limits), s.convolved, s.solved, s.floats, walk.launch));
  return walk.end_rows({"out", block.out, d.out, s.mixed, d.hidden_out, rows, values, width}, view,
                       s.some, block.adapters ? d.adapters : AdapterRows(), Adapted::kOut,
                       d.out.low_rank);
}

const KindOnGpuOf<DeltaNetBlockParams, DeltaNetScratch> kDeltaNet("delta_net", view, count, run);

}  // namespace
}  // namespace regatta::cuda
