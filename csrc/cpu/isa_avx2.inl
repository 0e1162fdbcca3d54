// AVX2, FMA and F16C. See isa.inl.
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define REGATTA_ISA avx2
#define REGATTA_VEC_INL "vec_avx2.inl"
#define REGATTA_CODES_INL "codes_avx2.inl"
#define REGATTA_VALUES_INL "values_avx2.inl"
#define REGATTA_DOT_INL "dot_words_avx2.inl"
#define REGATTA_HAS_BF16_DOT 0
#define REGATTA_HAS_QUADS 0
#define REGATTA_HAS_SWAPPED_PAIRS 0
#define REGATTA_HAS_CODE_TABLES 0
#define REGATTA_HAS_TILES 0
#define REGATTA_HAS_STREAMS 0
#include "isa.inl"
#pragma GCC pop_options
