// AVX-512 with vpdpbusd, for products of int8. See isa.inl.
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#define REGATTA_ISA avx512_vnni
#define REGATTA_VEC_INL "vec_avx512.inl"
#define REGATTA_CODES_INL "codes_avx512.inl"
#define REGATTA_VALUES_INL "values_avx512.inl"
#define REGATTA_DOT_INL "dot_vnni.inl"
#define REGATTA_HAS_BF16_DOT 0
#define REGATTA_HAS_QUADS 0
#define REGATTA_HAS_SWAPPED_PAIRS 0
#define REGATTA_HAS_CODE_TABLES 0
#define REGATTA_HAS_TILES 0
#define REGATTA_HAS_STREAMS 0
#include "isa.inl"
#pragma GCC pop_options
