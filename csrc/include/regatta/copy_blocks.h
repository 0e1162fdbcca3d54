// Copies of cache blocks, over the tensors of all layers.
#pragma once

#include <cstdint>

#include "regatta/types.h"

namespace regatta {

struct CopyBlocksParams {
  void* const* caches = nullptr;         // [num_caches], each [blocks, block_bytes of it]
  const int64_t* block_bytes = nullptr;  // [num_caches], multiples of 16
  const int32_t* copies = nullptr;       // [num_copies, 2]: from, to; no block is both
  int64_t num_caches = 0;
  int64_t num_copies = 0;
};

namespace cpu {
Status copy_blocks(const CopyBlocksParams& params);
}

}  // namespace regatta
