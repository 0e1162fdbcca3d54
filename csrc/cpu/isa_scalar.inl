// One lane of plain C++: what every other set is tested against. See isa.inl.
#define REGATTA_ISA scalar
#define REGATTA_VEC_INL "vec_scalar.inl"
#define REGATTA_CODES_INL "codes_scalar.inl"
#define REGATTA_VALUES_INL "values_scalar.inl"
#define REGATTA_DOT_INL "dot_scalar.inl"
#define REGATTA_HAS_BF16_DOT 0
#define REGATTA_HAS_QUADS 0
#define REGATTA_HAS_SWAPPED_PAIRS 0
#define REGATTA_HAS_CODE_TABLES 0
#define REGATTA_HAS_TILES 0
#define REGATTA_HAS_STREAMS 0
#include "isa.inl"
