// Compiles one .inl file once per kernel set. Deliberately without an include guard.
//
// Use once in a .cc, after EVERY other include (std, intrinsics, our headers):
//
//   #define REGATTA_INL "<op>.inl"
//   #include "foreach_isa.h"
//
// The .inl (no guard either) puts its code in `namespace regatta::cpu::REGATTA_ISA` (scalar, avx2,
// neon, ...), where the vector type of vec.h is already defined. Rules:
//  * Never include a std or intrinsics header from an .inl: inline functions parsed inside the
//    target pragma would be compiled for that ISA and the linker may pick them for everybody.
//  * Everything in an .inl lives in the ISA namespace (no `inline` functions outside of it).
//  * Each ISA namespace is complete: every op, every dtype. Chosen at run time (cpu/dispatch.h).
//  * isas.h lists the sets; isa.inl says what one defines, and what is 1 where a set has it.
//  * avx512_bf16 is the code of the set "amx" too: its products have kernels of tiles (tiles.inl)
//    beside those of vectors, and running_isa() chooses.
//  * With `#define REGATTA_FOREACH_VNNI` there is one more namespace on x86, avx512_vnni, for CPUs
//    that have vpdpbusd without vdpbf16ps. No op runs in it: kernels that others call may choose
//    it.
//  * With -DREGATTA_LAST_ISA_ALONE avx512_bf16 stands for all others of x86: a library for tests
//    that look at no other, with one set to compile. With -DREGATTA_TWO_ISAS avx2 stands for
//    scalar, and avx512_bf16 for the others: one set of each way to mask the ends of rows.

#ifndef REGATTA_INL
#error "define REGATTA_INL before including foreach_isa.h"
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// GCC 12 reports the "undefined" operands of its own intrinsics (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include "vec.h"

#define REGATTA_COMPILE_ISAS
#include "isas.h"
#undef REGATTA_COMPILE_ISAS

#undef REGATTA_INL
