// NEON with dot products of int8. See isa.inl.
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#define REGATTA_ISA neon_dot
#define REGATTA_VEC_INL "vec_neon.inl"
#define REGATTA_CODES_INL "codes_neon.inl"
#define REGATTA_VALUES_INL "values_neon.inl"
#define REGATTA_DOT_INL "dot_sdot.inl"
#define REGATTA_HAS_BF16_DOT 0
#define REGATTA_HAS_QUADS 0
#define REGATTA_HAS_SWAPPED_PAIRS 0
#define REGATTA_HAS_CODE_TABLES 0
#define REGATTA_HAS_TILES 0
#define REGATTA_HAS_STREAMS 0
#include "isa.inl"
#pragma GCC pop_options
