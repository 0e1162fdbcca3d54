// Tensors: norm, bcx's (and its bias), taps [width, size], taps bias?, out's (and its bias); the
// state. On the CPU it is a sequence of operators.
#include "blocks/short_conv/block.h"
#include "runtime/kinds.h"
#include "runtime/rows.h"
#include "runtime/sequence.h"

namespace regatta::runtime {
namespace {

Status check(const ShortConvFields& block) {
  if (block.size < 1 || block.width < 2) {
    return Status::error("blocks: a short_conv has size " + std::to_string(block.size) +
                         " and width " + std::to_string(block.width) +
                         " (allowed: 1 and more, 2 and more)");
  }
  return check_sequence("a short_conv", block);
}

void take(ShortConvBlockParams& p, Tensors& tensors) {
  const ShortConvFields& block = p.block;
  const int64_t size = block.size, width = p.hidden_size;
  p.norm = tensors.norm("norm", block.norm, width);
  p.bcx = tensors.linear("bcx", block.bcx, width, 3 * size, block.bias, block.adapters);
  p.taps = static_cast<const float*>(tensors.table("taps", {block.width, size}).data);
  if (block.conv_bias) p.taps_bias = tensors.floats("taps bias", size);
  p.out = tensors.linear("out", block.out, size, width, block.out_bias, block.adapters);
  p.states = tensors.state("conv_state", {block.width - 1, size});
}

Status run_rows(ShortConvBlockParams& p) {
  cpu::Scratch& scratch = cpu::Scratch::mine();
  cpu::Scratch::Scope scope(scratch);
  const ShortConvFields& block = p.block;
  const int64_t size = block.size, width = p.hidden_size;
  void *normed = rows_of(p, scratch, width), *made = rows_of(p, scratch, width);
  void* const bcx = rows_of(p, scratch, 3 * size);
  p.mixed = rows_of(p, scratch, size);
  REGATTA_RETURN_IF_ERROR(norm_of_input(p, block.norm, normed, made));
  REGATTA_RETURN_IF_ERROR(
      product_of(p, p.bcx, block.bcx, normed, width, 3 * size, bcx, Adapted::kQkv));
  p.made_bcx = bcx;
  REGATTA_RETURN_IF_ERROR(cpu::short_conv(p));
  REGATTA_RETURN_IF_ERROR(
      product_of(p, p.out, block.out, p.mixed, size, width, made, Adapted::kOut));
  REGATTA_RETURN_IF_ERROR(sum_over_ranks(p, block.partial, made));
  return sum_with_input(p, made);
}

Status run(ShortConvBlockParams& p) {
  return run_all_rows(p, [&] { return run_rows(p); });
}

const KindOf<ShortConvBlockParams> kShortConv("short_conv", /*reads_step=*/true, check, take, run);

}  // namespace
}  // namespace regatta::runtime
