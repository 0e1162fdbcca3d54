// AVX-512 with vpdpbusd, vdpbf16ps and VBMI; with tiles "amx" too. See isa.inl.
#pragma GCC push_options
#pragma GCC target( \
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx512bf16")
#define REGATTA_ISA avx512_bf16
#define REGATTA_VEC_INL "vec_avx512.inl"
#define REGATTA_CODES_INL "codes_avx512.inl"
#define REGATTA_VALUES_INL "values_avx512.inl"
#define REGATTA_DOT_INL "dot_vnni.inl"
#define REGATTA_HAS_BF16_DOT 1
#define REGATTA_HAS_QUADS 0
#define REGATTA_HAS_SWAPPED_PAIRS 1
#define REGATTA_HAS_CODE_TABLES 1
#define REGATTA_HAS_TILES REGATTA_TILES
#define REGATTA_HAS_STREAMS 1
#include "isa.inl"
#pragma GCC pop_options
