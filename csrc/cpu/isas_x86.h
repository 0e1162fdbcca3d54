// The kernel sets of x86-64. See isas.h. No include guard: it is read in two ways.
#ifndef REGATTA_COMPILE_ISAS

// Whether the compiler's assembler knows tiles.
#define REGATTA_TILES (__GNUC__ >= 11)

#define REGATTA_NEEDS_AVX2 "avx2 fma f16c"
#define REGATTA_NEEDS_AVX512 REGATTA_NEEDS_AVX2 " avx512f avx512bw avx512dq avx512vl"
#define REGATTA_NEEDS_BF16 REGATTA_NEEDS_AVX512 " avx512_vbmi avx512_vnni avx512_bf16"
#define REGATTA_NEEDS_AMX REGATTA_NEEDS_BF16 " amx_bf16 amx_int8"

// avx512_bf16 has VNNI too. amx is its code, with products of bfloat16 and int8 by tiles; amx_fp16
// with those of dense float16 besides.
#define REGATTA_ISAS(ROW, ...)                                                               \
  ROW(kAmx, "amx", avx512_bf16, true, true, REGATTA_NEEDS_AMX, __VA_ARGS__)                  \
  ROW(kAvx512Bf16, "avx512_bf16", avx512_bf16, true, false, REGATTA_NEEDS_BF16, __VA_ARGS__) \
  ROW(kAvx512, "avx512", avx512, false, false, REGATTA_NEEDS_AVX512, __VA_ARGS__)            \
  ROW(kAvx2, "avx2", avx2, false, false, REGATTA_NEEDS_AVX2, __VA_ARGS__)                    \
  ROW(kScalar, "scalar", scalar, false, false, "", __VA_ARGS__)                              \
  ROW(kAmxFp16, "amx_fp16", avx512_bf16, true, true, REGATTA_NEEDS_AMX " amx_fp16", __VA_ARGS__)

// A CPU with vpdpbusd and without vdpbf16ps has a namespace for products of int8, in which no
// operator runs. Where candidates are forced, "avx512" is without vpdpbusd.
#define REGATTA_IN_INT8_ISA(ISA, ...)                                                     \
  ((ISA) == Isa::kAvx512 && !any_kernel_forced() && has_vnni() ? avx512_vnni::__VA_ARGS__ \
                                                               : REGATTA_IN_ISA(ISA, __VA_ARGS__))

#elif defined(REGATTA_LAST_ISA_ALONE) || defined(REGATTA_TWO_ISAS)

#ifdef REGATTA_TWO_ISAS
#include "isa_avx2.inl"
#endif
#include "isa_avx512_bf16.inl"
namespace regatta::cpu {
#ifndef REGATTA_TWO_ISAS
namespace avx2 = avx512_bf16;
#endif
namespace scalar = avx2;
namespace avx512 = avx512_bf16;
namespace avx512_vnni = avx512_bf16;
}  // namespace regatta::cpu

#else

// clang-format off: the list's order
#include "isa_scalar.inl"
#include "isa_avx2.inl"
#include "isa_avx512.inl"
#ifdef REGATTA_FOREACH_VNNI
#include "isa_avx512_vnni.inl"
#endif
#include "isa_avx512_bf16.inl"
// clang-format on

#endif
