#include "runtime/rows.h"

#include <utility>

#include "regatta/embedding.h"

namespace regatta::runtime {

Status gather_rows(const int32_t* ids, int64_t num_rows, const void* x, int64_t num_source_rows,
                   int64_t width, DType dtype, void* out) {
  EmbeddingParams p = {};
  p.token_ids = ids;
  p.weight = x;
  p.out = out;
  p.num_tokens = num_rows;
  p.vocab_size = num_source_rows;
  p.hidden_size = width;
  p.dtype = dtype;
  return cpu::embedding(p);
}

void keep_wanted_adapters(BlockParams& p, cpu::Scratch& scratch) {
  if (p.adapters.ids == nullptr || p.rows == nullptr) return;
  auto* const ids = scratch.take<int32_t>(p.num_tokens);
  for (int64_t i = 0; i < p.num_tokens; ++i) ids[i] = p.adapters.ids[p.rows[i]];
  p.adapters.ids = ids;
}

Status run_all_rows(BlockParams& p, const std::function<Status()>& run) {
  const int32_t* const rows = std::exchange(p.rows, nullptr);
  if (rows == nullptr) return run();
  cpu::Scratch::Scope scope(cpu::Scratch::mine());
  const int64_t bytes = p.num_tokens * p.hidden_size * dtype_size(p.dtype);
  void* const out = std::exchange(p.hidden_out, cpu::Scratch::mine().take<char>(bytes));
  REGATTA_RETURN_IF_ERROR(run());
  return gather_rows(rows, p.num_rows, p.hidden_out, p.num_tokens, p.hidden_size, p.dtype, out);
}

}  // namespace regatta::runtime
