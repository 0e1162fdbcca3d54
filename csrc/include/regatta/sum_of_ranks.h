// The sum over ranks within a block's region, which returns no status.
#pragma once

#include <cstdint>

#include "regatta/types.h"

namespace regatta {

// values [count] become the sum of all ranks'; by one thread of a region. Nothing with one rank. A
// failure is kept, and nothing is summed behind it.
void sum_of_ranks(float* values, int64_t count);

// What sum_of_ranks() failed with, once for each failure.
Status take_failure_of_ranks();

}  // namespace regatta
