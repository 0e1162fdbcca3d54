// Some rows of a block on the CPU, which computes in the thread's scratch.
#pragma once

#include <functional>

#include "cpu/thread_pool.h"
#include "regatta/blocks.h"

namespace regatta::runtime {

// out [num_rows, width] = the rows `ids` of x [num_source_rows, width].
Status gather_rows(const int32_t* ids, int64_t num_rows, const void* x, int64_t num_source_rows,
                   int64_t width, DType dtype, void* out);
// Where some rows alone are computed, their adapters, in `scratch`, in place of all rows'.
void keep_wanted_adapters(BlockParams& params, cpu::Scratch& scratch);
// run(), which makes all rows of `params`, and of these the wanted ones.
Status run_all_rows(BlockParams& params, const std::function<Status()>& run);

}  // namespace regatta::runtime
