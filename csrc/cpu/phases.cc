// The phases of blocks beside their products: see block.inl.
#include <algorithm>
#include <initializer_list>

#include "gemm.h"
#include "regatta/blocks.h"
#include "regatta/sum_of_ranks.h"

#define REGATTA_INL "phases.inl"
#include "foreach_isa.h"
