// One instruction set of foreach_isa.h.
#if REGATTA_VECTOR_BITS == 512
#include "vec_avx512.inl"
#elif REGATTA_VECTOR_BITS == 256
#include "vec_avx2.inl"
#else
#include "vec_scalar.inl"
#endif
#include REGATTA_INL
#undef REGATTA_ISA
#undef REGATTA_HAS_BF16_DOT
#undef REGATTA_VECTOR_BITS
#undef REGATTA_HAS_VNNI
