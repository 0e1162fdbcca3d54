// NEON of every aarch64 CPU. See isa.inl.
#define REGATTA_ISA neon
#define REGATTA_VEC_INL "vec_neon.inl"
#define REGATTA_CODES_INL "codes_neon.inl"
#define REGATTA_VALUES_INL "values_neon.inl"
#define REGATTA_DOT_INL "dot_neon.inl"
#define REGATTA_HAS_BF16_DOT 0
#define REGATTA_HAS_QUADS 0
#define REGATTA_HAS_SWAPPED_PAIRS 0
#define REGATTA_HAS_CODE_TABLES 0
#define REGATTA_HAS_TILES 0
#define REGATTA_HAS_STREAMS 0
#include "isa.inl"
