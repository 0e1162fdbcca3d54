// NEON with dot products of bfloat16, and of unsigned times signed bytes. See isa.inl.
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod+bf16+i8mm")
#define REGATTA_ISA neon_bf16
#define REGATTA_VEC_INL "vec_neon.inl"
#define REGATTA_CODES_INL "codes_neon.inl"
#define REGATTA_VALUES_INL "values_neon.inl"
#define REGATTA_DOT_INL "dot_usdot.inl"
#define REGATTA_HAS_BF16_DOT 1
#define REGATTA_HAS_QUADS 1
#define REGATTA_HAS_SWAPPED_PAIRS 0
#define REGATTA_HAS_CODE_TABLES 0
#define REGATTA_HAS_TILES 0
#define REGATTA_HAS_STREAMS 0
#include "isa.inl"
#pragma GCC pop_options
