// The MLP as a sequence of operators, as predict.nn.kinds.mlp's run() has it in an exported program
// beside attention that is one. Bound: memory, between them.
#include "runtime/sequence.h"

#include "blocks/mlp/block.h"
#include "cpu/thread_pool.h"
#include "regatta/activate.h"
#include "regatta/add.h"

namespace regatta::cpu {

Status mlp_sequence(const MlpBlockParams& p) {
  const MlpBlock& block = p.block;
  Scratch& scratch = Scratch::mine();
  const Scratch::Scope scope(scratch);
  const void *x = p.input(), *hidden = p.hidden;
  REGATTA_RETURN_IF_ERROR(runtime::normed(p, block.norm, p.norm, scratch, &x));
  void* const up = runtime::rows_of(p, scratch, block.up_size());
  REGATTA_RETURN_IF_ERROR(runtime::product_of(p, p.gate_up, block.gate_up, x, p.hidden_size,
                                              block.up_size(), up, Adapted::kGateUp));
  void* const inner = runtime::rows_of(p, scratch, block.intermediate_size);
  REGATTA_RETURN_IF_ERROR(
      activate({up, inner, p.num_tokens, block.intermediate_size, p.dtype, block.activation}));
  void* const made = runtime::rows_of(p, scratch, p.hidden_size);
  REGATTA_RETURN_IF_ERROR(runtime::product_of(p, p.down, block.down, inner, block.intermediate_size,
                                              p.hidden_size, made, Adapted::kDown));
  if (block.joins) {
    const int64_t count = p.num_tokens * p.hidden_size;
    REGATTA_RETURN_IF_ERROR(add({made, p.hidden, made, count, 1.0f, 1.0f, p.dtype}));
    hidden = p.before;
  }
  return runtime::ended(p, block, hidden, x, made, scratch);
}

}  // namespace regatta::cpu
