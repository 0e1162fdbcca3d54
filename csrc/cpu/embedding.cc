// Rows of a table by token id; a tied model gathers them from its packed LM head, where one row is
// spread over as many cache lines as it has elements (pairs, for bfloat16). Bound: memory latency.
#include "regatta/embedding.h"

#include <string>

#include "dispatch.h"
#include "gemm.h"
#include "thread_pool.h"

#define REGATTA_INL "embedding.inl"
#include "foreach_isa.h"

namespace regatta::cpu {

REGATTA_OPERATOR(embedding, EmbeddingParams)

}  // namespace regatta::cpu
