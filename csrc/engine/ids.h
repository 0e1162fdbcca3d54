// Lists of token ids and of blocks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace regatta::engine {

using Ids = std::vector<int32_t>;

inline bool holds(const Ids& ids, int32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

}  // namespace regatta::engine
