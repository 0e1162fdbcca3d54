// The same on GPUs: the launch that ends the block makes the next one's norm, too.
#include "blocks/bottleneck/block.h"
#include "cuda/walk.h"

namespace regatta::cuda {
namespace {

struct BottleneckScratch : Buffers {
  Values inner{this};   // [T, size]
  Values active{this};  // [T, size]
};

BlockView view(const BottleneckBlockParams& p) { return view_of(p, p.block.down, p.block.up); }

void count(const BottleneckBlockParams& p, const AttentionLimits&, SharedScratch& shared,
           BottleneckScratch& scratch) {
  const int64_t rows = p.num_tokens, size = p.block.size;
  scratch.inner.need(rows * size);
  scratch.active.need(rows * size);
  shared.product.count(p.block.down, p.dtype, rows, p.hidden_size, size, false, !norms_ahead(rows));
  shared.product.count(p.block.up, p.dtype, rows, size, p.hidden_size);
  shared.need_adapters(p.adapters, rows, p.hidden_size, 1, size);
  shared.need_adapters(p.adapters, rows, size, 1, p.hidden_size);
}

Status run(const BottleneckBlockParams& p, const BlockView& view, const BottleneckScratch& scratch,
           Walk& walk) {
  const int64_t rows = p.num_tokens, size = p.block.size;
  const AdapterRows adapters = walk.of_wanted(p.adapters);
  Product down("down", p.block.down, p.down, p.hidden, scratch.inner, rows, p.hidden_size, size);
  REGATTA_RETURN_IF_ERROR(walk.take_norm(down, view, p.hidden));
  if (adapters.ids != nullptr) {
    Adding adding;
    REGATTA_RETURN_IF_ERROR(walk.adding_to_first(down, p.down.low_rank, adapters, Adapted::kGateUp,
                                                 {size}, view, p.hidden, &adding));
    REGATTA_RETURN_IF_ERROR(walk.add_ahead(down, adding, nullptr));
  }
  REGATTA_RETURN_IF_ERROR(walk.multiply(down, p.dtype));
  REGATTA_RETURN_IF_ERROR(
      activate({scratch.inner, scratch.active, rows, size, p.dtype, p.activation()}, walk.launch));
  Product up("up", p.block.up, p.up, scratch.active, p.hidden_out, rows, size, p.hidden_size);
  return walk.end_block(up, view, walk.source_of(view), true, adapters, Adapted::kDown,
                        p.up.low_rank);
}

const KindOnGpuOf<BottleneckBlockParams, BottleneckScratch> kBottleneck("bottleneck", view, count,
                                                                        run);

}  // namespace
}  // namespace regatta::cuda
