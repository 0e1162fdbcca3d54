// One kernel set, once more for each .inl of foreach_isa.h. A set's isa_*.inl defines, under its
// target pragma,
//
//   REGATTA_ISA          the namespace
//   REGATTA_VEC_INL      the vector of floats (vec.h says what)
//   REGATTA_CODES_INL    codes of cache rows (vec.h)
//   REGATTA_VALUES_INL   codes of weights as floats, or as pairs of bfloat16 (gemm_codes.inl)
//   REGATTA_DOT_INL      dot products of bytes (dot_int8.inl)
//   REGATTA_HAS_...      what else it has, 1 or 0:
//     BF16_DOT        sums of products of pairs of bfloat16 in one instruction (vdpbf16ps, BFDOT)
//     QUADS           products of 2 x 4 and 4 x 2 values of bfloat16 (BFMMLA), and of 2 x 8 and 8 x
//     2
//                     bytes (USMMLA), in one instruction
//     SWAPPED_PAIRS   multiply-adds of float that give the same sums, where pairs are slow
//     CODE_TABLES     tables that make pairs of codes of cache rows (codes_pairs.inl)
//     TILES           kernels of tiles (tiles.inl), chosen by running_isa()
//     STREAMS         CPUs that prefetch streams best into L2 (streams_into_l2())
//
// and includes this file.
#include REGATTA_VEC_INL
#include REGATTA_INL
#undef REGATTA_ISA
#undef REGATTA_VEC_INL
#undef REGATTA_CODES_INL
#undef REGATTA_VALUES_INL
#undef REGATTA_DOT_INL
#undef REGATTA_HAS_BF16_DOT
#undef REGATTA_HAS_QUADS
#undef REGATTA_HAS_SWAPPED_PAIRS
#undef REGATTA_HAS_CODE_TABLES
#undef REGATTA_HAS_TILES
#undef REGATTA_HAS_STREAMS
