// The short gated convolution on GPUs: a product, the convolution, a product. Host code.
#include "blocks/short_conv/block.h"
#include "cuda/states/short_conv.h"
#include "cuda/walk.h"

namespace regatta::cuda {
namespace {

struct ShortConvScratch : Buffers {
  Values bcx{this};    // [T, 3 size]
  Values mixed{this};  // [T, size]
  Values some{this};   // [L, size], where some rows are the output
};

BlockView view(const ShortConvBlockParams& c) { return view_of(c, c.block.bcx, c.block.out); }

void count(const ShortConvBlockParams& c, const AttentionLimits&, SharedScratch& shared,
           ShortConvScratch& scratch) {
  const ShortConvFields& block = c.block;
  const int64_t rows = c.num_tokens, size = block.size, width = c.hidden_size;
  scratch.bcx.need(rows * 3 * size);
  scratch.mixed.need(rows * size);
  if (c.rows != nullptr) scratch.some.need(c.num_rows * size);
  shared.product.count(block.bcx, c.dtype, rows, width, 3 * size, false, !norms_ahead(rows));
  shared.product.count(block.out, c.dtype, rows, size, width);
}

Status run(const ShortConvBlockParams& c, const BlockView& view, const ShortConvScratch& s,
           Walk& walk) {
  const ShortConvFields& block = c.block;
  const int64_t rows = c.num_tokens, size = block.size, width = c.hidden_size;
  Product bcx("bcx", block.bcx, c.bcx, c.hidden, s.bcx, rows, width, 3 * size);
  REGATTA_RETURN_IF_ERROR(walk.take_norm(bcx, view, c.hidden));
  REGATTA_RETURN_IF_ERROR(walk.multiply(bcx, c.dtype));
  ShortConvBlockParams between = c;
  between.made_bcx = s.bcx, between.mixed = s.mixed;
  REGATTA_RETURN_IF_ERROR(short_conv(between, walk.launch));
  return walk.end_rows({"out", block.out, c.out, s.mixed, c.hidden_out, rows, size, width}, view,
                       s.some, {}, Adapted::kOut, {});
}

const KindOnGpuOf<ShortConvBlockParams, ShortConvScratch> kShortConv("short_conv", view, count,
                                                                     run);

}  // namespace
}  // namespace regatta::cuda
