// Copies of cache blocks: one memcpy per tensor and copy, shared among threads. Bound: memory.
#include "regatta/copy_blocks.h"

#include <cstring>

#include "thread_pool.h"

namespace regatta::cpu {

Status copy_blocks(const CopyBlocksParams& p) {
  parallel([&](Team& team) {
    team.for_chunks(p.num_caches * p.num_copies, 4, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t bytes = p.block_bytes[i / p.num_copies];
        const int32_t* copy = p.copies + 2 * (i % p.num_copies);
        auto* cache = static_cast<char*>(p.caches[i / p.num_copies]);
        std::memcpy(cache + copy[1] * bytes, cache + copy[0] * bytes, static_cast<size_t>(bytes));
      }
    });
  });
  return {};
}

}  // namespace regatta::cpu
