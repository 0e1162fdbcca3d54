// Some rows of a block on the CPU, which computes in the thread's scratch.
#pragma once

#include <functional>

#include "regatta/blocks.h"

namespace regatta::runtime {

// out [num_rows, width] = the rows `ids` of x [num_source_rows, width].
Status gather_rows(const int32_t* ids, int64_t num_rows, const void* x, int64_t num_source_rows,
                   int64_t width, DType dtype, void* out);
// run(), which makes all rows of `params`, and of these the wanted ones.
Status run_all_rows(BlockParams& params, const std::function<Status()>& run);

}  // namespace regatta::runtime
