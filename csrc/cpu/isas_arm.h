// The kernel sets of aarch64. See isas.h. No include guard: it is read in two ways.
//
// SVE as wide as NEON (Neoverse N2, V2) would do no more than NEON does. Of 256 and 512 bits there
// is no set: its vectors can be members of Vec only where the command line fixes their length.
#ifndef REGATTA_COMPILE_ISAS

// neon is what every aarch64 CPU has. neon_dot multiplies int8 by SDOT, neon_bf16 bfloat16 by BFDOT
// and int8 by USDOT. FEAT_FP16 is in no row: sums are of float, and conversions need it not.
#define REGATTA_ISAS(ROW, ...)                                                          \
  ROW(kNeonBf16, "neon_bf16", neon_bf16, true, false, "asimddp bf16 i8mm", __VA_ARGS__) \
  ROW(kNeonDot, "neon_dot", neon_dot, false, false, "asimddp", __VA_ARGS__)             \
  ROW(kNeon, "neon", neon, false, false, "asimd", __VA_ARGS__)                          \
  ROW(kScalar, "scalar", scalar, false, false, "", __VA_ARGS__)

#define REGATTA_IN_INT8_ISA(ISA, ...) REGATTA_IN_ISA(ISA, __VA_ARGS__)

#else

// clang-format off: the list's order
#include "isa_scalar.inl"
#include "isa_neon.inl"
#include "isa_neon_dot.inl"
#include "isa_neon_bf16.inl"
// clang-format on

#endif
