// Rotary embedding and the write into the paged cache. See rope.inl.
#include <string>
#include <type_traits>

#include "attention_checks.h"
#include "dispatch.h"
#include "regatta/attention.h"
#include "regatta/sum_of_ranks.h"
#include "thread_pool.h"

#define REGATTA_INL "rope_and_cache_write.inl"
#include "foreach_isa.h"

namespace regatta::cpu {
namespace {
const OpTable<RopeAndCacheWriteParams> kRopeAndCacheWrite(
    "rope_and_cache_write", {REGATTA_CANDIDATES(run_rope_and_cache_write)});
}

Status check_rope_indices(const char* op, const int32_t* positions, const int32_t* slot_mapping,
                          int64_t num_tokens, int64_t num_positions, int64_t num_slots) {
  for (int64_t i = 0; i < num_tokens; ++i) {
    const bool bad_position = positions[i] < 0 || positions[i] >= num_positions;
    const bool bad_slot = slot_mapping[i] < -1 || slot_mapping[i] >= num_slots;
    if (!bad_position && !bad_slot) continue;
    return Status::error(std::string(op) + ": " + (bad_position ? "positions" : "slot_mapping") +
                         "[" + std::to_string(i) + "] is " +
                         std::to_string(bad_position ? positions[i] : slot_mapping[i]) +
                         " (allowed: " + (bad_position ? "0" : "-1") + " .. " +
                         std::to_string((bad_position ? num_positions : num_slots) - 1) + ")");
  }
  return {};
}

Status rope_and_cache_write(const RopeAndCacheWriteParams& params) {
  for (int64_t i = 0; params.block_positions && i < params.num_tokens; ++i) {
    const int32_t row = params.block_positions[i];
    if (row >= 0 && row < params.num_positions) continue;
    return Status::error("rope_and_cache_write: block_positions[" + std::to_string(i) + "] is " +
                         std::to_string(row) + " (allowed: 0 .. " +
                         std::to_string(params.num_positions - 1) + ")");
  }
  const Status status =
      check_rope_indices("rope_and_cache_write", params.positions, params.slot_mapping,
                         params.num_tokens, params.rope_cache ? params.num_positions : INT64_MAX,
                         params.cache.num_blocks * params.cache.block_size);
  return status.ok() ? kRopeAndCacheWrite.run(params) : status;
}

}  // namespace regatta::cpu
